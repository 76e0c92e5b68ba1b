"""Parking when something fails on the way: a death between the script and the status, lost replies,
a ledger that is away, a stage that does not let go. The conversation goes on whole elsewhere."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.ledger_kit import LossyProxy, Writer
from support.patience import PATIENT, leases_run_out, unhurried

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    LeaseHeld,
    LeaseLost,
    SessionErased,
    StaleFence,
)
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session import ending

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODES,
    Caller,
    Mode,
    Replica,
    Terms,
    check_events,
    claim,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault
UNITS = 12


@pytest.fixture(autouse=True)
def _unhurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        unhurried(patch)
        yield


async def called(here: Replica, session: str, terms: Terms) -> Caller:
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(UNITS // 2)
    return caller


async def goes_on(valkey: EmbeddedValkey, there: Replica, caller: Caller, terms: Terms) -> None:
    """On another replica, with the tokens of a conversation in which nothing happened."""
    calm, _ = await undisturbed(valkey.url, f"calm-{caller.session}", terms, UNITS)
    await caller.dial(there)
    await caller.talk(UNITS)
    assert await tokens(there.ledger, caller.session) == calm
    check_events(caller)


@pytest.mark.parametrize("mode", MODES)
async def test_a_death_between_the_script_and_the_status(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    terms, written = Terms(mode), asyncio.Event()
    comes_back = asyncio.Event()
    async with (
        replica(valkey.url, "dies") as dies,
        replica(valkey.url, "other") as other,
    ):
        park = dies.ledger.park

        async def park_and_stand_still(lease: Lease, head: Head, reason: str) -> None:
            await park(lease, head, reason)
            written.set()
            await comes_back.wait()

        monkeypatch.setattr(dies.ledger, "park", park_and_stand_still)
        caller = await called(dies, f"dies-{mode}", terms)
        parking = asyncio.create_task(dies.registry.departures.park(caller.session, grace_s=0.1))
        await written.wait()
        assert await other.ledger.phase(caller.session) is Phase.PARKED
        await goes_on(valkey, other, caller, terms)
        # The one that stood still comes back to itself and touches nothing.
        before = await other.ledger.reader.meta(caller.session)
        comes_back.set()
        await parking
        await eventually(lambda: not dies.registry.live)
        after = await other.ledger.reader.meta(caller.session)
        assert before is not None
        assert after is not None
        assert (after.fence, after.nonce, after.phase) == (before.fence, before.nonce, Phase.OPEN)
        await caller.talk(UNITS + 1)


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_replies_that_are_lost_park_once(
    valkey: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    terms = Terms("context")
    async with (
        LossyProxy(valkey.url, tmp_path) as proxy,
        replica(proxy.url, "lossy") as here,
        replica(valkey.url, "other") as other,
    ):
        caller = await called(here, f"lossy-{lost}", terms)
        await here.registry.live[caller.session]._keeper.stop()  # its replies are not to be lost
        park, tries = here.ledger.park, 0

        async def park_without_reply(lease: Lease, head: Head, reason: str) -> None:
            nonlocal tries
            if not tries:
                proxy.lose_replies = lost
            tries += 1
            await park(lease, head, reason)

        monkeypatch.setattr(here.ledger, "park", park_without_reply)
        await here.registry.departures.park(caller.session, grace_s=0.1)
        assert proxy.lost == lost
        assert await other.ledger.phase(caller.session) is Phase.PARKED
        await goes_on(valkey, other, caller, terms)


async def test_a_ledger_that_is_away_lets_the_session_go_in_bounded_time(
    valkey: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "END_TIMEOUT_S", 3.0)
    leases_run_out(monkeypatch)
    terms = Terms("context")
    async with (
        LossyProxy(valkey.url, tmp_path) as proxy,
        replica(proxy.url, "cut-off", call_timeout_ms=300) as here,
        replica(valkey.url, "other") as other,
    ):
        caller = await called(here, "cut-off", terms)
        park = here.ledger.park

        async def park_into_nothing(lease: Lease, head: Head, reason: str) -> None:
            proxy.open_gate.clear()
            await park(lease, head, reason)

        monkeypatch.setattr(here.ledger, "park", park_into_nothing)
        with pytest.raises(ClientError) as error:
            await here.registry.departures.park(caller.session, grace_s=0.1)
        assert error.value.code is ErrorCode.LEASE_LOST
        assert (here.registry.live, here.stages.held()) == ({}, [])
        assert await other.ledger.phase(caller.session) is Phase.OPEN
        await goes_on(valkey, other, caller, terms)
        # What was on its way arrives now, and is refused.
        before = await other.ledger.reader.meta(caller.session)
        proxy.open_gate.set()
        await caller.talk(UNITS + 2)
        after = await other.ledger.reader.meta(caller.session)
        assert before is not None
        assert after is not None
        assert (after.phase, after.nonce) == (Phase.OPEN, before.nonce)


async def test_a_stage_that_does_not_let_go_keeps_nobody_from_parking(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "END_TIMEOUT_S", 3.0)
    monkeypatch.setattr(ending, "FREE_FIRST_S", 0.2)
    terms = Terms("context")
    async with (
        replica(valkey.url, "stuck") as here,
        replica(valkey.url, "other") as other,
    ):
        caller = await called(here, "stuck", terms)

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(here.stages.talker, "close", never)
        await here.registry.departures.park("stuck", grace_s=0.1)
        assert here.registry.free_slots == 4
        assert await other.ledger.phase("stuck") is Phase.PARKED
        assert "session parks before its stages have let go of it" in caplog.messages
        await goes_on(valkey, other, caller, terms)


# --- the script alone -----------------------------------------------------------------------------


@pytest.fixture
async def ledger(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    connected = await Ledger.connect(valkey.url, PATIENT)
    yield connected
    await connected.close()


async def test_only_what_has_nothing_open_parks(ledger: Ledger) -> None:
    writer = await Writer.create(ledger, "open-unit")
    await writer.unit(1)
    await writer.accept(2)
    with pytest.raises(HeadMismatch):
        await ledger.park(writer.lease, writer.head, "requested")
    await writer.commit(2)
    stale = Head(writer.head.index, "0" * 64, 2, None)
    with pytest.raises(HeadMismatch):
        await ledger.park(writer.lease, stale, "requested")
    await ledger.park(writer.lease, writer.head, "requested")
    await ledger.park(writer.lease, writer.head, "requested")
    with pytest.raises(LeaseLost):
        await writer.accept(3)
    with pytest.raises(LeaseLost):
        await ledger.renew(writer.lease)
    assert await ledger.exists("open-unit")


async def test_a_park_that_comes_late_is_refused(ledger: Ledger) -> None:
    writer = await Writer.create(ledger, "late")
    await writer.unit(1)
    await ledger.park(writer.lease, writer.head, "requested")
    other = await ledger.acquire("late", "replica-b")
    assert other.woken
    with pytest.raises(LeaseLost):
        await ledger.park(writer.lease, writer.head, "requested")
    assert await ledger.phase("late") is Phase.OPEN
    await ledger.erase("late")
    with pytest.raises(SessionErased):
        await ledger.park(other, writer.head, "requested")


async def test_fences_that_an_operator_issues(ledger: Ledger) -> None:
    writer = await Writer.create(ledger, "issued")
    with pytest.raises(LeaseHeld):
        await ledger.acquire("issued", "replica-b", fence=7)
    await ledger.release(writer.lease)
    lease = await ledger.acquire("issued", "replica-b", fence=7, address="b:1")
    assert (lease.fence, lease.woken) == (7, False)
    again = await ledger.acquire("issued", "replica-b", fence=7, address="b:1")
    assert again.fence == 7
    with pytest.raises(LeaseLost):
        await ledger.renew(lease)
    for replica_name, fence in (("replica-c", 7), ("replica-b", 6), ("replica-c", 1)):
        with pytest.raises(StaleFence):
            await ledger.acquire("issued", replica_name, fence=fence)
    meta = await ledger.reader.meta("issued")
    assert meta is not None
    assert meta.address == "b:1"
    await ledger.release(again)
    with pytest.raises(StaleFence):  # given up is given up
        await ledger.acquire("issued", "replica-b", fence=7)
    plain = await ledger.acquire("issued", "replica-d")
    assert plain.fence == 8


async def test_retention_counts_from_the_parking(valkey: EmbeddedValkey) -> None:
    async with replica(valkey.url, "keeps") as here:
        manifest = Terms("context").manifest()
        assert manifest.spec.lifecycle is not None
        kept = manifest.spec.lifecycle.model_copy(update={"retention": "7h"})
        spec = manifest.spec.model_copy(update={"lifecycle": kept})
        manifest = manifest.model_copy(update={"spec": spec})
        await here.registry.open("kept", manifest, claim())
        await here.registry.departures.park("kept")
        seen = 7 * 3600 * 1000
        reader = here.ledger.reader
        for key in ("meta", "entries", "state"):
            left = await reader._connection.read("kept", ("PTTL", f"duplex:{{kept}}:{key}"))
            assert seen - 60_000 < int(left) <= seen
