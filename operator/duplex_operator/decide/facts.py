"""Everything that a decision about one session looks at, gathered before it is made."""

from dataclasses import dataclass
from enum import StrEnum

from duplex_api.durations import duration_ms
from duplex_api.resolve import DEFAULT_LIFECYCLE
from duplex_api.session import DesiredState, Lifecycle, Placement, SessionSpec, TokenSecret
from duplex_operator.decide.acceptance import Accepted, Refused
from duplex_operator.decide.placement import Assignment, Wait
from duplex_operator.feed import FeedSession
from duplex_operator.objects import SessionObject


class PodHealth(StrEnum):
    LIVE = "live"
    """Its feed speaks, and has told of every session there."""
    UNHEARD = "unheard"
    """No word from it now, but not known to be dead."""
    DEAD = "dead"
    """Gone, replaced, ended, or silent with its leases run out."""


@dataclass(frozen=True, slots=True)
class PodView:
    """The pod that `status.placement` names. reason, sentence: why it is dead.

    proven: no process of it can be alive, so its leases may be broken. lease_left_ms: of a pod that
    is suspect, when the session's lease runs out there unless it is renewed. leaving: it is being
    emptied, whoever talks there is to go on elsewhere."""

    uid: str
    name: str
    health: PodHealth
    reason: str = ""
    sentence: str = ""
    proven: bool = False
    lease_left_ms: int | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """Where the client's token is, and its hash. The token itself is nowhere kept."""

    secret: TokenSecret
    sha256: str


class LedgerPhase(StrEnum):
    """What the ledger says of a session that no sidecar speaks of."""

    NONE = "none"
    OPEN = "open"
    PARKED = "parked"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LedgerWord:
    """fence: the largest that was ever taken there."""

    phase: LedgerPhase
    fence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The placed pod's final answer to an opening under `fence`."""

    fence: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What this process remembers of its own calls. Losing it costs a repeated call, no more.

    opened_fence, opened_ms: of the last successful opening. unmoved_fence: under it a hand-over
    came to nothing. asked_park_ms: when its pod was last asked to park it. ended, erased: the
    sidecar has confirmed it. erase_refused: why one refuses to erase it, in its words, for the
    `erase_refusals`-th time; it is not asked again before erase_again_ms. woken: its client waits
    for it.
    token_untold: its token changed and its sidecar does not know it yet. told_from_ms: not before
    then is it told again, since it could not be.
    refused_spec: a pod refused what the user asked for. flushed_ms: last write of counters.
    waits_since_ms: first asking for a slot. positioned_ms: last write of the queue position.
    """

    opened_fence: int = 0
    opened_ms: int = 0
    unmoved_fence: int = 0
    asked_park_ms: int = 0
    ended: bool = False
    erased: bool = False
    erase_refused: str = ""
    erase_refusals: int = 0
    erase_again_ms: int = 0
    woken: bool = False
    token_untold: bool = False
    told_from_ms: int = 0
    refusal: Refusal | None = None
    refused_spec: Refused | None = None
    refused_at_ms: int = 0
    flushed_ms: int = 0
    waits_since_ms: int = 0
    positioned_ms: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    erase_bound_ms: int = 30_000
    counters_period_ms: int = 60_000
    position_period_ms: int = 15_000
    quiet_wait_ms: int = 1_000
    """A wait shorter than this is not written down."""
    reopen_after_ms: int = 5_000
    repark_after_ms: int = 2_000


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """said: what the placed pod's feed says of it under the placement's fence. source: what the
    pod of the last placement says, where that one runs it still. ledger: asked only where no
    sidecar speaks of a session that ran; None: not asked, or away (`ledger_away`)."""

    session: SessionObject
    verdict: Accepted | Refused
    now_ms: int
    endpoint: str
    memory: Memory
    limits: Limits = Limits()
    pod: PodView | None = None
    said: FeedSession | None = None
    source: FeedSession | None = None
    token: Token | None = None
    ledger: LedgerWord | None = None
    ledger_away: bool = False
    promise: Assignment | None = None
    wait: Wait | None = None

    @property
    def placement(self) -> Placement | None:
        return self.session.status.placement

    @property
    def desired(self) -> DesiredState:
        return self.session.spec.desired_state or DesiredState.RUNNING

    @property
    def last_fence(self) -> int:
        """No fence above this was ever given out."""
        status = self.session.status
        given = [p.fence for p in (status.placement, status.last_placement) if p is not None]
        given.append(self.ledger.fence if self.ledger is not None else 0)
        return max(given)

    def lifecycle_ms(self, field: str) -> int:
        """One of the session's times, with its default."""
        return lifecycle_ms(self.session.spec, field)


def lifecycle_ms(spec: SessionSpec, field: str) -> int:
    """One of a session's times ("idle_timeout", ...) in milliseconds, with its default."""
    named = spec.lifecycle or Lifecycle()
    return duration_ms(getattr(named, field) or getattr(DEFAULT_LIFECYCLE, field))
