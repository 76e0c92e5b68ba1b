"""What the gateway reads of the realtime protocol, and the few events that are its own. Pure.

Messages pass as they are. Of a client's message it reads the type and how many samples it carries
(from the length of the base64 text, which is not decoded); of a server's, its type, its number and
what an answer refers to.
"""

import sys
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec

from duplex_sidecar.doors.openai_events import passing_event_id, render_event
from duplex_sidecar.doors.openai_wire import (
    MAX_CONTROL_BYTES,
    MAX_ID_CHARACTERS,
    parse_message,
)
from duplex_sidecar.protocol.commands import (
    AcknowledgePlayback,
    AudioEncoding,
    CancelReply,
    ClearInput,
    Close,
    CommitInput,
    Heartbeat,
    SetInputFormat,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Alive, Failure, InputCleared

GATEWAY_ID_PREFIX: Final = "duplex_gateway_"
"""Of the event ids under which input goes to the sidecar, so that a refusal names exactly one
message, whatever ids the client uses. The client's own id is put back into the answer."""

_OBJECTS_BYTES: Final = 512
"""About what it takes to keep a message, besides its bytes and its id."""

MAX_COMMAND_BYTES: Final = 4096
"""A larger command is passed on once and not kept."""

_SAMPLE_BYTES = {
    AudioEncoding.PCM16: 2,
    AudioEncoding.FLOAT32: 4,
    AudioEncoding.G711_ULAW: 1,
    AudioEncoding.G711_ALAW: 1,
}


class InputFormat(msgspec.Struct, frozen=True):
    """How a client's samples are written."""

    encoding: AudioEncoding = AudioEncoding.PCM16
    rate_hz: int = 24_000

    def samples(self, payload_bytes: int) -> int:
        """Samples in so many bytes; 0 for bytes that are no whole samples, which are refused."""
        each = _SAMPLE_BYTES[self.encoding]
        return 0 if payload_bytes % each else payload_bytes // each


class Kind(StrEnum):
    """Of client messages, by what a reconnect has to do with them."""

    APPEND = "append"
    COMMIT = "commit"
    CLEAR = "clear"
    FORMAT = "format"
    COMMAND = "command"
    """A numbered command about a reply: said again to each owner until one answers it."""
    HEARTBEAT = "heartbeat"
    CLOSE = "close"
    OTHER = "other"
    """Passed on once and forgotten: what is refused whoever gets it, or says nothing."""
    TOO_LARGE = "too_large"
    """Refused here: an event without sound that is larger than `MAX_CONTROL_BYTES`."""


class ClientMessage(msgspec.Struct, frozen=True):
    """payload_bytes: of the audio, decoded; -1 where the text cannot be base64. client_sequence: of
    a numbered command, or format."""

    kind: Kind
    message: bytes
    event_id: str | None = None
    payload_bytes: int = 0
    from_sample: int | None = None
    format: InputFormat | None = None
    client_sequence: int | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.message)

    @property
    def memory_bytes(self) -> int:
        """What keeping it takes, with the id, which may be of foreign characters."""
        return sys.getsizeof(self.message) + sys.getsizeof(self.event_id) + _OBJECTS_BYTES


class _Head(msgspec.Struct):
    type: str
    event_id: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARACTERS)] | None = None
    audio: str = ""
    video_frames: tuple[msgspec.Raw, ...] = ()
    from_sample: int | None = None


_decode_head = msgspec.json.Decoder(_Head).decode


def read_client_message(message: bytes) -> ClientMessage:
    """Never raises: what cannot be read is passed on, and refused by the one who has to know."""
    try:
        head = _decode_head(message)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ClientMessage(Kind.OTHER, message)
    if head.type == "input_audio_buffer.append":
        size = base64_bytes(head.audio)
        if size == 0 and not head.video_frames:
            # Nothing in it becomes durable: kept until then, it would be kept for ever.
            return ClientMessage(Kind.OTHER, message, head.event_id)
        return ClientMessage(Kind.APPEND, message, head.event_id, size, head.from_sample)
    if len(message) > MAX_CONTROL_BYTES:
        return ClientMessage(Kind.TOO_LARGE, b"", head.event_id)
    try:
        command = parse_message(message)
    except ClientError:
        return ClientMessage(Kind.OTHER, message, head.event_id)
    match command:
        case CommitInput():
            kind = Kind.COMMIT
        case ClearInput():
            kind = Kind.CLEAR
        case Heartbeat():
            kind = Kind.HEARTBEAT
        case Close():
            kind = Kind.CLOSE
        case SetInputFormat(encoding=encoding, rate_hz=rate_hz):
            input_format = InputFormat(encoding, rate_hz)
            return ClientMessage(
                Kind.FORMAT,
                message,
                head.event_id,
                format=input_format,
                client_sequence=command.client_sequence,
            )
        case CancelReply() | TruncateReply() | AcknowledgePlayback() if (
            command.client_sequence is not None and len(message) <= MAX_COMMAND_BYTES
        ):
            number = command.client_sequence
            return ClientMessage(Kind.COMMAND, message, head.event_id, client_sequence=number)
        case _:
            kind = Kind.OTHER
    return ClientMessage(kind, message, head.event_id)


def base64_bytes(text: str) -> int:
    """Bytes that a base64 text decodes to, by its length alone; -1 if no text of that length is
    base64."""
    if len(text) % 4:
        return -1
    return len(text) // 4 * 3 - (2 if text.endswith("==") else 1 if text.endswith("=") else 0)


def with_fields(message: bytes, **fields: object) -> bytes:
    """The same event with these fields set. The message is a JSON object."""
    event: dict[str, Any] = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(event | fields)


# --- from the server ------------------------------------------------------------------------------


class ErrorBody(msgspec.Struct, frozen=True):
    code: str | None = None
    event_id: str | None = None


class Facts(msgspec.Struct, frozen=True):
    """What the gateway reads of the `duplex` field, whichever event has it."""

    acknowledged_sample: int = 0
    received_sample: int = 0
    last_sequence: int = 0
    input_rate_hz: int = 24_000
    to_sample: int = 0
    oldest: int = 1
    client_sequence: int = 0


class ServerEvent(msgspec.Struct, frozen=True):
    type: str
    server_event_seq: int | None = None
    duplex: Facts = Facts()
    error: ErrorBody = ErrorBody()
    reason: str | None = None
    client_event_id: str | None = None


_decode_event = msgspec.json.Decoder(ServerEvent).decode


def read_server_event(message: bytes) -> ServerEvent:
    """Raises ValueError for what no sidecar sends."""
    return _decode_event(message)


def with_error_id(message: bytes, event_id: str | None) -> bytes:
    """An error event as the client would have got it, had the gateway not named its input."""
    event: dict[str, Any] = msgspec.json.decode(message)
    event["error"]["event_id"] = event_id
    return msgspec.json.encode(event)


def with_client_id(message: bytes, event_id: str | None) -> bytes:
    """The same for an answer that names the client's event."""
    event: dict[str, Any] = msgspec.json.decode(message)
    event["client_event_id"] = event_id
    return msgspec.json.encode(event)


# --- of the gateway itself ------------------------------------------------------------------------


def error_event(code: ErrorCode, detail: str = "", event_id: str | None = None) -> bytes:
    return render_event(Failure(code, detail or ClientError(code).detail, None, event_id), "", "")


def heartbeat_ack(event_id: str | None) -> bytes:
    return render_event(Alive(event_id), "", "")


def cleared() -> bytes:
    return render_event(InputCleared(), "", "")


def resume_message(last_sequence: int) -> bytes:
    event = {"type": "session.resume", "last_received_server_event_seq": last_sequence}
    return msgspec.json.encode(event)


def queued_event(session: str, reason: str, position: int | None, waited_ms: int) -> bytes:
    """No replica runs the session yet. reason: `decide.WaitReason`."""
    facts = {"session": session, "reason": reason, "position": position, "waited_ms": waited_ms}
    return _own_event("session.queued", facts)


def moved_event(session: str, fence: int, acknowledged_sample: int) -> bytes:
    """The call goes on with another connection to the session's owner."""
    facts = {"session": session, "fence": fence, "acknowledged_sample": acknowledged_sample}
    return _own_event("session.moved", facts)


def _own_event(kind: str, facts: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "event_id": passing_event_id(), "duplex": facts})
