"""Thirty sessions behind one outage: uneven tries, a few at once, nobody waits for ever."""

import asyncio
import heapq
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from duplex_sidecar.ledger.call import Head, PendingCall
from duplex_sidecar.ledger.errors import LeaseLost, LedgerUnavailable
from duplex_sidecar.ledger.lease import Lease, LeaseKeeper
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.staggering import KEEP_S, RETRY_EVERY_S, SEATS, WAIT_S, Stagger
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.settings import TelemetrySettings

pytestmark = pytest.mark.unit
SESSIONS = 30
AWAY_S = 3.0
HOLD_S = 10.0
CALL_S = 0.02
REST_OF_UNIT_S = 0.1
METRICS = Metrics(TelemetrySettings(replica="r"))


class LeapingLoop(asyncio.SelectorEventLoop):
    """Time leaps to the next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        inner: Any = super()
        me: Any = self
        while me._scheduled and me._scheduled[0]._cancelled:
            timer = heapq.heappop(me._scheduled)
            timer._scheduled = False
            me._timer_cancelled_count -= 1
        if not me._ready and me._scheduled:
            self.now_s = max(self.now_s, me._scheduled[0]._when)
        inner._run_once()


def played(scene: Coroutine[Any, Any, None]) -> None:
    loop = LeapingLoop()
    try:
        loop.run_until_complete(scene)
    finally:
        loop.close()


class LedgerBehindAnOutage:
    """Away until `back_s`; then each call takes a while."""

    def __init__(self, back_s: float) -> None:
        self.back_s = back_s
        self.tried_s: list[float] = []
        self.under_way = self.most_under_way = self.answered = 0

    async def note(self, lease: Lease, head: Head, draft: object) -> Head:
        now_s = asyncio.get_running_loop().time()
        self.tried_s.append(now_s)
        if now_s < self.back_s:
            raise LedgerUnavailable(lease.session, "away")
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(CALL_S)
        self.under_way -= 1
        self.answered += 1
        return Head(head.index + 1, "next", head.committed_seq, None)

    async def retry_unknown(self, pending: PendingCall) -> Head | None:
        raise AssertionError("none is unknown")


def held_session(number: int, ledger: LedgerBehindAnOutage, stagger: Stagger) -> DurableSession:
    lease = Lease(f"s-{number}", "r", 1, "nonce", "era", deadline_ms=1_000)

    async def renew(lease: Lease) -> Lease:
        return lease

    return DurableSession(
        ledger,  # type: ignore[arg-type]
        LeaseKeeper(renew, lease, clock_ms=lambda: 0),
        Head(4, "four", 2, None),
        hold_s=HOLD_S,
        metrics=METRICS,
        clock_s=asyncio.get_running_loop().time,
        stagger=stagger,
    )


def test_held_sessions_come_back_unevenly_and_a_few_at_a_time() -> None:
    ledger = LedgerBehindAnOutage(AWAY_S)
    units = most_units = 0

    async def unit_of(session: DurableSession) -> None:
        nonlocal units, most_units
        await session.redo(3, 2, "engine_restart")
        units += 1
        most_units = max(most_units, units)
        await asyncio.sleep(REST_OF_UNIT_S)
        units -= 1
        session.caught_up()

    async def scene() -> None:
        stagger = Stagger(uneven=random.Random(5))
        sessions = [held_session(number, ledger, stagger) for number in range(SESSIONS)]
        await asyncio.gather(*(unit_of(session) for session in sessions))
        assert asyncio.get_running_loop().time() < AWAY_S + 1.5

    played(scene())
    assert ledger.tried_s[:SESSIONS] == [0.0] * SESSIONS, "nobody knows of the outage yet"
    again = ledger.tried_s[SESSIONS:]
    assert len(again) > SESSIONS * AWAY_S / (2 * RETRY_EVERY_S)
    alike = max(sum(abs(one - other) < 1e-9 for other in again) for one in again)
    assert alike <= SEATS
    assert ledger.most_under_way <= SEATS
    assert most_units == SEATS


def test_who_waits_for_a_seat_only_does_not_refuse_input() -> None:
    """The hold is over while half of them still wait for one another, and not for the ledger."""
    back_s = HOLD_S - 0.1
    ledger = LedgerBehindAnOutage(back_s)
    waited_behind_the_hold = 0

    async def unit_of(session: DurableSession) -> None:
        nonlocal waited_behind_the_hold
        await session.redo(3, 2, "engine_restart")
        waited_behind_the_hold += asyncio.get_running_loop().time() > HOLD_S + 0.2
        await asyncio.sleep(REST_OF_UNIT_S)
        session.caught_up()

    async def scene() -> None:
        stagger = Stagger(uneven=random.Random(5))
        sessions = [held_session(number, ledger, stagger) for number in range(SESSIONS)]
        units = asyncio.gather(*(unit_of(session) for session in sessions))
        while not units.done():
            refusing = [session for session in sessions if session.refuses_input]
            assert not refusing or not ledger.answered
            await asyncio.sleep(0.01)
        await units

    played(scene())
    assert waited_behind_the_hold


def test_who_waits_for_a_seat_refuses_input_while_the_ledger_is_away() -> None:
    async def scene() -> None:
        stagger = Stagger(uneven=random.Random(5))
        ledger = LedgerBehindAnOutage(1000.0)
        sessions = [held_session(number, ledger, stagger) for number in range(SESSIONS)]
        units = asyncio.gather(
            *(session.redo(3, 2, "engine_restart") for session in sessions), return_exceptions=True
        )
        await asyncio.sleep(HOLD_S - 0.1)
        assert not any(session.refuses_input for session in sessions)
        await asyncio.sleep(0.2)
        assert all(session.refuses_input for session in sessions)
        units.cancel()
        await asyncio.gather(units, return_exceptions=True)

    played(scene())


def test_who_keeps_a_seat_keeps_nobody_for_long() -> None:
    """Four sessions never say that they have caught up, and a fifth waits behind them."""

    async def scene() -> None:
        ledger = LedgerBehindAnOutage(0.1)
        stagger = Stagger(uneven=random.Random(5))
        loop = asyncio.get_running_loop()
        stuck = [held_session(number, ledger, stagger) for number in range(SEATS)]
        await asyncio.gather(*(session.redo(3, 2, "engine_restart") for session in stuck))
        seat = asyncio.create_task(stagger.seat())
        started_s = loop.time()
        await seat
        assert 0 < loop.time() - started_s <= min(KEEP_S, 1.5 * WAIT_S)

    played(scene())


def test_a_seat_is_waited_for_in_bounded_time() -> None:
    async def scene() -> None:
        stagger = Stagger(seats=0, uneven=random.Random(5))
        assert await stagger.seat() is None
        assert asyncio.get_running_loop().time() <= 1.5 * WAIT_S

    played(scene())


def test_a_seat_is_given_back_once() -> None:
    async def scene() -> None:
        stagger = Stagger(seats=1, uneven=random.Random(5))
        first = await stagger.seat()
        assert first is not None
        first.free()
        first.free()
        assert await stagger.seat() is not None
        assert await stagger.seat() is not None, "the one before has been kept for too long"
        waits = asyncio.create_task(stagger.seat())
        await asyncio.sleep(0.1)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert asyncio.get_running_loop().time() < KEEP_S + WAIT_S
        assert await stagger.seat() is not None, "who gives up takes none along"

    played(scene())


def test_a_session_that_is_lost_meanwhile_frees_its_seat() -> None:
    async def scene() -> None:
        stagger = Stagger(seats=1, uneven=random.Random(5))
        session = held_session(1, LedgerBehindAnOutage(100.0), stagger)
        redo = asyncio.create_task(session.redo(3, 2, "engine_restart"))
        await asyncio.sleep(1.0)
        session._keeper._lost = LeaseLost("s-1", "another owner")
        with pytest.raises(LeaseLost):
            await redo
        started_s = asyncio.get_running_loop().time()
        assert await stagger.seat() is not None
        assert asyncio.get_running_loop().time() == started_s

    played(scene())
