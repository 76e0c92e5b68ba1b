"""How a session stops running here: why, what the ledger is told, what the client is told.

Everything in here is bounded in time: whoever waits for a session's end gets it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace

from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    JournalMismatch,
    LeaseHeld,
    LeaseLost,
    LeaseSettling,
    LedgerError,
    LedgerFull,
    LedgerRegressed,
    SessionErased,
)
from duplex_sidecar.ledger.lease import LeaseKeeper
from duplex_sidecar.ledger.recovery import MAX_ATTEMPTS
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Closed, Event, Failure
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionOver
from duplex_sidecar.session.parking import PARK_SENTENCES, ParkReason
from duplex_sidecar.session.unit import UnitRunner
from duplex_sidecar.stages.errors import StageAway

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
LAST_WRITE_S = 2.0
"""How long who only has to let go goes on trying once its lease is not confirmed any more. It runs
out by itself, and all that was acknowledged is in the ledger."""
FREE_FIRST_S = 1.0
"""How long a session that parks waits for its stages before it says so in the ledger."""
_QUIET = (ErrorCode.SESSION_ENDED, ErrorCode.LEASE_LOST, ErrorCode.PARKED)
"""No error comes before these: they are what somebody wanted."""


@dataclass(frozen=True)
class Ending:
    """Why it is over here. for_good: the ledger is to say so, no replica goes on with it. parks:
    it is to wait in the ledger. moves: the lease is another replica's already. reason: a short word
    for ledger and feed, the code where none is given. counts: nobody knows why; it is for good
    where it happens again before the next unit."""

    code: ErrorCode
    detail: str
    for_good: bool = False
    parks: ParkReason | None = None
    moves: bool = False
    reason: str = ""
    counts: bool = False

    @property
    def lets_go(self) -> bool:
        """Whether the ledger need not hear of it: the lease runs out, and anybody goes on."""
        return not (self.for_good or self.counts or self.parks is not None)

    @property
    def word(self) -> str:
        return self.reason or self.code.value

    def farewell(self) -> list[Event]:
        """The client's last events."""
        closed = Closed(self.code, self.detail)
        return [closed] if self.code in _QUIET else [Failure(self.code, self.detail), closed]


MOVED = Ending(
    ErrorCode.LEASE_LOST, "the session moves to another replica", moves=True, reason="handed_over"
)
ERASED = Ending(ErrorCode.SESSION_ENDED, "the session was erased", reason="erased")
SHUT_DOWN = Ending(ErrorCode.LEASE_LOST, "the replica is shutting down")


def parked(reason: ParkReason) -> Ending:
    return Ending(ErrorCode.PARKED, PARK_SENTENCES[reason], parks=reason, reason=reason.value)


def ending_of(error: Exception) -> Ending:
    """What an error of the session's own task means for it."""
    match error:
        case SessionOver():
            return Ending(error.code, error.detail, for_good=True)
        case LeaseLost():
            log.info("session dropped: %s", error.reason)
            return Ending(ErrorCode.LEASE_LOST, "another replica runs the session")
        case SessionErased():
            log.info("session dropped: %s", error.reason)
            return ERASED
        case LedgerFull():
            log.error("session dropped: %s", error)
            return Ending(ErrorCode.RESOURCE_EXHAUSTED, f"ledger: {error.reason}")
        case HeadMismatch() | JournalMismatch() | LeaseHeld() | LeaseSettling():
            log.warning("session dropped: %s", error)
            detail = "the ledger holds something else than this replica; resume to go on from it"
            return Ending(ErrorCode.LEASE_LOST, detail)
        case LedgerRegressed():
            log.error("session dropped: %s", error)
            detail = "the ledger lost its newest part; resume to go on from what is left"
            return Ending(ErrorCode.LEASE_LOST, detail, reason="ledger_regressed")
        case LedgerError():
            log.error("session dropped: %s: %s", type(error).__name__, error)
            return Ending(ErrorCode.LEDGER_CORRUPT, type(error).__name__)
        case StageAway():
            log.error("session dropped: %s", error)
            detail = "a stage of this replica does not come back; resume to go on"
            return Ending(ErrorCode.LEASE_LOST, detail, reason="stage_away")
        case _:
            # It may be this replica's alone: another one does again what is not committed.
            log.error("session failed", exc_info=error)
            return Ending(
                ErrorCode.LEASE_LOST, "internal error", reason="internal_error", counts=True
            )


GIVEN_UP = Ending(
    ErrorCode.UNIT_FAILED, f"{MAX_ATTEMPTS} internal errors at the same unit", for_good=True
)


async def wind_up(
    ending: Ending,
    work: "asyncio.Task[None] | None",
    durable: DurableSession,
    keeper: LeaseKeeper,
    runner: UnitRunner,
    told_to_go: asyncio.Event,
) -> Ending:
    """Stop the work, end the streams, give the lease back. Returns how it ended indeed: a session
    that could not park is let go of, so that any replica can take it up; one that has failed too
    often without a named reason is over. told_to_go: somebody waits for it to be gone, and a park
    is then tried no longer than `LAST_WRITE_S` without the ledger."""
    written = False

    async def told_and_without_lease() -> None:
        await told_to_go.wait()
        await keeper.wait_not_held()

    async def write() -> None:
        nonlocal written, ending
        if ending.parks is not None:
            await _freed(closing)
            # A renewal that comes behind the park would be refused and say nothing of worth.
            await keeper.stop()
        if ending.counts and await durable.failed() >= MAX_ATTEMPTS:
            ending = GIVEN_UP
        last = _last_write(ending, durable)
        if ending.lets_go:
            await _while_of_use(last, keeper.wait_not_held)
        elif ending.parks is not None:
            await _while_of_use(last, told_and_without_lease)
        else:
            await last
        written = True

    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            if work is not None:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            # Side by side: neither a stage nor a ledger that is away keeps the other waiting.
            closing = asyncio.ensure_future(runner.close())
            outcomes = await asyncio.gather(write(), closing, return_exceptions=True)
        for failure in outcomes:
            if failure is not None:
                raise failure
    except (TimeoutError, LedgerError) as error:
        what = "its streams" if written else "its last ledger entry"
        log.warning("session ended without %s: %s", what, type(error).__name__)
    except Exception:
        log.exception("session ended in disorder")
    finally:
        durable.forget()
    if written or ending.parks is None:
        return ending
    return replace(SHUT_DOWN, detail="the session could not park")


async def _freed(closing: "asyncio.Future[None]") -> None:
    """`parked` says that the session holds nothing here any more; a stage that is stuck keeps none
    from parking."""
    _, holds_on = await asyncio.wait({closing}, timeout=FREE_FIRST_S)
    if holds_on:
        log.warning("session parks before its stages have let go of it")


async def _while_of_use(
    write: Coroutine[None, None, None], hopeless: Callable[[], Awaitable[None]]
) -> None:
    """Raises TimeoutError `LAST_WRITE_S` after `hopeless` has returned."""

    async def patience() -> None:
        await hopeless()
        await asyncio.sleep(LAST_WRITE_S)

    writing, waiting = asyncio.ensure_future(write), asyncio.ensure_future(patience())
    try:
        await asyncio.wait({writing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise TimeoutError
        writing.result()
    finally:
        writing.cancel()
        waiting.cancel()
        await asyncio.gather(writing, waiting, return_exceptions=True)


async def _last_write(ending: Ending, durable: DurableSession) -> None:
    if ending.parks is not None:
        try:
            await durable.park(ending.parks)
        except LedgerError:
            await durable.release()
            raise
    elif ending.for_good:
        await durable.end(ending.word)
    else:
        await durable.release()
