"""What a process says in its log of a ledger that is away, in all processes the same: once that it
goes, once that it is back, and now and then in between. Who asks the ledger asks often, and from
many places, so none of them says it by itself."""

import logging
import time
from collections.abc import Callable

AGAIN_S = 30.0
SETTLED_S = 2.0
"""For who asks in many places, or several servers of which some answer."""


class LedgerOutage:
    """Told of each answer, and of each time that there was none."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        verb: str = "answer",
        settled_s: float = 0.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """verb: what it does not do. settled_s: an answer counts once nothing has failed for so
        long."""
        self._log = log
        self._verb = verb
        self._settled_s = settled_s
        self._clock_s = clock_s
        self._since_s: float | None = None
        self._failed_s = 0.0
        self._told_s = 0.0

    def failed(self, why: str) -> None:
        now_s = self._clock_s()
        self._failed_s = now_s
        if self._since_s is None:
            self._since_s = self._told_s = now_s
            self._log.warning("the ledger does not %s: %s", self._verb, why)
        elif now_s - self._told_s >= AGAIN_S:
            self._told_s = now_s
            away_s = round(now_s - self._since_s)
            self._log.warning("the ledger still does not %s (%d s): %s", self._verb, away_s, why)

    def answered(self) -> None:
        if self._since_s is None:
            return
        now_s = self._clock_s()
        if now_s - self._failed_s >= self._settled_s:
            self._log.info("the ledger is back after %.1f s", now_s - self._since_s)
            self._since_s = None
