"""The OpenAI-GA-shaped realtime protocol: wire JSON <-> protocol commands and events. Pure.

One sequenced event is one wire message, so `server_event_seq` counts messages. Ids are derived from
session, turn and sequence: a replayed message has the bytes it had the first time. Our own
extensions are the `duplex` field of standard events and the event types that start with `duplex.`.
"""

from typing import Annotated, Any

import msgspec

from duplex_sidecar.protocol.commands import (
    AppendInput,
    AudioEncoding,
    ClearInput,
    Close,
    Command,
    CommitInput,
    Heartbeat,
    SetInputFormat,
)
from duplex_sidecar.protocol.errors import ERRORS, ClientError, ErrorCode
from duplex_sidecar.protocol.events import (
    Alive,
    Audio,
    Closed,
    Event,
    Failure,
    InputAccepted,
    InputCleared,
    InputFormatSet,
    ResyncRequired,
    Sequenced,
    SessionOpened,
    Transcript,
    TurnMark,
    TurnStep,
    UnitDone,
)

MAX_MESSAGE_BYTES = 15 * 1024 * 1024
MAX_FRAMES_PER_APPEND = 2
MAX_ID_CHARACTERS = 512
MAX_DETAIL_CHARACTERS = 400
"""An error's sentence may quote the client, who does not decide how long it gets."""
OUTPUT_RATE_HZ = 24_000

_Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)]
"""It comes back with an error or an acknowledgement."""
_Position = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Beyond 2**53 a JSON number is no exact one in most clients."""

UNSUPPORTED_TYPES = frozenset(
    {
        "response.create",
        "response.cancel",
        "conversation.item.create",
        "conversation.item.delete",
        "conversation.item.truncate",
        "conversation.item.retrieve",
        "output_audio_buffer.clear",
        "input.text.append",
        "playback.ack",
        "barge_in",
    }
)
"""Public event types that this door knows and answers with `unsupported_event`."""

# --- client -> server ---------------------------------------------------------------------------


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    rate: int | None = None


class _AudioInput(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    turn_detection: None = None
    noise_reduction: None = None
    transcription: None = None


class _AudioOutput(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None


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


_WIRE_TYPES: dict[str, type[msgspec.Struct]] = {
    "session.update": _SessionUpdate,
    "input_audio_buffer.append": _Append,
    "input_audio_buffer.commit": _Commit,
    "input_audio_buffer.clear": _Clear,
    "session.heartbeat": _Heartbeat,
    "session.close": _Close,
    "session.resume": Resume,
}
_decode_head = msgspec.json.Decoder(_Head).decode
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in _WIRE_TYPES.items()}

_IMMUTABLE = frozenset(
    {"instructions", "model", "voice", "ref_audio", "ref_audio_path", "tools", "prompt"}
)
_ENCODINGS = {
    "audio/pcm": AudioEncoding.PCM16,
    "audio/pcmu": AudioEncoding.G711_ULAW,
    "audio/pcma": AudioEncoding.G711_ALAW,
    "audio/x-f32le": AudioEncoding.FLOAT32,
}
_DEFAULT_RATES_HZ = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}


class WireError(ClientError):
    """A ClientError with the id of the event that caused it."""

    def __init__(
        self, code: ErrorCode, detail: str, event_id: str | None, param: str | None = None
    ) -> None:
        super().__init__(code, detail[:MAX_DETAIL_CHARACTERS], param)
        self.event_id = event_id


def parse_message(raw: str | bytes) -> Command | Resume:
    """One wire message to a command. Raises WireError with the offending event's id."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise WireError(ErrorCode.EVENT_TOO_LARGE, f"at most {MAX_MESSAGE_BYTES} bytes", None)
    try:
        head = _decode_head(raw)
    except msgspec.ValidationError as error:
        raise WireError(ErrorCode.INVALID_EVENT, str(error), None) from None
    except (msgspec.DecodeError, UnicodeError):
        raise WireError(ErrorCode.INVALID_JSON, "the message is not JSON", None) from None
    if head.type in UNSUPPORTED_TYPES:
        raise WireError(
            ErrorCode.UNSUPPORTED_EVENT, f"{head.type} is not supported", head.event_id, "type"
        )
    decoder = _DECODERS.get(head.type)
    if decoder is None:
        raise WireError(
            ErrorCode.UNKNOWN_EVENT, f"unknown event type {head.type[:80]!r}", head.event_id, "type"
        )
    try:
        return _to_command(decoder.decode(raw))
    except msgspec.ValidationError as error:
        raise _invalid(str(error), head.event_id) from None
    except WireError:
        raise
    except ClientError as error:
        raise WireError(error.code, error.detail, head.event_id, error.param) from None


def _invalid(reason: str, event_id: str | None) -> WireError:
    if not reason.startswith("Invalid base64"):
        return WireError(ErrorCode.INVALID_EVENT, reason, event_id)
    if reason.endswith("`$.audio`"):
        return WireError(ErrorCode.INVALID_AUDIO, "not valid base64", event_id, "audio")
    return WireError(ErrorCode.INVALID_FRAME, "not valid base64", event_id, "video_frames")


def _to_command(wire: msgspec.Struct) -> Command | Resume:
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


def _settings(wire: _SessionUpdate) -> SetInputFormat:
    for key in wire.session:
        if key in _IMMUTABLE:
            raise ClientError(ErrorCode.IMMUTABLE_SETTING, param=f"session.{key}")
        if "window" in key:
            param = f"session.{key[:80]}"
            raise ClientError(ErrorCode.SLIDING_WINDOW_UPDATE_UNSUPPORTED, param=param)
    settings = msgspec.convert(wire.session, _Settings)
    audio_input = settings.audio.input if settings.audio else None
    audio_output = settings.audio.output if settings.audio else None
    if audio_output and audio_output.format:
        wanted = audio_output.format
        if wanted.type != "audio/pcm" or wanted.rate not in (None, OUTPUT_RATE_HZ):
            raise ClientError(
                ErrorCode.UNSUPPORTED_AUDIO_FORMAT,
                f"output is audio/pcm at {OUTPUT_RATE_HZ} Hz",
                "session.audio.output.format",
            )
    wanted = audio_input.format if audio_input else None
    if wanted is None:
        wanted = _Format("audio/pcm", None)
    encoding = _ENCODINGS.get(wanted.type)
    if encoding is None:
        raise ClientError(
            ErrorCode.UNSUPPORTED_AUDIO_FORMAT,
            f"one of {', '.join(sorted(_ENCODINGS))}",
            "session.audio.input.format.type",
        )
    rate_hz = wanted.rate if wanted.rate is not None else _DEFAULT_RATES_HZ.get(wanted.type)
    if rate_hz is None or not 8_000 <= rate_hz <= 192_000:
        raise ClientError(ErrorCode.INVALID_SAMPLE_RATE, param="session.audio.input.format.rate")
    return SetInputFormat(encoding, rate_hz, wire.event_id)


# --- server -> client ---------------------------------------------------------------------------


def render_event(event: Event, session: str, model: str) -> bytes:
    """One event to one wire message (UTF-8 JSON)."""
    if isinstance(event, Sequenced):
        body = _sequenced(event, session)
        body["event_id"] = f"event_{event.sequence}"
        body["server_event_seq"] = event.sequence
    else:
        body = _unsequenced(event, session, model)
        body.setdefault("event_id", "event_now")
    return msgspec.json.encode(body)


def _session_object(session: str, model: str, rate_hz: int) -> dict[str, Any]:
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session,
        "model": model,
        "output_modalities": ["audio"],
        "audio": {
            "input": {"format": {"type": "audio/pcm", "rate": rate_hz}, "turn_detection": None},
            "output": {"format": {"type": "audio/pcm", "rate": OUTPUT_RATE_HZ}},
        },
    }


def _unsequenced(event: Event, session: str, model: str) -> dict[str, Any]:
    match event:
        case SessionOpened():
            return {
                "type": "session.resumed" if event.resumed else "session.created",
                "session": _session_object(session, model, event.input_rate_hz),
                "duplex": msgspec.to_builtins(event),
            }
        case InputFormatSet():
            return {
                "type": "session.updated",
                "session": _session_object(session, model, event.rate_hz),
            }
        case InputAccepted():
            return {
                "type": "input_audio_buffer.committed",
                "item_id": f"item_in_{event.unit}",
                "previous_item_id": f"item_in_{event.unit - 1}" if event.unit > 1 else None,
                "duplex": msgspec.to_builtins(event),
            }
        case InputCleared():
            return {"type": "input_audio_buffer.cleared"}
        case ResyncRequired():
            return {"type": "session.resync_required", "duplex": msgspec.to_builtins(event)}
        case Alive():
            return {"type": "session.heartbeat_ack", "client_event_id": event.event_id}
        case Failure():
            entry = ERRORS[event.code]
            return {
                "type": "error",
                "error": {
                    "type": entry.type,
                    "code": event.code,
                    "message": event.detail,
                    "param": event.param,
                    "event_id": event.event_id,
                    "retryable": entry.retryable,
                },
            }
        case Closed():
            return {"type": "session.closed", "reason": event.code, "message": event.detail}
        case Sequenced():  # pragma: no cover - rendered by _sequenced
            raise ValueError("a sequenced event")


def _sequenced(event: Sequenced, session: str) -> dict[str, Any]:
    body = event.body
    if isinstance(body, UnitDone):
        return msgspec.to_builtins(body) | {"type": "duplex.unit"}
    names = {
        "response_id": f"resp_{session}_{body.turn}",
        "item_id": f"item_{session}_{body.turn}",
        "output_index": 0,
        "content_index": 0,
    }
    match body:
        case Transcript():
            return {"type": "response.output_audio_transcript.delta", "delta": body.text} | names
        case Audio():
            facts = {
                "unit": body.unit,
                "epoch": body.epoch,
                "stage2_sequence": body.stage2_sequence,
                "from_sample": body.from_sample,
            }
            return {
                "type": "response.output_audio.delta",
                "delta": body.pcm_s16le,
                "duplex": facts,
            } | names
        case TurnMark():
            return _turn_mark(body, names)


def _turn_mark(mark: TurnMark, names: dict[str, Any]) -> dict[str, Any]:
    response_id, item_id = names["response_id"], names["item_id"]
    closing = mark.step is TurnStep.ITEM_DONE or mark.step is TurnStep.ENDED
    item = {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "role": "assistant",
        "status": "completed" if closing else "in_progress",
        "content": [{"type": "output_audio", "transcript": mark.text}] if closing else [],
    }
    response = {
        "id": response_id,
        "object": "realtime.response",
        "status": "completed" if mark.step is TurnStep.ENDED else "in_progress",
        "output": [item] if mark.step is TurnStep.ENDED else [],
        "output_modalities": ["audio"],
    }
    part = {"type": "audio", "transcript": mark.text}
    of_item = {"response_id": response_id, "output_index": 0, "item": item}
    match mark.step:
        case TurnStep.STARTED:
            return {"type": "response.created", "response": response}
        case TurnStep.ITEM_STARTED:
            return {"type": "response.output_item.added"} | of_item
        case TurnStep.CONTENT_STARTED:
            return {"type": "response.content_part.added", "part": part} | names
        case TurnStep.AUDIO_DONE:
            return {"type": "response.output_audio.done"} | names
        case TurnStep.TRANSCRIPT_DONE:
            return {
                "type": "response.output_audio_transcript.done",
                "transcript": mark.text,
            } | names
        case TurnStep.CONTENT_DONE:
            return {"type": "response.content_part.done", "part": part} | names
        case TurnStep.ITEM_DONE:
            return {"type": "response.output_item.done"} | of_item
        case TurnStep.ENDED:
            return {
                "type": "response.done",
                "response": response,
                "duplex": {"samples": mark.samples, "unit": mark.unit},
            }
