"""What a session tells its client, whatever the wire protocol.

Sequenced events come from model output: each has a number, is journaled before its first byte
leaves and is replayed on resume, byte for byte. The others (acknowledgements, errors) carry no
number and are not replayed.
"""

from enum import StrEnum

import msgspec

from duplex_sidecar.protocol.commands import AudioEncoding
from duplex_sidecar.protocol.errors import ErrorCode


class Decision(StrEnum):
    """What the model did in a unit."""

    LISTEN = "listen"
    SPEAK = "speak"


# --- without a sequence number ------------------------------------------------------------------


class SessionOpened(msgspec.Struct, frozen=True):
    """First event of an attachment; `resumed` tells whether units were there before it.

    next_unit: number of the unit that will be closed next. acknowledged_sample: position in the
    client's own samples up to which input is durable: it keeps what lies behind, and goes on from
    there. received_sample: up to which it is here, durable or not: samples without a position are
    taken to follow that. last_sequence: newest journaled event. client_sequence: the newest of the
    client's numbered commands that was applied, 0 for none.
    """

    session: str
    resumed: bool
    attachment: int
    next_unit: int
    acknowledged_sample: int
    received_sample: int
    last_sequence: int
    window_mode: str
    input_rate_hz: int
    client_sequence: int = 0


class ResyncRequired(msgspec.Struct, frozen=True):
    """Events after `requested` are not in the journal (any more); the oldest one left is `oldest`.
    ledger_rewound: the journal ends before `requested`, which the client says it has: the ledger
    lost acknowledged writes, and numbers from `oldest` on are given anew."""

    requested: int
    oldest: int
    ledger_rewound: bool = False


class InputAccepted(msgspec.Struct, frozen=True):
    """A unit's input is durable up to `to_sample` of the client's own samples."""

    unit: int
    from_sample: int
    to_sample: int


class InputCleared(msgspec.Struct, frozen=True):
    pass


class InputFormatSet(msgspec.Struct, frozen=True):
    encoding: AudioEncoding
    rate_hz: int


class PlaybackAcknowledged(msgspec.Struct, frozen=True):
    """So much of the turn counts as played from now on (24 kHz samples)."""

    turn: int
    played_samples: int


class CommandApplied(msgspec.Struct, frozen=True):
    """A numbered command has been applied, now or when it was sent before."""

    client_sequence: int
    event_id: str | None


class Alive(msgspec.Struct, frozen=True):
    """Answer to a heartbeat."""

    event_id: str | None


class Failure(msgspec.Struct, frozen=True):
    code: ErrorCode
    detail: str
    param: str | None = None
    event_id: str | None = None


class Closed(msgspec.Struct, frozen=True):
    """The session is over; nothing follows."""

    code: ErrorCode
    detail: str


# --- with a sequence number ---------------------------------------------------------------------


class TurnStep(StrEnum):
    """Marks of a turn, in their order. The inner ones frame its one spoken item."""

    STARTED = "started"
    ITEM_STARTED = "item_started"
    CONTENT_STARTED = "content_started"
    AUDIO_DONE = "audio_done"
    TRANSCRIPT_DONE = "transcript_done"
    CONTENT_DONE = "content_done"
    ITEM_DONE = "item_done"
    ENDED = "ended"


OPENING_STEPS = (TurnStep.STARTED, TurnStep.ITEM_STARTED, TurnStep.CONTENT_STARTED)
CLOSING_STEPS = (
    TurnStep.AUDIO_DONE,
    TurnStep.TRANSCRIPT_DONE,
    TurnStep.CONTENT_DONE,
    TurnStep.ITEM_DONE,
    TurnStep.ENDED,
)


class TurnMark(msgspec.Struct, frozen=True, tag="turn_mark"):
    """A turn starts or ends. `text` and `samples` are the whole turn's, on the closing steps.
    cancelled: it ends because the client stopped it."""

    step: TurnStep
    turn: int
    unit: int
    samples: int
    text: str
    cancelled: bool = False


class TurnTruncated(msgspec.Struct, frozen=True, tag="turn_truncated"):
    """The model has said no more of the turn than was heard, `heard_ms` of it. unit: the newest
    one. taken_back_tokens: what it does not remember any more."""

    turn: int
    unit: int
    heard_ms: int
    taken_back_tokens: int


class Transcript(msgspec.Struct, frozen=True, tag="transcript"):
    turn: int
    unit: int
    text: str


class Audio(msgspec.Struct, frozen=True, tag="audio"):
    """24 kHz mono s16le samples. from_sample counts within the turn."""

    turn: int
    unit: int
    epoch: int
    stage2_sequence: int
    from_sample: int
    pcm_s16le: bytes


class UnitDone(msgspec.Struct, frozen=True, tag="unit_done"):
    """Facts of a finished unit: what an on-call engineer wants to see of it."""

    unit: int
    turn: int
    decision: Decision
    tokens: int
    window_tokens: int
    rebuild_cause: str | None
    rebuild_ms: float | None
    dropped_units: int
    head: int
    epoch: int
    stage2_sequence: int | None
    audio_samples: int
    wall_ms: float
    stage_ms: dict[str, float]
    replica: str


SequencedBody = TurnMark | TurnTruncated | Transcript | Audio | UnitDone


class Sequenced(msgspec.Struct, frozen=True):
    """A journaled event. One sequence number is one byte string for ever."""

    sequence: int
    body: SequencedBody


Event = (
    SessionOpened
    | ResyncRequired
    | InputAccepted
    | InputCleared
    | InputFormatSet
    | PlaybackAcknowledged
    | CommandApplied
    | Alive
    | Failure
    | Closed
    | Sequenced
)

encode_sequenced = msgspec.msgpack.Encoder().encode
decode_sequenced = msgspec.msgpack.Decoder(Sequenced).decode
