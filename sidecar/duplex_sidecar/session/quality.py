"""What a session has been like since it runs here: rebuilds, sound that came too late, and whether
its past has become shorter."""

from collections.abc import Callable
from dataclasses import dataclass

from duplex_sidecar.protocol.events import (
    OPENING_STEPS,
    Audio,
    Sequenced,
    TurnMark,
    UnitDone,
)
from duplex_sidecar.session.watching import UNIT_MS

OUTPUT_RATE_HZ = 24_000
PLAYER_BUFFER_S = 0.2
"""What a player holds back at the start of a turn before it lets sound out."""


@dataclass(frozen=True)
class LastRebuild:
    """trace_id: of the session's trace, 32 hex digits, where the rebuild is a span."""

    cause: str
    cost_ms: float
    trace_id: str


class SessionQuality:
    """underruns: times that sound of a turn came later than a player needed it. longest_gap_ms: how
    late at most. keeping_pace: the last unit took less time than it covers. ledger_rewound: a
    client had seen events that the ledger has not any more."""

    def __init__(self, trace_id: Callable[[], str]) -> None:
        self._trace_id = trace_id
        self._heard_until_s: float | None = None
        self.rebuilds = 0
        self.last_rebuild: LastRebuild | None = None
        self.underruns = 0
        self.longest_gap_ms = 0
        self.keeping_pace = True
        self.ledger_rewound = False

    def saw(self, event: Sequenced, now_s: float) -> None:
        """An event that leaves now. now_s: any clock that never goes back."""
        body = event.body
        match body:
            case TurnMark():
                if body.step == OPENING_STEPS[0]:
                    self._heard_until_s = None
            case Audio():
                self._sounds(len(body.pcm_s16le) // 2 / OUTPUT_RATE_HZ, now_s)
            case UnitDone():
                self.keeping_pace = body.wall_ms <= UNIT_MS
                if body.rebuild_cause is not None:
                    self.rebuilds += 1
                    cost_ms = body.rebuild_ms or 0.0
                    self.last_rebuild = LastRebuild(body.rebuild_cause, cost_ms, self._trace_id())
            case _:
                pass

    def _sounds(self, duration_s: float, now_s: float) -> None:
        until_s = self._heard_until_s
        if until_s is None:
            until_s = now_s + PLAYER_BUFFER_S
        elif now_s > until_s:
            self.underruns += 1
            self.longest_gap_ms = max(self.longest_gap_ms, round((now_s - until_s) * 1000))
            until_s = now_s
        self._heard_until_s = until_s + duration_s
