"""Whether the ledger takes writes: asked each second, also while no session runs.

A replica that cannot reach its ledger takes nothing new and says so on its pages; its sessions wait
by themselves, and nothing is ended because of it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from duplex_api.ledger_outage import LedgerOutage
from duplex_sidecar.ledger.errors import LedgerError

log = logging.getLogger(__name__)

ASK_PERIOD_S = 1.0
ASK_AGAIN_S = 0.25
"""While it is away: it counts as back with its first answer."""
AWAY_AFTER_S = 3.0
"""The time of a lease: what is shorter may be a server that is started anew."""


class LedgerReach:
    """Asks until it is cancelled, and tells when the ledger goes and when it is back."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        on_change: Callable[[bool], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """ask: returns when the whole ledger has said so, and raises LedgerError in bounded time
        otherwise. on_change: told whether it does, at the start and at each change."""
        self._ask = ask
        self._on_change = on_change
        self._clock_s = clock_s
        self._sleep = sleep
        self._answered_s = clock_s()
        self._outage = LedgerOutage(log, clock_s=clock_s)
        self.away = False

    async def run(self) -> None:
        """Until cancelled. It has just answered: a replica begins with a connected ledger."""
        self._on_change(True)
        while True:
            await self._sleep(ASK_AGAIN_S if self.away else ASK_PERIOD_S)
            try:
                await self._ask()
            except LedgerError as error:
                self._not_answered(error.reason)
            except Exception as error:
                # Whatever it was: a replica that asks no more would be taken for ready for good.
                self._not_answered(type(error).__name__)
            else:
                self._answered()

    def _answered(self) -> None:
        self._answered_s = self._clock_s()
        self._outage.answered()
        if self.away:
            self.away = False
            self._on_change(True)

    def _not_answered(self, why: str) -> None:
        if self._clock_s() - self._answered_s < AWAY_AFTER_S:
            return
        self._outage.failed(why)
        if not self.away:
            self.away = True
            self._on_change(False)
