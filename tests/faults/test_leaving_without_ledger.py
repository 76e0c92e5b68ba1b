"""A replica is told to leave while its ledger is away: it goes when the grace is over, and whatever
was acknowledged is there for the next one."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.valkeys import dead, frozen

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.repair import RecentWrites
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.session import departures, ending

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    Caller,
    Replica,
    Stages,
    Terms,
    check_events,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault

GRACE_S = 0.2
FOR_EVER_S = 2 * PATIENCE_S
"""Longer than a test waits: what is tried so long is tried in vain."""
UNITS = 14
Outage = Callable[[EmbeddedValkey], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def _never_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound but those under test lets anybody leave."""
    monkeypatch.setattr(departures, "END_TIMEOUT_S", FOR_EVER_S)
    monkeypatch.setattr(departures, "PARK_UNIT_S", FOR_EVER_S)
    monkeypatch.setattr(ending, "END_TIMEOUT_S", FOR_EVER_S)
    monkeypatch.setattr(ending, "LAST_WRITE_S", 0.5)


@pytest.fixture
async def there(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "there") as there:
        yield there


async def leave(here: Replica) -> bool:
    """As a sidecar does on SIGTERM; whether all had parked. In bounded time, or the test is red."""
    async with asyncio.timeout(PATIENCE_S):
        here.registry.departures.drain(GRACE_S)
        empty = await here.registry.departures.drained()
        await here.registry.close()
    assert here.registry.live == {}
    return empty


def silent(here: Replica) -> bool:
    """The ledger has been away for longer than a lease lasts."""
    return not any(actor.holds_lease for actor in here.registry.live.values())


@pytest.mark.parametrize("outage", [frozen, dead])
async def test_nobody_waits_for_a_ledger_that_is_away(
    valkey: EmbeddedValkey, there: Replica, outage: Outage
) -> None:
    """One session is idle, one has a unit that could not be accepted, one a unit under way that
    could not be committed."""
    calm, _ = await undisturbed(valkey.url, f"calm-{outage.__name__}", Terms("context"), UNITS)
    stages = Stages()
    async with replica(valkey.url, "here", stages=stages, call_timeout_ms=400) as here:
        callers = [Caller(f"{what}-{outage.__name__}") for what in ("idle", "said", "thinks")]
        for caller in callers:
            await here.open(caller.session, Terms("context"))
            await caller.dial(here)
            await caller.talk(3)
        _, said, thinks = callers
        pause = stages.thinker.pause(4, after=True)
        await thinks.say(4)
        await pause.reached.wait()
        with outage(valkey):
            await said.say(5)
            pause.go.set()
            await eventually(lambda: silent(here))
            assert not await leave(here)
            assert stages.held() == []
    for caller in callers:
        acknowledged = caller.accepted[-1].to_sample if caller.accepted else 0
        opened = await caller.dial(there)
        assert opened.acknowledged_sample >= acknowledged
        await caller.talk(UNITS)
        check_events(caller)
        assert await tokens(there.ledger, caller.session) == calm


@pytest.mark.parametrize("outage", [frozen, dead])
async def test_a_park_that_the_ledger_does_not_hear_of_is_given_up(
    valkey: EmbeddedValkey, there: Replica, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes away behind the last look at the lease: the session parks already."""
    session = f"parks-{outage.__name__}"
    async with replica(valkey.url, "here", call_timeout_ms=400) as here:
        await here.open(session, Terms("context"))
        caller = Caller(session)
        await caller.dial(here)
        await caller.talk(3)
        began = asyncio.Event()
        park = here.ledger.park

        async def parking(*given: object) -> None:
            began.set()
            await park(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(here.ledger, "park", parking)
        with outage(valkey):
            here.registry.departures.drain(0.0)
            # On a machine that stands still the lease may run out first.
            await eventually(lambda: began.is_set() or silent(here))
            assert not await leave(here)
    meta = await there.ledger.reader.meta(session)
    assert meta is not None
    assert meta.phase in (Phase.OPEN, Phase.PARKED)  # the write may have come through after all
    await caller.dial(there)
    await caller.talk(UNITS)
    check_events(caller)


async def test_a_ledger_that_comes_back_within_the_grace_hears_of_the_park(
    valkey: EmbeddedValkey,
) -> None:
    async with replica(valkey.url, "here", call_timeout_ms=400) as here:
        await here.open("lucky", Terms("context"))
        caller = Caller("lucky")
        await caller.dial(here)
        await caller.talk(3)
        with frozen(valkey):
            await eventually(lambda: silent(here))
            here.registry.departures.drain(PATIENCE_S)
            leaving = asyncio.create_task(here.registry.departures.drained())
            await caller.attachment_takes_mail()
            assert not leaving.done()
        async with asyncio.timeout(PATIENCE_S):
            assert await leaving
        meta = await here.ledger.reader.meta("lucky")
        assert meta is not None
        assert (meta.phase, meta.reason) == (Phase.PARKED, "drain")


def kept_writes() -> int:
    """Owners whose newest writes are kept in this process, to give them back to a ledger that
    loses them: up to 32 MiB each."""
    return sum(type(each) is RecentWrites for each in gc.get_objects())


@pytest.mark.parametrize("outage", [frozen, dead])
async def test_who_has_gone_without_its_ledger_leaves_nothing_behind(
    valkey: EmbeddedValkey, outage: Outage
) -> None:
    gc.collect()
    before = kept_writes()
    async with replica(valkey.url, "here", call_timeout_ms=400) as here:
        caller = Caller(f"gone-{outage.__name__}")
        await here.open(caller.session, Terms("context"))
        await caller.dial(here)
        await caller.talk(3)
        assert kept_writes() == before + 1
        with outage(valkey):
            here.registry.live[caller.session].let_go()
            await eventually(lambda: not here.registry.live)
            gc.collect()
            assert kept_writes() == before
