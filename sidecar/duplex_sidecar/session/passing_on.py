"""The owner's side of a hand-over: it is wished, granted between two units, and one call moves the
lease. Either it is the other replica's then, or this one goes on as if nothing had been asked.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from duplex_sidecar.ledger.errors import HeadMismatch, LedgerError, NotOffered, StaleFence
from duplex_sidecar.ledger.lease import LeaseKeeper
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.handing_over import HandOver, may_hand_over
from duplex_sidecar.session.parking import Standing
from duplex_sidecar.session.refusals import PlacementRefused, Refusal

HAND_OVER_S = 2.0
"""For the one call: below what is left of a lease that nobody renews meanwhile."""


@dataclass
class _Wish:
    """by_s: on the session's clock, up to when a turn's end is waited for."""

    order: HandOver
    by_s: float
    outcome: "asyncio.Future[None]"
    granted: bool = False


class PassingOn:
    """Of one session."""

    def __init__(
        self,
        durable: DurableSession,
        keeper: LeaseKeeper,
        clock_s: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """clock_s: the session's. wake: its task has to look."""
        self._durable = durable
        self._keeper = keeper
        self._clock_s = clock_s
        self._wake = wake
        self._wish: _Wish | None = None

    @property
    def granted(self) -> bool:
        """Whether the call is under way, or has moved the lease: no unit starts any more."""
        return self._wish is not None and self._wish.granted

    def wish(self, order: HandOver, grace_s: float) -> "asyncio.Future[None]":
        """Hand over at the end of the present turn, or between two units once the grace is over.

        The future tells of it, with the refusal where the session goes on here; it is never done
        where the session ends otherwise. An earlier wish is never put off. Raises PlacementRefused
        SESSION_BUSY while it is to go to another one."""
        wish, by_s = self._wish, self._clock_s() + grace_s
        if wish is None:
            outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            wish = self._wish = _Wish(order, by_s, outcome)
        elif wish.order != order:
            raise PlacementRefused(Refusal.SESSION_BUSY, "it is about to go to another replica")
        wish.by_s = min(wish.by_s, by_s)
        self._wake()
        return wish.outcome

    def withdraw(self, order: HandOver) -> bool:
        """Go on after all; whoever waits for the outcome is told. False where there is nothing to
        withdraw, or no longer."""
        wish = self._wish
        if wish is None or wish.order != order or wish.granted:
            return False
        self._wish = None
        busy = "a unit is under way for too long"
        wish.outcome.set_exception(PlacementRefused(Refusal.SESSION_BUSY, busy))
        return True

    def grant(self, standing: Standing) -> bool:
        """Whether the hand-over is to run now; it takes the place of a unit."""
        wish = self._wish
        if wish is None or wish.granted or not may_hand_over(wish.by_s, standing):
            return False
        wish.granted = True
        return True

    async def run(self) -> None:
        """Raises what ends the session here (LeaseLost, SessionErased ...)."""
        wish = self._wish
        assert wish is not None
        await self._keeper.stop()  # a renewal behind it would be refused and say nothing of worth
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._durable.hand_over(wish.order.replica, wish.order.fence)
        except (NotOffered, StaleFence, HeadMismatch, TimeoutError) as error:
            # Where the outcome is unknown the next renewal tells: refused, and the session is over
            # here, or confirmed, and it goes on; what is still under way then moves the lease later
            # or never, in both cases with all that was acknowledged.
            self._keeper.start()
            self._wish = None
            wish.outcome.set_exception(_refusal_of(error))
            return
        wish.outcome.set_result(None)


def _refusal_of(error: LedgerError | TimeoutError) -> ClientError:
    match error:
        case StaleFence():
            return PlacementRefused(Refusal.STALE_FENCE, error.reason)
        case NotOffered():
            return PlacementRefused(Refusal.NOT_PREPARED, error.reason)
        case HeadMismatch():
            return PlacementRefused(Refusal.SESSION_BUSY, error.reason)
        case _:
            return ClientError(ErrorCode.LEDGER_UNAVAILABLE, "no answer to the hand-over")
