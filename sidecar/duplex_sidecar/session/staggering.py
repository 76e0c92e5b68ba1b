"""The sessions of a replica do not all come back at the same instant.

What goes wrong with the ledger goes wrong for all of them together, so they would try again
together, too, and run what they held together once it is back. Whoever tries again therefore waits
an uneven time and takes one of a few seats; with it go the write that was held and the rest of its
unit. The seat is no right: it is waited for and kept for a bounded time, after which the session
goes on without it.
"""

import asyncio
import random
from collections.abc import Callable

RETRY_EVERY_S = 0.3
"""In the middle; one wait is 0.7 to 1.3 times as long. Never so short that it looks like a client
library that tries again by itself, which is forbidden (`hidden_retry` in docs/history.md)."""
SEATS = 4
WAIT_S = 2.0
"""For a seat, uneven in the same way."""
KEEP_S = 2.0


class Seat:
    """One of the few; given back once, whoever does it first."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._in_time = asyncio.get_running_loop().call_later(KEEP_S, self.free)

    @property
    def taken(self) -> bool:
        return self._give_back is not None

    def free(self) -> None:
        self._in_time.cancel()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Stagger:
    """Shared by all sessions of a replica."""

    def __init__(self, seats: int = SEATS, uneven: random.Random | None = None) -> None:
        """uneven: where the waits come from; not for secrets."""
        self._seats = asyncio.Semaphore(seats)
        self._uneven = uneven or random.Random()
        self.returns = 0
        """How often the ledger has answered a session again that was held behind an outage. Who
        waits still waits for the others then, not for the ledger."""

    def retry_s(self) -> float:
        """Seconds until the next try."""
        return self._around(RETRY_EVERY_S)

    async def seat(self) -> Seat | None:
        """None: there was none in time."""
        try:
            async with asyncio.timeout(self._around(WAIT_S)):
                await self._seats.acquire()
        except TimeoutError:
            return None
        return Seat(self._seats.release)

    def _around(self, seconds: float) -> float:
        return seconds * self._uneven.uniform(0.7, 1.3)
