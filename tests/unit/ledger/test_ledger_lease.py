"""The lease keeper against a scripted ledger and a clock of its own."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from duplex_sidecar.ledger.errors import LeaseLost, LedgerUnavailable
from duplex_sidecar.ledger.lease import (
    LEASE_MS,
    MARGIN_MS,
    RENEW_PERIOD_MS,
    RETRY_PERIOD_MS,
    Lease,
    LeaseKeeper,
    LeaseState,
)

pytestmark = pytest.mark.unit


class Over(Exception):
    """The time of the test is over."""


class FakeTime:
    """Sleeping moves the clock."""

    def __init__(self, until_ms: int) -> None:
        self.now_ms = 0
        self.until_ms = until_ms
        self.seen: list[tuple[int, LeaseState]] = []
        self.look: Callable[[], LeaseState] | None = None

    def clock_ms(self) -> int:
        return self.now_ms

    async def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds * 1000 / 50)):
            self.now_ms += 50
            if self.look is not None:
                self.seen.append((self.now_ms, self.look()))
        if self.now_ms >= self.until_ms:
            raise Over


class FakeLedger:
    """Answers renewals but for the times it is away or the session is lost."""

    def __init__(self, time: FakeTime, away_ms: range, lost_at_ms: int | None = None) -> None:
        self.time = time
        self.away_ms = away_ms
        self.lost_at_ms = lost_at_ms
        self.sent_ms: list[int] = []

    async def renew(self, lease: Lease) -> Lease:
        self.sent_ms.append(self.time.now_ms)
        if self.lost_at_ms is not None and self.time.now_ms >= self.lost_at_ms:
            raise LeaseLost("s", "owner is b with fence 2")
        if self.time.now_ms in self.away_ms:
            raise LedgerUnavailable("s", "away")
        deadline_ms = self.time.now_ms + LEASE_MS - MARGIN_MS
        return msgspec.structs.replace(lease, deadline_ms=deadline_ms)


LEASE = Lease("s", "a", 1, "n", "e", LEASE_MS - MARGIN_MS)


async def run(
    away_ms: range, until_ms: int, lost_at_ms: int | None = None
) -> tuple[LeaseKeeper, FakeTime, FakeLedger]:
    time = FakeTime(until_ms)
    ledger = FakeLedger(time, away_ms, lost_at_ms)
    keeper = LeaseKeeper(ledger.renew, LEASE, clock_ms=time.clock_ms, sleep=time.sleep)
    time.look = lambda: keeper.state
    with suppress(Over):
        await keeper.run()
    return keeper, time, ledger


async def test_renews_each_second_and_stays_held() -> None:
    keeper, time, ledger = await run(range(0), 10_000)
    assert ledger.sent_ms == list(range(RENEW_PERIOD_MS, 10_000, RENEW_PERIOD_MS))
    assert {state for _, state in time.seen} == {LeaseState.HELD}
    assert keeper.silences == 0


async def test_is_silent_before_the_servers_lease_ends_and_held_again_when_confirmed() -> None:
    keeper, time, ledger = await run(range(1_500, 6_000), 9_000)
    silent = [at for at, state in time.seen if state is LeaseState.SILENT]
    # The last confirmed renewal was sent at 1,000: the server's lease ends at 4,000 or later.
    assert silent[0] == 1_000 + LEASE_MS - MARGIN_MS
    assert silent[-1] < 6_000 + RETRY_PERIOD_MS + RENEW_PERIOD_MS
    assert keeper.silences == 1
    assert keeper.held
    tries = [at for at in ledger.sent_ms if at in range(2_000, 6_000)]
    assert len(tries) == pytest.approx(4_000 / RETRY_PERIOD_MS, abs=2)


async def test_a_refusal_is_final_and_told() -> None:
    keeper, _, ledger = await run(range(0), 60_000, lost_at_ms=3_000)
    assert keeper.state is LeaseState.LOST
    assert not keeper.held
    assert isinstance(await keeper.wait_lost(), LeaseLost)
    assert ledger.sent_ms[-1] == 3_000


async def test_waiting_for_the_lease_ends_when_it_is_held_or_lost() -> None:
    clock_ms = 10_000
    answers: list[Lease | Exception] = [
        LedgerUnavailable("s", "away"),
        msgspec.structs.replace(LEASE, deadline_ms=20_000),
        LeaseLost("s", "owner is b"),
    ]

    async def renew(lease: Lease) -> Lease:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    keeper = LeaseKeeper(renew, LEASE, clock_ms=lambda: clock_ms, sleep=sleep)
    keeper.start()
    await asyncio.wait_for(keeper.wait_held(), 60)
    await asyncio.wait_for(keeper.wait_lost(), 60)
    with pytest.raises(LeaseLost):
        await keeper.wait_held()
    await keeper.stop()


async def test_a_short_absence_is_not_noticed() -> None:
    keeper, time, _ = await run(range(1_900, 3_000), 6_000)
    assert {state for _, state in time.seen} == {LeaseState.HELD}
    assert keeper.silences == 0


async def test_an_error_without_a_name_loses_the_lease_instead_of_ending_in_silence() -> None:
    async def renew(_: Lease) -> Lease:
        raise RuntimeError("not of the ledger's")

    async def no_sleep(_: float) -> None:
        await asyncio.sleep(0)

    keeper = LeaseKeeper(renew, LEASE, clock_ms=lambda: 10**9, sleep=no_sleep)
    keeper.start()
    async with asyncio.timeout(60):
        lost = await keeper.wait_lost()
        with pytest.raises(LeaseLost):
            await keeper.wait_held()
    assert keeper.state is LeaseState.LOST
    assert isinstance(lost, LeaseLost)
    await keeper.stop()
