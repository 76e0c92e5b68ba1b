"""What a client can ask of a session, whatever the wire protocol."""

from enum import StrEnum

import msgspec


class AudioEncoding(StrEnum):
    """Encodings of client audio, in and out."""

    PCM16 = "pcm16"
    FLOAT32 = "f32le"
    G711_ULAW = "g711_ulaw"
    G711_ALAW = "g711_alaw"


class AppendInput(msgspec.Struct, frozen=True):
    """More input: mono audio in the session's input format, and up to two camera frames.

    from_sample: position of the first sample in the client's own count, when the client says it;
    after a resume it resends from the acknowledged position and what is already held is cut off.
    is_speech: None lets the session's own voice activity detection decide.
    """

    audio: bytes
    frames: tuple[bytes, ...] = ()
    from_sample: int | None = None
    is_speech: bool | None = None
    force_listen: bool = False
    event_id: str | None = None


class CommitInput(msgspec.Struct, frozen=True):
    """Close the waiting samples into a unit now (zero-padded tail)."""

    event_id: str | None = None


class ClearInput(msgspec.Struct, frozen=True):
    """Forget input that has not been closed into a unit."""

    event_id: str | None = None


class SetInputFormat(msgspec.Struct, frozen=True):
    """Declare the client's audio format, for this connection. The rate only before the first input
    of the session. client_sequence: as in `CancelReply`."""

    encoding: AudioEncoding
    rate_hz: int
    event_id: str | None = None
    client_sequence: int | None = None


class CancelReply(msgspec.Struct, frozen=True):
    """Stop the reply under way. turn: which one, None: whichever it is.

    client_sequence: the client's own number of a command that changes state; it grows over all
    connections of the session, so that a command sent again is applied once. None: not numbered.
    """

    turn: int | None = None
    event_id: str | None = None
    client_sequence: int | None = None


class TruncateReply(msgspec.Struct, frozen=True):
    """The client has heard reply `turn` up to `heard_ms`: the rest was never said."""

    turn: int
    heard_ms: int
    event_id: str | None = None
    client_sequence: int | None = None


class AcknowledgePlayback(msgspec.Struct, frozen=True):
    """The client has played so many of reply `turn`'s samples, at the output's rate."""

    turn: int
    played_samples: int
    event_id: str | None = None
    client_sequence: int | None = None


class Heartbeat(msgspec.Struct, frozen=True):
    event_id: str | None = None


class Close(msgspec.Struct, frozen=True):
    """The client ends the conversation for good."""

    event_id: str | None = None


ReplyCommand = CancelReply | TruncateReply | AcknowledgePlayback
"""They concern what the model has said: applied between two units."""
Command = AppendInput | CommitInput | ClearInput | SetInputFormat | ReplyCommand | Heartbeat | Close
