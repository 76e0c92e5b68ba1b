"""The ledger against a real Valkey: what owners write others read, and nobody else writes."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from support.ledger_kit import (
    CHUNK_SAMPLES,
    Writer,
    accept_draft,
    commit_draft,
    cut_of,
    noise,
    opening_draft,
    spoken_batch,
    state_after,
    truncated_draft,
    unit_media,
)
from support.patience import PATIENCE_S, PATIENT

from duplex_sidecar.ledger import records, store, token
from duplex_sidecar.ledger.call import Head, PendingCall
from duplex_sidecar.ledger.client_calls import Played, cut_call
from duplex_sidecar.ledger.connection import Connection, Reply
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    JournalMismatch,
    LeaseHeld,
    LeaseLost,
    LeaseSettling,
    LedgerError,
    LedgerFull,
    LedgerUnavailable,
    LedgerUnsuitable,
    SessionEnded,
    SessionErased,
    SessionExists,
    SessionUnknown,
    StaleFence,
)
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.lease import RENEW_PERIOD_MS, Lease, LeaseKeeper
from duplex_sidecar.ledger.media import Trim
from duplex_sidecar.ledger.moving import new_offer
from duplex_sidecar.ledger.records import (
    CancelledDraft,
    ClosedDraft,
    RedoDraft,
    stopped_units,
)
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.store import Ledger, LedgerOptions
from duplex_sidecar.ledger.sweep import find_ownerless, still_ownerless

pytestmark = pytest.mark.integration


@pytest.fixture
async def ledger(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(valkey.url, PATIENT)
    yield ledger
    await ledger.close()


@pytest.fixture
async def raw(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    """The server without our rules: for looking and for damage."""
    client = Redis.from_url(valkey.url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


async def everything(raw: Redis, session: str) -> dict[str, bytes]:
    """All bytes of a session, as the server would dump them."""
    return {key: await raw.dump(key) or b"" for key in session_keys(session).all()}


# --- round trips --------------------------------------------------------------------------------


async def test_what_is_written_is_what_is_loaded(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    await writer.accept(2, state=b"framing carry")
    await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))

    loaded = await ledger.load(session)

    assert msgspec.json.encode(loaded.opening.parts) == msgspec.json.encode(
        opening_draft(session).parts
    )
    assert bytes(loaded.opening.window) == b'{"mode":"context"}'
    assert loaded.reference_rows == (noise("reference", 160),)
    assert loaded.head == writer.head == Head(3, loaded.entries[-1].hash, 1, 2)
    assert [records.describe(e.record) for e in loaded.entries] == [
        "accepted 1",
        "committed 1",
        "accepted 2",
    ]
    assert loaded.media == {1: unit_media(1), 2: unit_media(2)}
    assert loaded.state == state_after(1)
    assert loaded.accepted_state == b"framing carry"
    assert loaded.open_unit is not None
    assert (loaded.open_unit.seq, loaded.attempts) == (2, 1)
    assert loaded.committed[0].token_ids == commit_draft(1).token_ids
    assert loaded.marks == (spoken_batch(1, 1, chunk=0).mark,)
    assert (loaded.voice_state, loaded.voice_unit) == (noise("voice 1", 100), 1)
    assert loaded.meta.voiced_seq == 1


async def test_a_new_session_loads_with_its_first_state(ledger: Ledger, session: str) -> None:
    await Writer.create(ledger, session)
    loaded = await ledger.load(session)
    assert (loaded.state, loaded.entries, loaded.media) == (state_after(0), (), {})


async def test_creation_does_not_replace_a_session(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    with pytest.raises(SessionExists):
        await Writer.create(ledger, session)
    assert (await ledger.load(session)).head == writer.head


async def test_an_unknown_session_is_never_made_up(ledger: Ledger, session: str) -> None:
    assert not await ledger.exists(session)
    assert await ledger.phase(session) is None
    lease = Lease(session, "a", 1, "n", "", 0)
    head = Head(0, "0" * 64, 0, None)
    with pytest.raises(SessionUnknown):
        await ledger.acquire(session, "a")
    with pytest.raises(SessionUnknown):
        await ledger.renew(lease)
    with pytest.raises(SessionUnknown):
        await ledger.accept(lease, head, accept_draft(1), unit_media(1))
    with pytest.raises(SessionUnknown):
        await ledger.load(session)
    assert not await ledger.exists(session)


async def test_all_sessions_can_be_listed(ledger: Ledger, session: str) -> None:
    names = {f"{session}-{number}" for number in range(3)}
    for name in names:
        await Writer.create(ledger, name)
    assert names <= {name async for name in ledger.reader.sessions()}


async def test_every_key_expires(ledger: Ledger, raw: Redis, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
    for key in session_keys(session).all():
        assert 23 * 3_600_000 < await raw.pttl(key) <= 24 * 3_600_000
    keys = session_keys(session)
    await raw.hset(keys.meta, "touched", "0")
    await raw.pexpire(keys.rows, 100_000)
    await ledger.renew(writer.lease)
    assert await raw.pttl(keys.rows) > 23 * 3_600_000


async def test_a_short_retention_does_not_end_under_a_living_owner(
    ledger: Ledger, raw: Redis, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refreshed before it is over, and never shorter than a takeover takes."""
    least_ms = 120_000  # none runs out while the machine stands still
    monkeypatch.setattr(store, "LEAST_RETENTION_MS", least_ms)
    writer = await Writer.create(ledger, session, retention_ms=1_000)
    meta = session_keys(session).meta
    assert least_ms / 2 < await raw.pttl(meta) <= least_ms
    touched = int(await raw.hget(meta, "touched") or 0)
    for left_ms, refreshed in ((least_ms - 20_000, False), (50_000, True)):
        await raw.hset(meta, "touched", str(touched - (least_ms - left_ms)))
        await raw.pexpire(meta, left_ms)
        await ledger.renew(writer.lease)
        assert (await raw.pttl(meta) > left_ms) == refreshed


# --- one owner ----------------------------------------------------------------------------------


async def test_a_valid_lease_is_not_taken(ledger: Ledger, raw: Redis, session: str) -> None:
    began_ms = await server_ms(raw)
    await Writer.create(ledger, session, "replica-a")
    until_ms = int(await raw.hget(session_keys(session).meta, "until") or 0)
    assert began_ms <= until_ms - store.LEASE_MS <= await server_ms(raw)
    with pytest.raises(LeaseHeld) as caught:
        await ledger.acquire(session, "replica-b")
    left_ms = until_ms - await server_ms(raw)
    assert caught.value.replica == "replica-a"
    assert left_ms <= caught.value.remaining_ms <= store.LEASE_MS


async def server_ms(raw: Redis) -> int:
    seconds, micros = await raw.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def test_a_zombie_writes_nothing(ledger: Ledger, raw: Redis, session: str) -> None:
    old = await Writer.create(ledger, session, "replica-a")
    await old.unit(1)
    await old.accept(2)
    assert await ledger.break_lease(session, replica="replica-a")
    new = await Writer.take_over(ledger, session, "replica-b")
    assert new.lease.fence == old.lease.fence + 1
    before = await everything(raw, session)

    attempts = (
        old.commit(2),
        old.accept(3),
        ledger.note(old.lease, old.head, RedoDraft(seq=2, attempt=2, cause="x")),
        ledger.journal(old.lease, spoken_batch(1, 1, chunk=0)),
        ledger.renew(old.lease),
        ledger.offer_token(old.lease, "1" * 64),
        ledger.confirm_token(old.lease, "1" * 64),
        ledger.release(old.lease),
    )
    for attempt in attempts:
        with pytest.raises(LeaseLost, match="replica-b"):
            await attempt
    assert await everything(raw, session) == before

    await new.commit(2)
    assert (await ledger.load(session)).committed[-1].replica == "replica-b"


async def test_the_same_fence_with_another_nonce_is_a_stranger(
    ledger: Ledger, session: str
) -> None:
    """What a failover to a stale replica can make: two owners with one number."""
    writer = await Writer.create(ledger, session)
    right = writer.lease
    for wrong in (
        msgspec.structs.replace(right, nonce="f" * 32),
        msgspec.structs.replace(right, fence=right.fence + 1),
    ):
        writer.lease = wrong
        with pytest.raises(LeaseLost):
            await writer.accept(1)


async def test_an_expired_lease_that_nobody_took_goes_on_with_its_fence(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await raw.hset(session_keys(session).meta, "until", "1")
    renewed = await ledger.renew(writer.lease)
    assert (renewed.fence, renewed.nonce) == (writer.lease.fence, writer.lease.nonce)
    await writer.unit(1)
    with pytest.raises(LeaseHeld):
        await ledger.acquire(session, "replica-b")


async def test_an_expired_lease_can_be_taken(ledger: Ledger, raw: Redis, session: str) -> None:
    old = await Writer.create(ledger, session)
    await raw.hset(session_keys(session).meta, "until", "1")
    new = await Writer.take_over(ledger, session, "replica-b")
    await new.unit(1)
    with pytest.raises(LeaseLost):
        await ledger.renew(old.lease)


async def test_of_many_who_try_one_gets_the_lease(ledger: Ledger, raw: Redis, session: str) -> None:
    await Writer.create(ledger, session)
    await raw.hset(session_keys(session).meta, "until", "1")
    tries = [ledger.acquire(session, f"replica-{number}") for number in range(20)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, Lease) for result in results) == 1
    assert sum(isinstance(result, LeaseHeld) for result in results) == 19


async def test_two_owners_racing_for_each_write_leave_one_chain(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    """Both believe in the lease; whoever lost it stops, and the chain has every unit once."""
    owners = [await Writer.create(ledger, session, "replica-0")]
    refused = 0
    for seq in range(1, 21):
        await raw.hset(session_keys(session).meta, "until", "1")
        owners.append(await Writer.take_over(ledger, session, f"replica-{seq}"))
        old, new = owners[-2:]
        old.head = new.head
        results = await asyncio.gather(old.unit(seq), new.unit(seq), return_exceptions=True)
        assert results[1] is None
        refused += isinstance(results[0], LeaseLost)
    assert refused == 20
    loaded = await ledger.load(session)
    assert [unit.seq for unit in loaded.committed] == list(range(1, 21))
    assert [unit.replica for unit in loaded.committed] == [f"replica-{n}" for n in range(1, 21)]


async def test_proof_of_death_names_the_process(ledger: Ledger, session: str) -> None:
    await Writer.create(ledger, session, "replica-a")
    assert not await ledger.break_lease(session, replica="replica-b")
    with pytest.raises(LeaseHeld):
        await ledger.acquire(session, "replica-b")
    assert await ledger.break_lease(session, replica="replica-a")
    assert not await ledger.break_lease(session, replica="replica-a")
    await ledger.acquire(session, "replica-b")


async def test_a_lease_that_is_given_back_late_is_not_the_next_one(
    ledger: Ledger, session: str
) -> None:
    first = (await Writer.create(ledger, session, "replica-a")).lease
    await ledger.release(first)
    second = await ledger.acquire(session, "replica-a")
    with pytest.raises(LeaseHeld) as held:
        await ledger.acquire(session, "replica-b")
    assert held.value.nonce == second.nonce
    assert not await ledger.break_lease(session, replica="replica-a", nonce=first.nonce)
    assert not await ledger.break_lease(session, replica="replica-b", nonce=second.nonce)
    await ledger.renew(second)
    assert await ledger.break_lease(session, replica="replica-a", nonce=second.nonce)


async def test_an_issued_fence_must_be_larger(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await ledger.release(writer.lease)
    with pytest.raises(StaleFence):
        await ledger.acquire(session, "replica-b", fence=writer.lease.fence)
    lease = await ledger.acquire(session, "replica-b", fence=70)
    assert lease.fence == 70


async def test_after_a_server_change_only_the_recorded_owner_goes_on(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    meta = session_keys(session).meta
    writer = await Writer.create(ledger, session)
    await raw.hset(meta, mapping={"era": "0" * 40, "until": "1"})
    with pytest.raises(LeaseSettling) as caught:
        await ledger.acquire(session, "replica-b")
    assert caught.value.wait_ms == store.LEASE_MS
    with pytest.raises(LeaseSettling) as caught:
        await ledger.acquire(session, "replica-c")
    assert caught.value.wait_ms <= store.LEASE_MS
    await writer.unit(1)
    await ledger.renew(writer.lease)
    with pytest.raises(LeaseHeld):
        await ledger.acquire(session, "replica-b")


async def test_an_owner_confirmed_after_a_server_change_is_not_followed_without_settling(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    meta = session_keys(session).meta
    writer = await Writer.create(ledger, session)
    await raw.hset(meta, "era", "0" * 40)
    await ledger.renew(writer.lease)
    await raw.hset(meta, "until", "1")
    with pytest.raises(LeaseSettling):
        await ledger.acquire(session, "replica-b")


async def test_after_settling_the_fence_steps_over_any_that_may_be_lost(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    meta = session_keys(session).meta
    writer = await Writer.create(ledger, session)
    await raw.hset(meta, mapping={"era": "0" * 40, "until": "1"})
    with pytest.raises(LeaseSettling):
        await ledger.acquire(session, "replica-b")
    await raw.hset(meta, "settle_until", "1")
    lease = await ledger.acquire(session, "replica-b")
    assert lease.fence == writer.lease.fence + 1_000_000


async def test_a_lease_lasts_no_longer_because_the_servers_clock_went_back(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    """The clock that a lost owner's lease was measured with was an hour ahead."""
    meta = session_keys(session).meta
    await Writer.create(ledger, session)
    ahead_ms = int(await raw.hget(meta, "until") or 0) + 3_600_000
    await raw.hset(meta, "until", str(ahead_ms))
    with pytest.raises(LeaseHeld) as caught:
        await ledger.acquire(session, "replica-b")
    assert caught.value.remaining_ms == store.LEASE_MS
    left_ms = ahead_ms - int(await raw.hget(meta, "until") or 0)
    assert left_ms > 3_500_000, "it runs out like any other"
    await raw.hset(meta, mapping={"era": "0" * 40, "until": "1"})
    with pytest.raises(LeaseSettling):
        await ledger.acquire(session, "replica-b")
    await raw.hset(meta, "settle_until", str(ahead_ms))
    with pytest.raises(LeaseSettling) as settling:
        await ledger.acquire(session, "replica-b")
    assert settling.value.wait_ms == store.LEASE_MS
    assert int(await raw.hget(meta, "settle_until") or 0) < ahead_ms - 3_500_000


@pytest.mark.parametrize("fence", [50, None], ids=["placed", "alone"])
@pytest.mark.parametrize("executed", [False, True], ids=["first", "repeat"])
async def test_an_acquisition_that_comes_behind_the_one_that_replaced_it_takes_nothing(
    ledger: Ledger,
    session: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    executed: bool,
    fence: int | None,
) -> None:
    """What a caller gave up may be on its way still, whether or not its repeat was there."""
    writer = await Writer.create(ledger, session)
    await ledger.release(writer.lease)
    late = await given_up(monkeypatch, partial(ledger.acquire, session, "replica-b", fence=fence))
    if executed:
        await ledger.retry_unknown(late)
        if fence is None:
            await ledger.break_lease(session, replica="replica-b")
    lease = await ledger.acquire(session, "replica-b", fence=fence)
    with pytest.raises(StaleFence):
        await ledger.retry_unknown(late)
    await ledger.renew(lease)
    await ledger.park(lease, writer.head, "requested")
    with pytest.raises(StaleFence):
        await ledger.retry_unknown(late)
    assert await ledger.phase(session) is Phase.PARKED


async def test_an_offer_that_comes_behind_the_one_that_replaced_it_changes_nothing(
    ledger: Ledger, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the lease would go to a nonce that nobody has. Nor does an acquisition from before."""
    writer = await Writer.create(ledger, session)
    first = new_offer(session, "replica-b", 50)
    acquiring = await given_up(monkeypatch, partial(ledger.acquire, session, "replica-b", fence=50))
    late = await given_up(monkeypatch, partial(ledger.moves.offer, first))
    second = new_offer(session, "replica-b", 50)
    await ledger.moves.offer(second)
    with pytest.raises(StaleFence):
        await ledger.retry_unknown(late)
    await ledger.moves.hand_over(writer.lease, writer.head, replica="replica-b", fence=50)
    with pytest.raises(StaleFence):
        await ledger.retry_unknown(acquiring)
    lease = await ledger.acquire(session, "replica-b", fence=50, nonce=second.nonce)
    await ledger.renew(lease)
    again = await ledger.acquire(session, "replica-b", fence=50)  # asked for later: it counts
    await ledger.renew(again)


async def test_a_replica_of_the_same_name_is_heard_after_its_machine_was_started_again(
    ledger: Ledger, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock begins anew then, and a name may come again: host and process number are few."""
    writer = await Writer.create(ledger, session)
    await ledger.park(writer.lease, writer.head, "requested")
    up_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 10**15

    def up_for_long(_: int) -> int:
        return up_ns

    with monkeypatch.context() as before:
        before.setattr(time, "clock_gettime_ns", up_for_long)
        before.setattr("duplex_sidecar.ledger.lease._boot_id", lambda: "before")
        lease = await ledger.acquire(session, "host-7")
    await ledger.park(lease, writer.head, "requested")
    await ledger.acquire(session, "host-7")


async def given_up(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Awaitable[object]]
) -> PendingCall:
    """A call that has left and reached nobody yet."""
    left: list[PendingCall] = []

    async def nothing(_: Connection, call: PendingCall) -> Reply:
        left.append(call)
        raise LedgerUnavailable(call.session, "no answer", pending=call)

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "call", nothing)
        with pytest.raises(LedgerUnavailable):
            await call()
    return left[0]


async def test_numbers_of_commands_that_come_late_do_not_undo_newer_ones(
    ledger: Ledger, session: str
) -> None:
    """A call whose answer was lost is repeated over another connection; the first one may reach the
    server behind the repeat and all that came after it."""
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    await ledger.client_said(writer.lease, "1:aa")
    await ledger.client_said(writer.lease, "1:aa 10:bb")
    await ledger.client_said(writer.lease, "1:aa")
    assert (await ledger.load(session)).meta.client.last == 10
    await ledger.client_said(writer.lease, "10:bb 9007199254740992:cc")
    await ledger.client_said(writer.lease, "1:aa 10:bb")
    assert (await ledger.load(session)).meta.client.last == 2**53


async def test_a_name_that_something_else_has_stops_no_sweep(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await ledger.release(writer.lease)
    foreign, unread = session_keys(f"{session}-foreign").meta, session_keys(f"{session}-x").meta
    await raw.set(foreign, "foreign")
    await raw.hset(unread, "phase", b"\xff")
    try:
        found = [one.session async for one in find_ownerless(ledger.reader, 0)]
        assert session in found
        assert session not in [one async for one in ledger.unfinished_erasures()]
        again = await ledger.acquire(session, "replica-b")
        assert await still_ownerless(ledger.reader, session, 0) is None
        await ledger.release(again)
    finally:
        await raw.delete(foreign, unread)


async def test_a_released_session_goes_on_elsewhere_at_once(ledger: Ledger, session: str) -> None:
    old = await Writer.create(ledger, session, "replica-a")
    await old.unit(1)
    await ledger.release(old.lease)
    await ledger.release(old.lease)
    new = await Writer.take_over(ledger, session, "replica-b")
    await new.unit(2)
    with pytest.raises(LeaseLost):
        await old.unit(2)


async def test_an_ended_session_is_read_but_not_run(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    await writer.accept(2)
    draft = ClosedDraft(seq=1, reason="client_closed")
    await ledger.note(writer.lease, writer.head, draft)
    await ledger.release(writer.lease, ended="client_closed")
    with pytest.raises(SessionEnded, match="client_closed"):
        await ledger.acquire(session, "replica-b")
    loaded = await ledger.load(session)
    assert loaded.meta.phase is Phase.ENDED
    assert loaded.closed is not None


async def test_the_keeper_keeps_a_real_lease(ledger: Ledger, raw: Redis, session: str) -> None:
    writer = await Writer.create(ledger, session)
    before = int(await raw.hget(session_keys(session).meta, "until") or 0)
    keeper = LeaseKeeper(ledger.renew, writer.lease)
    keeper.start()
    after = before
    async with asyncio.timeout(PATIENCE_S):
        while after == before:
            await asyncio.sleep(0.01)
            after = int(await raw.hget(session_keys(session).meta, "until") or 0)
    assert after - before >= 0.9 * RENEW_PERIOD_MS
    assert keeper.held
    await ledger.break_lease(session, replica=writer.lease.replica)
    assert isinstance(await asyncio.wait_for(keeper.wait_lost(), PATIENCE_S), LeaseLost)
    await keeper.stop()


# --- the chain ----------------------------------------------------------------------------------


async def test_writes_need_the_present_head(ledger: Ledger, raw: Redis, session: str) -> None:
    writer = await Writer.create(ledger, session)
    start = writer.head
    await writer.accept(1)
    opened = writer.head
    await writer.commit(1)
    before = await everything(raw, session)
    lease = writer.lease
    wrong = (
        ledger.accept(lease, start, accept_draft(2), unit_media(2)),
        ledger.accept(lease, writer.head, accept_draft(1), unit_media(1)),
        ledger.accept(lease, writer.head, accept_draft(3), unit_media(3)),
        ledger.commit(lease, opened, commit_draft(1), state=b"", trim=Trim()),
        ledger.commit(lease, writer.head, commit_draft(2), state=b"", trim=Trim()),
        ledger.note(lease, writer.head, RedoDraft(seq=1, attempt=2, cause="x")),
        ledger.note(lease, writer.head, ClosedDraft(seq=2, reason="x")),
    )
    for write in wrong:
        with pytest.raises(HeadMismatch) as caught:
            await write
        assert caught.value.seen == writer.head
    assert await everything(raw, session) == before


async def test_a_commit_must_follow_the_last_note_too(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.accept(1)
    before = writer.head
    redo = RedoDraft(seq=1, attempt=2, cause="engine_restart")
    writer.head = await ledger.note(writer.lease, before, redo)
    with pytest.raises(HeadMismatch):
        await ledger.commit(writer.lease, before, commit_draft(1), state=b"", trim=Trim())
    await writer.commit(1)


async def test_notes_and_cuts_stand_where_they_may(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    cut = cut_of(truncated_draft(1, 1), 1, events=2)
    await writer.cut(cut)
    loaded = await ledger.load(session)
    assert (loaded.state, loaded.voice_state) == (cut.state, cut.voice_state)
    assert (await ledger.events_after(session, 0)).last_seq == 2
    await writer.accept(2)
    with pytest.raises(HeadMismatch):
        await writer.cut(cut_of(truncated_draft(2, 2), 3))
    redo = RedoDraft(seq=2, attempt=2, cause="engine_restart")
    writer.head = await ledger.note(writer.lease, writer.head, redo)
    loaded = await ledger.load(session)
    assert (loaded.attempts, loaded.state) == (2, cut.state)
    await writer.commit(2)
    assert (await ledger.load(session)).attempts == 0


async def test_a_cut_happens_whole_or_not_at_all(ledger: Ledger, raw: Redis, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    before = await everything(raw, session)
    draft = CancelledDraft(seq=1, turn=1)
    with pytest.raises(JournalMismatch):
        await writer.cut(cut_of(draft, 2, client_applied="3:three"))
    assert await everything(raw, session) == before
    await writer.cut(cut_of(draft, 1, client_applied="3:three"))
    loaded = await ledger.load(session)
    assert loaded.meta.client.last == 3
    assert (loaded.meta.events_last, loaded.meta.head.index) == (1, 3)
    assert stopped_units(loaded.entries) == {1}


async def test_a_cut_sent_again_is_done_once(ledger: Ledger, raw: Redis, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    call = cut_call(writer.lease, writer.head, cut_of(truncated_draft(1, 1), 1))
    assert await ledger.retry_unknown(call) == call.then
    before = await everything(raw, session)
    assert await ledger.retry_unknown(call) == call.then
    assert await everything(raw, session) == before


async def test_what_is_played_leaves_the_journal_and_nothing_else_does(
    ledger: Ledger, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    for seq in (1, 2, 3):
        await writer.unit(seq)
        await ledger.journal(writer.lease, spoken_batch(seq, seq, chunk=seq - 1))
    await ledger.client_said(writer.lease, "", Played(1, 2 * CHUNK_SAMPLES, through_event=2))
    after = await ledger.events_after(session, 2)
    assert [event.seq for event in after.events] == [3]
    assert (await ledger.events_after(session, 1)).resync_required
    meta = (await ledger.load(session)).meta
    assert (meta.events_first, meta.played_turn, meta.played_samples) == (3, 1, 48_000)

    await ledger.client_said(writer.lease, "1:one", Played(1, CHUNK_SAMPLES, through_event=1))
    meta = (await ledger.load(session)).meta
    assert (meta.events_first, meta.played_samples, meta.client.last) == (3, 48_000, 1)
    for turn, samples in ((1, 3 * CHUNK_SAMPLES + 1), (2, 0)):
        with pytest.raises(JournalMismatch, match="than has sounded"):
            await ledger.client_said(writer.lease, "9:nine", Played(turn, samples, 3))
    assert (await ledger.load(session)).meta == meta

    await ledger.client_said(writer.lease, "", Played(1, 3 * CHUNK_SAMPLES, through_event=9))
    assert (await ledger.load(session)).meta.events_first == 4
    await writer.unit(4)
    await ledger.journal(writer.lease, spoken_batch(4, 4, chunk=3))
    after = await ledger.events_after(session, 3)
    assert [event.seq for event in after.events] == [4]


async def test_only_the_commit_trims_and_only_below_its_floors(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    keys = session_keys(session)
    writer = await Writer.create(ledger, session)
    await writer.units(5)
    before = (await ledger.load(session)).meta.bytes
    await writer.accept(6)
    assert sorted(int(f) for f in await raw.hkeys(keys.pcm)) == [1, 2, 3, 4, 5, 6]

    await writer.commit(6, trim=Trim(window_below=4, pcm_below=6, records_below=3))

    assert sorted(int(f) for f in await raw.hkeys(keys.rows)) == [0, 4, 5, 6]
    assert sorted(int(f) for f in await raw.hkeys(keys.frames)) == [5]
    assert sorted(int(f) for f in await raw.hkeys(keys.pcm)) == [6]
    loaded = await ledger.load(session)
    assert [unit.seq for unit in loaded.committed] == [3, 4, 5, 6]
    assert loaded.media[3] == type(loaded.media[3])()
    assert loaded.media[5].rows == unit_media(5).rows
    assert loaded.media[5].pcm == b""
    assert loaded.reference_rows == (noise("reference", 160),)
    assert loaded.meta.bytes < before
    stored = await stored_bytes(raw, session)
    assert loaded.meta.bytes == stored

    # Floors never go down, and a later trim goes on from there.
    await writer.unit(7, trim=Trim())
    await writer.unit(8, trim=Trim(window_below=9, pcm_below=9, records_below=8))
    loaded = await ledger.load(session)
    assert [unit.seq for unit in loaded.committed] == [8]
    assert loaded.media == {8: type(loaded.media[8])()}
    assert loaded.meta.bytes == await stored_bytes(raw, session)


async def stored_bytes(raw: Redis, session: str) -> int:
    keys = session_keys(session)
    values = [
        value
        for key in (keys.entries, keys.pcm, keys.rows, keys.frames)
        for value in await raw.hvals(key)
    ]
    return sum(len(value) for value in values)


async def test_a_session_cannot_outgrow_its_bytes(valkey: EmbeddedValkey, session: str) -> None:
    ledger = await Ledger.connect(
        valkey.url, LedgerOptions(max_session_bytes=80_000, call_timeout_ms=PATIENT.call_timeout_ms)
    )
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    with pytest.raises(LedgerFull):
        await writer.accept(3)
    assert (await ledger.load(session)).head == writer.head
    await ledger.close()


async def test_a_full_server_costs_no_lease_and_no_consistency(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    await writer.accept(2)
    await raw.config_set("maxmemory", "1mb")
    try:
        for write in (
            writer.commit(2, trim=Trim(window_below=2, pcm_below=2)),
            ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0)),
        ):
            with pytest.raises(LedgerFull):
                await write
        await ledger.renew(writer.lease)
        loaded = await ledger.load(session)
        assert loaded.head == writer.head
        assert loaded.media[1] == unit_media(1)
    finally:
        await raw.config_set("maxmemory", "0")
    await writer.commit(2)


async def test_oversized_records_and_states_are_refused_before_sending(
    ledger: Ledger, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.accept(1)
    long = msgspec.structs.replace(commit_draft(1), token_ids=tuple(range(200_000)))
    with pytest.raises(LedgerFull, match="record of"):
        await ledger.commit(writer.lease, writer.head, long, state=b"", trim=Trim())
    with pytest.raises(LedgerFull, match="state of"):
        await ledger.commit(
            writer.lease, writer.head, commit_draft(1), state=bytes(5_000_000), trim=Trim()
        )


async def test_a_server_that_forgot_the_scripts_gets_them_again(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await raw.script_flush()
    await writer.unit(1)


async def test_a_server_that_evicts_is_refused(valkey: EmbeddedValkey, raw: Redis) -> None:
    await raw.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(LedgerUnsuitable, match="noeviction"):
            await Ledger.connect(valkey.url)
    finally:
        await raw.config_set("maxmemory-policy", "noeviction")


async def test_a_closed_ledger_opens_no_connection_for_whoever_is_late(
    valkey: EmbeddedValkey, session: str
) -> None:
    ledger = await Ledger.connect(valkey.url)
    writer = await Writer.create(ledger, session)
    await ledger.close()
    for late in (ledger.renew(writer.lease), ledger.load(session)):
        with pytest.raises(LedgerUnavailable, match="connection is closed"):
            await late


async def test_what_is_no_ledger_address_is_refused() -> None:
    with pytest.raises(LedgerUnsuitable):
        await Ledger.connect("http://localhost")


# --- the journal --------------------------------------------------------------------------------


async def test_a_sequence_is_one_byte_string_for_ever(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    lease = writer.lease
    assert await ledger.journal(lease, spoken_batch(1, 1, chunk=0, event=b"first")) == 1
    for first_seq in (1, 3):
        with pytest.raises(JournalMismatch) as caught:
            await ledger.journal(lease, spoken_batch(1, first_seq, chunk=1, event=b"other"))
        assert caught.value.last_event_seq == 1
    two = JournalBatch(unit=0, first_seq=2, events=(b"second", b"third"))
    assert await ledger.journal(lease, two) == 3
    after = await ledger.events_after(session, 0)
    assert [(one.seq, one.event) for one in after.events] == [
        (1, b"first"),
        (2, b"second"),
        (3, b"third"),
    ]
    assert [one.seq for one in (await ledger.events_after(session, 2)).events] == [3]
    assert (await ledger.events_after(session, 3)).events == ()


async def test_nothing_of_an_uncommitted_unit_is_journaled(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.accept(1)
    with pytest.raises(JournalMismatch, match="not committed"):
        await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
    await writer.commit(1)
    await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))


async def test_no_sample_is_journaled_twice_or_skipped(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.units(3)
    lease = writer.lease
    await ledger.journal(lease, spoken_batch(1, 1, chunk=0, turn=4))
    for chunk in (0, 2):
        with pytest.raises(JournalMismatch, match="sample 24000"):
            await ledger.journal(lease, spoken_batch(2, 2, chunk=chunk, turn=4))
    with pytest.raises(JournalMismatch, match="sample 0"):
        await ledger.journal(lease, spoken_batch(2, 2, chunk=1, turn=5))
    with pytest.raises(JournalMismatch, match="sample"):
        await ledger.journal(lease, spoken_batch(2, 2, chunk=0, turn=3))
    await ledger.journal(lease, spoken_batch(2, 2, chunk=1, turn=4))
    assert len((await ledger.load(session)).marks) == 2
    await ledger.journal(lease, spoken_batch(3, 3, chunk=0, turn=5))
    loaded = await ledger.load(session)
    assert [mark.turn for mark in loaded.marks] == [5]
    assert (loaded.meta.voice_turn, loaded.meta.voice_samples) == (5, 24_000)


async def test_a_listening_unit_is_voiced_without_an_event(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    batch = JournalBatch(unit=1, first_seq=1, events=(), voiced_through=1)
    assert await ledger.journal(writer.lease, batch) == 0
    assert (await ledger.load(session)).meta.voiced_seq == 1


async def test_the_journal_is_bounded_by_bytes(valkey: EmbeddedValkey, session: str) -> None:
    options = LedgerOptions(max_journal_bytes=20_000, call_timeout_ms=PATIENT.call_timeout_ms)
    ledger = await Ledger.connect(valkey.url, options)
    writer = await Writer.create(ledger, session)
    for number in range(1, 13):
        batch = JournalBatch(unit=0, first_seq=number, events=(noise(str(number), 4_000),))
        await ledger.journal(writer.lease, batch)
    meta = (await ledger.load(session)).meta
    assert (meta.events_first, meta.events_last) == (8, 12)
    assert (await ledger.events_after(session, 6)).resync_required
    after = await ledger.events_after(session, 7)
    assert [one.seq for one in after.events] == [8, 9, 10, 11, 12]
    assert (await ledger.events_after(session, 13)).resync_required
    part = await ledger.reader.events_after(session, 7, limit_bytes=8_000)
    assert [one.seq for one in part.events] == [8, 9]
    await ledger.close()


async def test_the_journal_is_bounded_by_age(valkey: EmbeddedValkey, session: str) -> None:
    options = LedgerOptions(max_journal_age_ms=200, call_timeout_ms=PATIENT.call_timeout_ms)
    ledger = await Ledger.connect(valkey.url, options)
    writer = await Writer.create(ledger, session)
    await ledger.journal(writer.lease, JournalBatch(unit=0, first_seq=1, events=(b"a", b"b")))
    await asyncio.sleep(0.3)
    await ledger.journal(writer.lease, JournalBatch(unit=0, first_seq=3, events=(b"c",)))
    assert (await ledger.events_after(session, 1)).resync_required
    assert [one.seq for one in (await ledger.events_after(session, 2)).events] == [3]
    await ledger.close()


# --- tokens and erasure -------------------------------------------------------------------------


async def test_the_old_token_counts_until_the_new_one_is_used(ledger: Ledger, session: str) -> None:
    first, first_hash = token.mint()
    second, second_hash = token.mint()
    await ledger.create(opening_draft(session), replica="a", token_sha256=first_hash, state=b"")
    lease = await ledger.acquire(session, "a")

    async def match(text: str) -> token.TokenMatch:
        meta = await ledger.reader.meta(session)
        assert meta is not None
        return token.match(text, meta.token_sha256, meta.token_offered_sha256)

    await ledger.offer_token(lease, second_hash)
    assert await match(first) is token.TokenMatch.CURRENT
    assert await match(second) is token.TokenMatch.OFFERED
    with pytest.raises(LedgerError, match="not offered"):
        await ledger.confirm_token(lease, token.mint()[1])
    await ledger.confirm_token(lease, second_hash)
    await ledger.confirm_token(lease, second_hash)
    assert await match(first) is token.TokenMatch.NONE
    assert await match(second) is token.TokenMatch.CURRENT


async def test_erasure_leaves_a_tombstone_that_refuses_everybody(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
    assert await ledger.erase(session) == len(session_keys(session).all())
    assert await ledger.erase(session) == 0
    keys = session_keys(session).all()
    assert await raw.exists(*keys) == 1
    assert await raw.pttl(keys[0]) > 6 * 24 * 3_600_000
    assert await ledger.phase(session) is Phase.ERASED
    assert not await ledger.exists(session)
    for write in (
        writer.accept(2),
        ledger.renew(writer.lease),
        ledger.acquire(session, "replica-b"),
        ledger.load(session),
        Writer.create(ledger, session),
        ledger.events_after(session, 0),
    ):
        with pytest.raises(SessionErased):
            await write


async def test_the_embedded_server_is_found_again_and_keeps_its_data(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    server = EmbeddedValkey(deep)
    server.start()
    ledger = await Ledger.connect(server.url)
    writer = await Writer.create(ledger, "kept")
    await writer.units(3)
    again = EmbeddedValkey(deep)
    again.start()
    assert again.pid == server.pid is not None
    await ledger.close()
    server.stop()
    assert not again.running
    again.start()
    ledger = await Ledger.connect(again.url)
    assert (await ledger.load("kept")).head == writer.head
    await ledger.close()
    again.stop()
