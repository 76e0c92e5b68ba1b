"""Units that take longer than they cover, seen while they are under way: whoever is on call looks
at a unit that hangs, not at the one that was done before it."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from duplex_sidecar.session.watching import UNIT_MS, UnitWatch
from duplex_sidecar.telemetry.logs import log_context
from duplex_sidecar.telemetry.metrics import Metrics

AGAIN_S = 30.0
"""At most so often a session's log warns of late units."""

log = logging.getLogger(__name__)


class Lateness:
    """Of one session, whose units run one after another."""

    def __init__(self, metrics: Metrics, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock_s = clock_s
        self._watch: UnitWatch | None = None
        self._seq = 0
        self._seen = False
        """That the unit under way is late, by `look`."""
        self._warned = False
        """Of the unit under way."""
        self._warned_at_s = float("-inf")
        self._untold = 0
        """Late units since the last warning that it says nothing of."""

    @property
    def under_way_ms(self) -> float | None:
        """Of the unit under way, since its input was taken; None between units."""
        return None if self._watch is None else self._watch.wall_ms

    @property
    def late(self) -> bool:
        """Whether a unit is under way for longer than it covers."""
        return (self.under_way_ms or 0.0) > UNIT_MS

    @contextmanager
    def watched(self, seq: int, watch: UnitWatch) -> Generator[None]:
        """Around a unit."""
        self._watch, self._seq, self._seen, self._warned = watch, seq, False, False
        try:
            yield
        finally:
            self._ended(watch)

    def look(self) -> bool:
        """To be called a few times a second. Whether the unit under way has just become late."""
        watch = self._watch
        if watch is None or not self.late:
            return False
        news, self._seen = not self._seen, True
        if news:
            self._metrics.overdue(1)
        self._warn(watch, "a unit is late and still under way")
        return news

    def _ended(self, watch: UnitWatch) -> None:
        if self._seen:
            self._metrics.overdue(-1)
        if self._warned:
            with log_context(unit=self._seq):
                log.info("the late unit is over", extra={"fields": _times(watch)})
        elif self.late:
            self._warn(watch, "a unit was late")
        if self.late and not self._warned:
            self._untold += 1
        self._watch = None

    def _warn(self, watch: UnitWatch, message: str) -> None:
        now_s = self._clock_s()
        if now_s - self._warned_at_s < AGAIN_S:
            return
        with log_context(unit=self._seq):
            fields = _times(watch) | {"late_units_untold": self._untold}
            log.warning(message, extra={"fields": fields})
        self._warned, self._warned_at_s, self._untold = True, now_s, 0


def _times(watch: UnitWatch) -> dict[str, float | str]:
    """Milliseconds in all and of each stage or step, those that go on included."""
    stages = {f"{name}_ms": round(ms, 1) for name, ms in watch.stage_ms_so_far.items()}
    return {"total_ms": round(watch.wall_ms, 1), "in": watch.in_steps, **stages}
