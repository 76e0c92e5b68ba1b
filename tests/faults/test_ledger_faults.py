"""Lost replies, late requests, a server that stops, hangs, dies: each write happens once, and what
is unknown is said to be unknown."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.ledger_kit import LossyProxy, Writer, spoken_batch
from support.patience import PATIENCE_S, PATIENT
from support.standstill import Standstill
from support.valkeys import crash

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LeaseLost, LedgerUnavailable
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.lease import LeaseKeeper, LeaseState
from duplex_sidecar.ledger.records import RedoDraft, describe
from duplex_sidecar.ledger.store import Ledger, LedgerOptions

pytestmark = pytest.mark.fault


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def proxy(valkey: EmbeddedValkey, tmp_path: Path) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(valkey.url, tmp_path) as proxy:
        yield proxy


@pytest.fixture
async def ledger(proxy: LossyProxy) -> AsyncIterator[Ledger]:
    """Through the proxy. What hangs costs so much time, and no more is taken for lost."""
    ledger = await Ledger.connect(proxy.url, LedgerOptions(call_timeout_ms=1_000))
    yield ledger
    await ledger.close()


@pytest.fixture
async def direct(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    """Past the proxy: an outside observer."""
    ledger = await Ledger.connect(valkey.url, PATIENT)
    yield ledger
    await ledger.close()


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


async def records_of(ledger: Ledger, session: str) -> list[str]:
    return [describe(entry.record) for entry in (await ledger.load(session)).entries]


# --- lost replies -------------------------------------------------------------------------------


@pytest.mark.parametrize("hang", [False, True])
async def test_every_write_whose_reply_is_lost_happens_exactly_once(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str, hang: bool
) -> None:
    proxy.hang = hang

    def lose() -> None:
        proxy.lose_replies = 1

    lose()
    writer = await Writer.create(ledger, session)
    fence = writer.lease.fence
    for seq in (1, 2):
        lose()
        await writer.accept(seq, state=b"carry")
        lose()
        redo = RedoDraft(seq=seq, attempt=2, cause="engine_restart")
        writer.head = await ledger.note(writer.lease, writer.head, redo)
        lose()
        await writer.commit(seq)
        lose()
        await ledger.journal(writer.lease, spoken_batch(seq, seq, chunk=seq - 1))
    lose()
    await ledger.renew(writer.lease)
    lose()
    await ledger.release(writer.lease)
    lose()
    lease = await ledger.acquire(session, "replica-b")

    assert proxy.lost == 12
    assert lease.fence == fence + 1
    assert await records_of(direct, session) == [
        f"{kind} {seq}" for seq in (1, 2) for kind in ("accepted", "redo", "committed")
    ]
    loaded = await direct.load(session)
    assert loaded.head == writer.head
    assert (loaded.meta.events_last, len(loaded.marks)) == (2, 2)


async def test_a_lease_whose_reply_was_lost_counts_from_the_first_sending(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    """The server's lease began with the first one; the local deadline must not begin later."""
    writer = await Writer.create(direct, session)
    await direct.release(writer.lease)
    proxy.hang, proxy.lose_replies = True, 1
    lease = await ledger.acquire(session, "replica-b")
    meta = await direct.reader.meta(session)
    assert meta is not None
    server_left_ms = meta.lease_until_ms - time.time_ns() // 1_000_000
    local_left_ms = lease.deadline_ms - time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    assert local_left_ms <= server_left_ms - 490


async def test_what_stays_unknown_is_told_and_can_be_resolved(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    proxy.lose_replies = 2
    with pytest.raises(LedgerUnavailable) as caught:
        await writer.accept(1)
    pending = caught.value.pending
    assert pending is not None
    head = await ledger.retry_unknown(pending)
    assert head is not None
    writer.head = head
    await writer.commit(1)
    assert (await direct.load(session)).head == writer.head
    assert await records_of(direct, session) == ["accepted 1", "committed 1"]


async def test_a_pending_call_of_a_lost_lease_is_refused(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    proxy.open_gate.clear()
    with pytest.raises(LedgerUnavailable) as caught:
        await writer.accept(1)
    assert caught.value.pending is not None
    await direct.break_lease(session, replica=writer.lease.replica)
    new = await Writer.take_over(direct, session, "replica-b")
    await new.unit(1)
    proxy.open_gate.set()
    with pytest.raises(LeaseLost):
        await ledger.retry_unknown(caught.value.pending)
    assert (await direct.load(session)).head == new.head


async def test_requests_that_arrive_late_change_nothing(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    """The first sending is stuck in the network, the resolved call and the next unit overtake it;
    then it is delivered, twice over."""
    writer = await Writer.create(ledger, session)
    proxy.open_gate.clear()
    with pytest.raises(LedgerUnavailable) as caught:
        await writer.accept(1)
    assert caught.value.pending is not None
    head = await direct.retry_unknown(caught.value.pending)
    assert head is not None
    late = Writer(direct, writer.lease, head)
    await late.commit(1)
    await late.unit(2)
    proxy.open_gate.set()
    await asyncio.sleep(0.1)
    assert (await direct.load(session)).head == late.head
    assert len(await records_of(direct, session)) == 4


async def test_a_journal_call_whose_reply_is_lost_twice_keeps_one_sequence(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    proxy.lose_replies = 2
    with pytest.raises(LedgerUnavailable) as caught:
        await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0, event=b"one"))
    assert caught.value.pending is not None
    await ledger.retry_unknown(caught.value.pending)
    await ledger.journal(writer.lease, JournalBatch(unit=0, first_seq=2, events=(b"two",)))
    after = await direct.events_after(session, 0)
    assert [one.event for one in after.events] == [b"one", b"two"]


async def test_a_cancelled_write_does_not_poison_the_connection(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    """An answer to a cancelled call must never be read as the answer to the next."""
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    for _ in range(20):
        call = asyncio.create_task(ledger.renew(writer.lease))
        await asyncio.sleep(0)
        await asyncio.sleep(secrets.randbelow(3) / 3000)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        meta = await ledger.reader.meta(session)
        assert meta is not None
        assert meta.head == writer.head
    await writer.unit(2)


async def test_dead_connections_of_the_pool_cost_one_time_out_not_one_each(
    ledger: Ledger, proxy: LossyProxy, session: str
) -> None:
    """A server's host that vanishes leaves connections on which nothing is ever answered."""
    writer = await Writer.create(ledger, session)
    await asyncio.gather(*(ledger.renew(writer.lease) for _ in range(8)))
    assert proxy.connections >= 8
    proxy.vanish()
    await asyncio.gather(*(ledger.renew(writer.lease) for _ in range(8)))
    await ledger.renew(writer.lease)


# --- a server that is away ----------------------------------------------------------------------


async def test_a_server_that_is_gone_is_told_quickly(
    valkey: EmbeddedValkey, direct: Ledger, session: str
) -> None:
    writer = await Writer.create(direct, session)
    valkey.kill()
    calls: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: writer.accept(1),
        lambda: direct.renew(writer.lease),
        lambda: direct.load(session),
        lambda: Ledger.connect(valkey.url),
    )
    for call in calls:
        with Standstill() as stood, pytest.raises(LedgerUnavailable):
            await call()
        assert stood.moved_s() < 0.5


async def test_a_killed_server_comes_back_with_everything_and_the_owner_goes_on(
    valkey: EmbeddedValkey, direct: Ledger, session: str
) -> None:
    writer = await Writer.create(direct, session)
    await writer.units(5)
    await direct.journal(writer.lease, spoken_batch(1, 1, chunk=0))
    crash(valkey)
    with pytest.raises(LedgerUnavailable):
        await writer.accept(6)
    valkey.start()
    # The server has forgotten the scripts and every connection; the era is another.
    renewed = await direct.renew(writer.lease)
    assert renewed.fence == writer.lease.fence
    await writer.unit(6)
    loaded = await direct.load(session)
    assert loaded.head == writer.head
    assert len(loaded.committed) == 6
    assert (await direct.events_after(session, 0)).last_seq == 1


async def test_many_sessions_survive_a_restart_over_one_pool(
    valkey: EmbeddedValkey, direct: Ledger, session: str
) -> None:
    writers = [await Writer.create(direct, f"{session}-{number}") for number in range(20)]
    await asyncio.gather(*(writer.unit(1) for writer in writers))
    crash(valkey)
    valkey.start()
    await asyncio.gather(*(writer.unit(2) for writer in writers))
    for writer in writers:
        loaded = await direct.load(writer.lease.session)
        assert [unit.seq for unit in loaded.committed] == [1, 2]


async def test_the_keeper_falls_silent_and_takes_the_same_fence_up_again(
    valkey: EmbeddedValkey, direct: Ledger, session: str
) -> None:
    writer = await Writer.create(direct, session)
    keeper = LeaseKeeper(direct.renew, writer.lease)
    keeper.start()
    crash(valkey)
    await asyncio.sleep(2.7)
    assert keeper.state is LeaseState.SILENT
    valkey.start()
    await asyncio.wait_for(keeper.wait_held(), PATIENCE_S)
    assert (keeper.lease.fence, keeper.silences) == (writer.lease.fence, 1)
    await keeper.stop()
    await writer.unit(1)


async def test_a_stopped_server_hangs_nobody_and_executes_late_writes_once(
    valkey: EmbeddedValkey, direct: Ledger, session: str
) -> None:
    writer = await Writer.create(direct, session)
    await writer.unit(1)
    usual = await Ledger.connect(valkey.url)
    pid = valkey.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        writer.ledger = usual
        with Standstill() as stood, pytest.raises(LedgerUnavailable) as caught:
            await writer.accept(2)
        assert stood.moved_s() < 1.0
    finally:
        os.kill(pid, signal.SIGCONT)
        writer.ledger = direct
        await usual.close()
    assert caught.value.pending is not None
    head = await direct.retry_unknown(caught.value.pending)
    assert head is not None
    writer.head = head
    await writer.commit(2)
    assert (await direct.load(session)).head == writer.head


async def test_random_losses_over_a_conversation_lose_and_double_nothing(
    ledger: Ledger, direct: Ledger, proxy: LossyProxy, session: str
) -> None:
    """Replies are lost at random, once or three times in a row; the owner resolves what is unknown.
    Seeded by the unit numbers, so that each run is the same."""
    writer = await Writer.create(ledger, session)

    async def surely(call: Awaitable[object]) -> None:
        try:
            await call
        except LedgerUnavailable as error:
            if error.pending is None:
                raise
            head = await ledger.retry_unknown(error.pending)
            writer.head = head or writer.head

    for seq in range(1, 61):
        proxy.lose_replies = (seq * 7) % 4
        await surely(writer.accept(seq))
        proxy.lose_replies = (seq * 5) % 3
        await surely(writer.commit(seq))
        proxy.lose_replies = (seq * 3) % 4
        await surely(ledger.journal(writer.lease, spoken_batch(seq, seq, chunk=seq - 1)))
    assert proxy.lost > 100
    loaded = await direct.load(session)
    assert [unit.seq for unit in loaded.committed] == list(range(1, 61))
    assert loaded.head == writer.head
    assert len(loaded.marks) == loaded.meta.events_last == 60
