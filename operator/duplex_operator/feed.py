"""What a sidecar's status feed says: one JSON object a line, told apart by `kind`.

Fields of a newer release are ignored; so are lines of a kind that this release does not know.
"""

from enum import StrEnum

import msgspec

from duplex_api.admin import POD_UID

MOST_LINE_BYTES = 65_536


class FeedPhase(StrEnum):
    READY = "ready"
    ACTIVE = "active"
    PARKED = "parked"
    ENDED = "ended"
    GONE = "gone"
    """It does not run there any more and is neither parked nor over: the pod has lost it."""


class LastRebuildReport(msgspec.Struct, frozen=True, rename="camel"):
    cause: str = ""
    cost_ms: float = 0.0
    trace_id: str | None = msgspec.field(name="traceID", default=None)


class AudioReport(msgspec.Struct, frozen=True, rename="camel"):
    underruns: int = 0
    longest_gap_ms: int = 0


class FeedSession(
    msgspec.Struct, frozen=True, rename="camel", tag_field="kind", tag="session", kw_only=True
):
    """One session as its sidecar sees it. window_tokens: tokens that the Thinker sees now.
    active: it has heard at least one unit. changed_ms: since 1970."""

    session: str
    phase: FeedPhase
    reason: str = ""
    fence: int = 0
    attached: bool = False
    units: int = 0
    rebuilds: int = 0
    epoch: int = 0
    window_tokens: int = 0
    last_rebuild: LastRebuildReport | None = None
    audio: AudioReport = AudioReport()
    keeping_pace: bool = True
    ledger_durable: bool = True
    ledger_rewound: bool = False
    """A client has seen more of it than the ledger has."""
    changed_ms: int = msgspec.field(name="changed_ms", default=0)


class HelloLine(
    msgspec.Struct, frozen=True, rename="camel", tag_field="kind", tag="hello", kw_only=True
):
    """The first line. slots: sessions that fit at all; free_slots: that fit beside those here.
    ledger_away: nothing but the ledger keeps it from being ready.
    understands: what it may be told beyond what the first release's sidecars could be."""

    replica: str
    pod_uid: str = msgspec.field(name=POD_UID, default="")
    version: str = ""
    model_name: str = ""
    slots: int
    free_slots: int = 0
    draining: bool = False
    ready: bool = False
    ledger_away: bool = False
    understands: tuple[str, ...] = ()


class PodLine(
    msgspec.Struct, frozen=True, rename="camel", tag_field="kind", tag="pod", kw_only=True
):
    ready: bool
    draining: bool = False
    free_slots: int = 0
    ledger_away: bool = False


class BeatLine(msgspec.Struct, frozen=True, tag_field="kind", tag="beat"):
    """Each second: nothing else to say."""


FeedLine = HelloLine | FeedSession | PodLine | BeatLine

_DECODER: msgspec.json.Decoder[FeedLine] = msgspec.json.Decoder(FeedLine)


def read_line(line: bytes) -> FeedLine | None:
    """None: not a line of this release."""
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None
