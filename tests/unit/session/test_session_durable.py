"""Writes whose outcome is unknown, a ledger that is away, an end in the middle of a write."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from duplex_sidecar.ledger.call import Head, PendingCall, ScriptName
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    LeaseLost,
    LedgerError,
    LedgerUnavailable,
)
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.lease import Lease, LeaseKeeper
from duplex_sidecar.ledger.records import ClosedDraft
from duplex_sidecar.session import durable
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.staggering import Stagger
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.settings import TelemetrySettings

pytestmark = pytest.mark.unit
LEASE = Lease("s", "r", 1, "nonce", "era", deadline_ms=1_000)
BEFORE = Head(4, "four", 2, None)
BATCH = JournalBatch(unit=2, first_seq=1, events=(b"event",))


class ScriptedLedger:
    """Answers each call with the next outcome: an error to raise, or a value."""

    def __init__(self, *outcomes: object) -> None:
        self._outcomes = list(outcomes)
        self.calls: list[tuple[str, Any]] = []

    async def _next(self, name: str, what: Any) -> Any:
        self.calls.append((name, what))
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def note(self, lease: Lease, head: Head, draft: object) -> Head:
        return await self._next("note", (head.hash, draft))

    async def journal(self, lease: Lease, batch: JournalBatch) -> int:
        return await self._next("journal", batch)

    async def retry_unknown(self, pending: PendingCall) -> Head | None:
        return await self._next("retry", pending)

    async def release(self, lease: Lease, *, ended: str | None = None) -> None:
        await self._next("release", ended)

    async def load(self, session: str) -> object:
        return await self._next("load", session)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def ms(self) -> int:
        return int(self.now * 1000)

    def s(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[DurableSession, ScriptedLedger, LeaseKeeper]]:
    sleep = asyncio.sleep

    async def pass_time(seconds: float) -> None:
        clock.now += seconds
        await sleep(0)

    monkeypatch.setattr(durable.asyncio, "sleep", pass_time)
    metrics = Metrics(TelemetrySettings(replica="r"))

    async def renew(lease: Lease) -> Lease:
        return lease

    def made(*outcomes: object) -> tuple[DurableSession, ScriptedLedger, LeaseKeeper]:
        ledger = ScriptedLedger(*outcomes)
        keeper = LeaseKeeper(renew, LEASE, clock_ms=clock.ms)
        session = DurableSession(
            ledger,  # type: ignore[arg-type]
            keeper,
            BEFORE,
            hold_s=1.0,
            metrics=metrics,
            clock_s=clock.s,
            stagger=Stagger(uneven=random.Random(1)),
        )
        return session, ledger, keeper

    return made


def pending(number: int = 0) -> PendingCall:
    return PendingCall("s", ScriptName.NOTE, (), (number,), Head(5, "five", 2, None))


def away(call: PendingCall | None = None) -> LedgerUnavailable:
    return LedgerUnavailable("s", "away", call)


async def test_an_unknown_outcome_is_asked_for_with_the_same_operation(make: Any) -> None:
    first = pending()
    session, ledger, _ = make(away(first), away(first), away(), Head(5, "five", 2, None))
    await session.redo(3, 2, "engine_restart")
    assert [name for name, _ in ledger.calls] == ["note", "retry", "retry", "retry"]
    assert {what for name, what in ledger.calls if name == "retry"} == {first}
    assert session.head.hash == "five"


async def test_what_was_certainly_not_executed_is_sent_anew(make: Any) -> None:
    session, ledger, _ = make(away(), away(), Head(5, "five", 2, None))
    await session.redo(3, 2, "engine_restart")
    assert [name for name, _ in ledger.calls] == ["note", "note", "note"]


async def test_input_is_refused_once_the_ledger_has_been_away_for_the_hold(
    make: Any, clock: Clock
) -> None:
    refused: list[tuple[float, bool]] = []
    session, ledger, _ = make(*[away(pending())] * 9, Head(5, "five", 2, None))
    noted = ledger._next

    async def note_time(name: str, what: Any) -> Any:
        refused.append((clock.now, session.refuses_input))
        return await noted(name, what)

    ledger._next = note_time
    await session.redo(3, 2, "engine_restart")
    assert all(refuses == (now > 1.0) for now, refuses in refused)
    assert refused[-1][1]
    assert not session.refuses_input, "it is back"


async def test_a_lost_lease_ends_the_waiting(make: Any) -> None:
    session, _, keeper = make(away(pending()), away(pending()))
    lost = LeaseLost("s", "another owner")
    keeper._lost = lost
    with pytest.raises(LeaseLost):
        await session.redo(3, 2, "engine_restart")


async def test_events_leave_only_under_the_lease(make: Any, clock: Clock) -> None:
    session, ledger, keeper = make(1, 2)
    await session.journal(BATCH)
    clock.now = 1.5  # behind the deadline: the owner is silent
    journaling = asyncio.create_task(session.journal(BATCH))
    for _ in range(20):
        await asyncio.tasks.sleep(0)
    assert len(ledger.calls) == 2
    assert not journaling.done()
    keeper._lease = Lease("s", "r", 1, "nonce", "era", deadline_ms=10_000_000)
    keeper._news.set()
    await journaling
    clock.now = 20_000.0
    session, _, keeper = make(3)
    keeper._lost = LeaseLost("s", "another owner")
    with pytest.raises(LeaseLost):
        await session.journal(BATCH)


async def test_the_end_writes_a_last_entry_and_gives_the_lease_back(make: Any) -> None:
    session, ledger, _ = make(away(), Head(5, "five", 2, None), away(), None)
    await session.end("session_ended")
    closed = ("note", ("four", ClosedDraft(seq=2, reason="session_ended")))
    released = ("release", "session_ended")
    assert ledger.calls == [closed, closed, released, released]


async def test_the_end_after_a_write_that_nobody_waited_for(make: Any) -> None:
    """Its commit arrived all the same: the head is another one, and it is ours."""
    seen = Head(6, "six", 3, None)
    session, ledger, _ = make(HeadMismatch("s", seen), Head(7, "seven", 3, None), None)
    await session.end("session_expired")
    assert ledger.calls[1] == ("note", ("six", ClosedDraft(seq=3, reason="session_expired")))
    assert ledger.calls[2] == ("release", "session_expired")


async def test_the_end_after_an_accept_that_nobody_waited_for(make: Any) -> None:
    """A unit is open: no closing entry may stand there, the session ends all the same."""
    session, ledger, _ = make(HeadMismatch("s", Head(5, "five", 2, 3)), None)
    await session.end("session_expired")
    assert [name for name, _ in ledger.calls] == ["note", "release"]


async def test_what_the_ledger_refuses_is_not_tried_again(make: Any) -> None:
    for error in (HeadMismatch("s", BEFORE), LeaseLost("s", "x"), LedgerError("s", "x")):
        session, ledger, _ = make(error)
        with pytest.raises(type(error)):
            await session.redo(3, 2, "engine_restart")
        assert len(ledger.calls) == 1
        assert session.head == BEFORE


async def test_loading_waits_for_the_ledger_too(make: Any) -> None:
    loaded = object()
    session, ledger, _ = make(away(), away(), loaded)
    assert await session.load() is loaded
    assert len(ledger.calls) == 3


async def test_after_a_call_that_is_refused_or_given_up_nobody_counts_the_ledger_as_away(
    make: Any, clock: Clock
) -> None:
    session, _, _ = make(away(), HeadMismatch("s", BEFORE))
    with pytest.raises(HeadMismatch):
        await session.redo(3, 2, "engine_restart")
    clock.now += 5.0
    assert not session.refuses_input
    session, ledger, _ = make(*[away()] * 10_000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await session.load()
    assert ledger.calls
    clock.now += 5.0
    assert not session.refuses_input, "its next write would never be allowed to come"
