"""The OpenAI-GA-shaped realtime protocol: what a client says, wire JSON -> protocol commands. Pure.

What it hears is `doors.openai_events`. Of our own are the fields that the public protocol does not
have, such as `from_sample` or `video_frames`.
"""

import re
from typing import Annotated, Any

import msgspec

from duplex_sidecar.protocol.commands import (
    AcknowledgePlayback,
    AppendInput,
    AudioEncoding,
    CancelReply,
    ClearInput,
    Close,
    Command,
    CommitInput,
    Heartbeat,
    SetInputFormat,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode

MAX_MESSAGE_BYTES = 15 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
"""Of an event that carries no sound: what has to wait for somebody is bounded by it."""
MAX_FRAMES_PER_APPEND = 2
MAX_ID_CHARACTERS = 512
MAX_PARAM_CHARACTERS = 200
MAX_DETAIL_CHARACTERS = 400
"""An error's sentence may quote the client, who does not decide how long it gets."""
OUTPUT_RATE_HZ = 24_000

_Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]
"""It comes back with an error or an acknowledgement."""
_Position = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Beyond 2**53 a JSON number is no exact one in most clients."""

_Sequence = Annotated[int, msgspec.Meta(ge=1, le=2**53)]

UNSUPPORTED_TYPES = {
    "response.create": "the model decides by itself when it speaks",
    "conversation.item.create": "a conversation is made of seconds of sound; initialText opens it",
    "conversation.item.delete": "seconds of sound cannot be taken out; conversation.item.truncate"
    " takes back what the user has not heard",
    "conversation.item.retrieve": "items are not kept; their events are, for a while",
    "output_audio_buffer.clear": "no sound waits here, it has been sent; stop playing it, then"
    " response.cancel and conversation.item.truncate",
    "input.text.append": "the model hears, it does not read",
    "barge_in": "response.cancel stops the reply, conversation.item.truncate takes back its rest",
}
"""Public event types that this door knows and answers with `unsupported_event`, and why."""


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    rate: int | None = None


class _AudioInput(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    turn_detection: Any = None
    noise_reduction: Any = None
    transcription: Any = None


class _AudioOutput(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    voice: Any = None
    speed: Any = None


class _AudioSettings(msgspec.Struct, forbid_unknown_fields=True):
    input: _AudioInput | None = None
    output: _AudioOutput | None = None


class _Settings(msgspec.Struct):
    type: str = "realtime"
    audio: _AudioSettings | None = None
    output_modalities: tuple[str, ...] | None = None


class _SessionUpdate(msgspec.Struct, tag_field="type", tag="session.update"):
    session: dict[str, Any]
    event_id: _Id | None = None
    client_sequence: _Sequence | None = None


class _Append(
    msgspec.Struct,
    tag_field="type",
    tag="input_audio_buffer.append",
    forbid_unknown_fields=True,
):
    audio: bytes
    video_frames: tuple[bytes, ...] = ()
    from_sample: _Position | None = None
    is_speech: bool | None = None
    force_listen: bool = False
    event_id: _Id | None = None


class _Commit(msgspec.Struct, tag_field="type", tag="input_audio_buffer.commit"):
    event_id: _Id | None = None


class _Clear(msgspec.Struct, tag_field="type", tag="input_audio_buffer.clear"):
    event_id: _Id | None = None


class _Cancel(msgspec.Struct, tag_field="type", tag="response.cancel"):
    response_id: _Id | None = None
    event_id: _Id | None = None
    client_sequence: _Sequence | None = None


class _Truncate(msgspec.Struct, tag_field="type", tag="conversation.item.truncate"):
    item_id: _Id
    audio_end_ms: _Position
    content_index: int = 0
    event_id: _Id | None = None
    client_sequence: _Sequence | None = None


class _PlaybackAck(
    msgspec.Struct, tag_field="type", tag="playback.ack", forbid_unknown_fields=True
):
    item_id: _Id
    played_samples: _Position
    event_id: _Id | None = None
    client_sequence: _Sequence | None = None


class _Heartbeat(msgspec.Struct, tag_field="type", tag="session.heartbeat"):
    event_id: _Id | None = None


class _Close(msgspec.Struct, tag_field="type", tag="session.close"):
    event_id: _Id | None = None


class Resume(msgspec.Struct, tag_field="type", tag="session.resume", frozen=True):
    """First message of a connection opened with `resume=1`."""

    last_received_server_event_seq: _Position = 0
    session_id: _Id | None = None
    resume_token: _Id | None = None
    event_id: _Id | None = None


class _Head(msgspec.Struct):
    type: str
    event_id: _Id | None = None


_APPEND = "input_audio_buffer.append"
_WIRE_TYPES: dict[str, type[msgspec.Struct]] = {
    "session.update": _SessionUpdate,
    _APPEND: _Append,
    "input_audio_buffer.commit": _Commit,
    "input_audio_buffer.clear": _Clear,
    "response.cancel": _Cancel,
    "conversation.item.truncate": _Truncate,
    "playback.ack": _PlaybackAck,
    "session.heartbeat": _Heartbeat,
    "session.close": _Close,
    "session.resume": Resume,
}
_decode_head = msgspec.json.Decoder(_Head).decode
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in _WIRE_TYPES.items()}

_SETTABLE = frozenset({"type", "audio", "output_modalities"})
_OUTPUT_MODALITIES = ("audio",)
_SAID_ELSEWHERE = {
    "input_audio_format": "audio.input.format",
    "output_audio_format": "audio.output.format",
    "modalities": "output_modalities",
}
"""Names of the public protocol before it was general, and where it has them now."""
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
"""Where msgspec's sentence says that something does not fit."""
_NAME = re.compile(r"(?P<kind>resp|item)_(?P<session>.{1,64})_(?P<turn>[1-9][0-9]{0,8})")
_NAMED = {"resp": "response", "item": "item"}
_ENCODINGS = {
    "audio/pcm": AudioEncoding.PCM16,
    "audio/pcmu": AudioEncoding.G711_ULAW,
    "audio/pcma": AudioEncoding.G711_ALAW,
    "audio/x-f32le": AudioEncoding.FLOAT32,
}
INPUT_TYPES = {encoding: name for name, encoding in _ENCODINGS.items()}
_DEFAULT_RATES_HZ = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}


class WireError(ClientError):
    """A ClientError with the id of the event that caused it."""

    def __init__(
        self, code: ErrorCode, detail: str, event_id: str | None, param: str | None = None
    ) -> None:
        super().__init__(code, detail[:MAX_DETAIL_CHARACTERS], param)
        self.event_id = event_id


def parse_message(raw: str | bytes, session: str | None = None) -> Command | Resume:
    """One wire message to a command. session: whose items and responses it may name, None: not
    looked at. Raises WireError with the offending event's id."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise WireError(ErrorCode.EVENT_TOO_LARGE, f"at most {MAX_MESSAGE_BYTES} bytes", None)
    try:
        head = _decode_head(raw)
    except msgspec.ValidationError as error:
        raise WireError(ErrorCode.INVALID_EVENT, str(error), None) from None
    except (msgspec.DecodeError, UnicodeError):
        raise WireError(ErrorCode.INVALID_JSON, "the message is not JSON", None) from None
    except RecursionError:
        raise _too_deep(None) from None
    if head.type in UNSUPPORTED_TYPES:
        detail = f"{head.type} is not served: {UNSUPPORTED_TYPES[head.type]}"
        raise WireError(ErrorCode.UNSUPPORTED_EVENT, detail, head.event_id, "type")
    if head.type != _APPEND and len(raw) > MAX_CONTROL_BYTES:
        detail = f"an event without sound may have {MAX_CONTROL_BYTES} bytes"
        raise WireError(ErrorCode.INVALID_EVENT, detail, head.event_id)
    decoder = _DECODERS.get(head.type)
    if decoder is None:
        raise WireError(
            ErrorCode.UNKNOWN_EVENT, f"unknown event type {head.type[:80]!r}", head.event_id, "type"
        )
    try:
        return _to_command(decoder.decode(raw), session)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), head.event_id) from None
    except RecursionError:
        raise _too_deep(head.event_id) from None
    except WireError:
        raise
    except ClientError as error:
        raise WireError(error.code, error.detail, head.event_id, error.param) from None


def _too_deep(event_id: str | None) -> WireError:
    return WireError(ErrorCode.INVALID_JSON, "the message is nested too deeply", event_id)


def _invalid(reason: str, event_id: str | None) -> WireError:
    if not reason.startswith("Invalid base64"):
        found = _AT.search(reason)
        param = found[1][:MAX_PARAM_CHARACTERS] if found else ""
        return WireError(ErrorCode.INVALID_EVENT, reason, event_id, param or None)
    if reason.endswith("`$.audio`"):
        return WireError(ErrorCode.INVALID_AUDIO, "not valid base64", event_id, "audio")
    return WireError(ErrorCode.INVALID_FRAME, "not valid base64", event_id, "video_frames")


def _to_command(wire: msgspec.Struct, session: str | None) -> Command | Resume:
    match wire:
        case _Append():
            if len(wire.video_frames) > MAX_FRAMES_PER_APPEND:
                raise ClientError(ErrorCode.TOO_MANY_FRAMES, param="video_frames")
            return AppendInput(
                audio=wire.audio,
                frames=wire.video_frames,
                from_sample=wire.from_sample,
                is_speech=wire.is_speech,
                force_listen=wire.force_listen,
                event_id=wire.event_id,
            )
        case _Commit():
            return CommitInput(wire.event_id)
        case _Clear():
            return ClearInput(wire.event_id)
        case _Cancel():
            turn = wire.response_id and _turn_of("resp", wire.response_id, session)
            return CancelReply(turn or None, wire.event_id, wire.client_sequence)
        case _Truncate():
            if wire.content_index != 0:
                raise ClientError(ErrorCode.PLAYBACK_ITEM_NOT_FOUND, param="content_index")
            turn = _turn_of("item", wire.item_id, session)
            return TruncateReply(turn, wire.audio_end_ms, wire.event_id, wire.client_sequence)
        case _PlaybackAck():
            turn = _turn_of("item", wire.item_id, session)
            return AcknowledgePlayback(
                turn, wire.played_samples, wire.event_id, wire.client_sequence
            )
        case _Heartbeat():
            return Heartbeat(wire.event_id)
        case _Close():
            return Close(wire.event_id)
        case _SessionUpdate():
            return _settings(wire)
        case Resume():
            return wire
        case _:  # pragma: no cover - every decoder above has its case
            raise ClientError(ErrorCode.UNKNOWN_EVENT)


def _turn_of(kind: str, name: str, session: str | None) -> int:
    """The turn of `resp_<session>_<turn>` or `item_<session>_<turn>`."""
    found = _NAME.fullmatch(name)
    if found and found["kind"] == kind and session in (None, found["session"]):
        return int(found["turn"])
    raise ClientError(ErrorCode.PLAYBACK_ITEM_NOT_FOUND, param=f"{_NAMED[kind]}_id")


def _require_settable(settings: _Settings) -> None:
    """What this door has no choice of may be said as it is, or not at all."""
    audio = settings.audio or _AudioSettings()
    heard, spoken = audio.input or _AudioInput(), audio.output or _AudioOutput()
    fixed = {
        "output_modalities": settings.output_modalities not in (None, _OUTPUT_MODALITIES),
        "audio.input.turn_detection": heard.turn_detection is not None,
        "audio.input.noise_reduction": heard.noise_reduction is not None,
        "audio.input.transcription": heard.transcription is not None,
        "audio.output.voice": spoken.voice is not None,
        "audio.output.speed": spoken.speed is not None,
    }
    for name, differs in fixed.items():
        if differs:
            raise ClientError(ErrorCode.IMMUTABLE_SETTING, param=f"session.{name}")


def _settings(wire: _SessionUpdate) -> SetInputFormat:
    for key in wire.session:
        if "window" in key:
            param = f"session.{key[:80]}"
            raise ClientError(ErrorCode.SLIDING_WINDOW_UPDATE_UNSUPPORTED, param=param)
        if key not in _SETTABLE:
            new = _SAID_ELSEWHERE.get(key)
            detail = f"{key} is not known here: say session.{new}" if new else ""
            raise ClientError(ErrorCode.IMMUTABLE_SETTING, detail, f"session.{key[:80]}")
    try:
        settings = msgspec.convert(wire.session, _Settings)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(str(error).replace("`$", "`$.session", 1)) from None
    _require_settable(settings)
    audio_input = settings.audio.input if settings.audio else None
    audio_output = settings.audio.output if settings.audio else None
    if audio_output and audio_output.format:
        wanted = audio_output.format
        if wanted.type != "audio/pcm" or wanted.rate not in (None, OUTPUT_RATE_HZ):
            raise ClientError(
                ErrorCode.UNSUPPORTED_AUDIO_FORMAT,
                f"output is audio/pcm at {OUTPUT_RATE_HZ} Hz, not {_format_said(wanted)}",
                "session.audio.output.format",
            )
    wanted = audio_input.format if audio_input else None
    if wanted is None:
        wanted = _Format("audio/pcm", None)
    encoding = _ENCODINGS.get(wanted.type)
    if encoding is None:
        raise ClientError(
            ErrorCode.UNSUPPORTED_AUDIO_FORMAT,
            f"{wanted.type[:80]!r} is none of {', '.join(sorted(_ENCODINGS))}",
            "session.audio.input.format.type",
        )
    rate_hz = wanted.rate if wanted.rate is not None else _DEFAULT_RATES_HZ.get(wanted.type)
    if rate_hz is None or not 8_000 <= rate_hz <= 192_000:
        raise ClientError(ErrorCode.INVALID_SAMPLE_RATE, param="session.audio.input.format.rate")
    return SetInputFormat(encoding, rate_hz, wire.event_id, wire.client_sequence)


def _format_said(said: _Format) -> str:
    rate = "" if said.rate is None else f" at {said.rate} Hz"
    return f"{said.type[:80]!r}{rate}"
