"""DELETE, PARK, PUT and ERASE of one session at the same time: whatever the order, what is answered
is what the ledger says afterwards."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE_S

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LeaseHeld, LeaseLost, LeaseSettling
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.refusals import typed_refusals

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_stage import Pause
from session_kit import Caller, Replica, Terms, claim, eventually, replica

pytestmark = pytest.mark.integration
TERMS = Terms("context")


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "here") as started:
        yield started


def held_up(monkeypatch: pytest.MonkeyPatch, here: Replica, call: str) -> Pause:
    """The next such call of the ledger waits before it is sent."""
    pause, method = Pause(), getattr(here.ledger, call)

    async def wait(*given: Any, **named: Any) -> Any:
        if not pause.reached.is_set():
            pause.reached.set()
            await pause.go.wait()
        return await method(*given, **named)

    monkeypatch.setattr(here.ledger, call, wait)
    return pause


async def called(here: Replica, session: str) -> Caller:
    await here.open(session, TERMS)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(2)
    return caller


async def reached(pause: Pause) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await pause.reached.wait()


async def test_a_session_that_is_parking_is_ended_all_the_same(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await called(here, "parking")
    pause = held_up(monkeypatch, here, "park")
    here.registry.departures.drain(0)
    await reached(pause)
    ending = asyncio.create_task(here.registry.end("parking", "not_wanted"))
    await asyncio.sleep(0)
    pause.go.set()
    assert await ending
    meta = await here.ledger.reader.meta("parking")
    assert meta is not None
    assert (meta.phase, meta.reason) == (Phase.ENDED, "not_wanted")


async def test_a_session_that_is_being_let_go_of_is_ended_all_the_same(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await called(here, "leaving")
    pause = held_up(monkeypatch, here, "release")
    here.registry.live["leaving"].wishes.let_go()
    await reached(pause)
    ending = asyncio.create_task(here.registry.end("leaving"))
    await asyncio.sleep(0)
    pause.go.set()
    assert await ending
    assert await here.ledger.phase("leaving") is Phase.ENDED


async def test_an_end_waits_for_the_order_that_is_under_way(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await called(here, "opening")
    await here.registry.departures.park("opening")
    pause = held_up(monkeypatch, here, "load")
    opening = asyncio.create_task(here.open("opening", TERMS))
    await reached(pause)
    ending = asyncio.create_task(here.registry.end("opening"))
    parking = asyncio.create_task(here.registry.departures.park("opening"))
    await asyncio.sleep(0)
    pause.go.set()
    await opening
    assert await ending
    with pytest.raises(ClientError) as over:
        await parking
    assert over.value.code is ErrorCode.SESSION_ENDED
    assert await here.ledger.phase("opening") is Phase.ENDED
    assert not here.registry.live


async def test_an_order_waits_for_the_end_that_is_under_way(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not break the lease under which the end is written."""
    await called(here, "ending")
    await here.registry.departures.park("ending")
    pause = held_up(monkeypatch, here, "load")
    ending = asyncio.create_task(here.registry.end("ending"))
    await reached(pause)
    opening = asyncio.create_task(here.open("ending", TERMS))
    dialling = asyncio.create_task(Caller("ending").dial(here))
    await asyncio.sleep(0)
    pause.go.set()
    assert await ending
    for late in (opening, dialling):
        with pytest.raises(ClientError) as over:
            await late
        assert over.value.code is ErrorCode.SESSION_ENDED
        assert over.value.detail == "The session has ended."


async def test_what_is_erased_while_it_is_opened_does_not_run(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await called(here, "gone")
    await here.registry.departures.park("gone")
    pause = held_up(monkeypatch, here, "load")
    opening = asyncio.create_task(here.open("gone", TERMS))
    await reached(pause)
    erasing = asyncio.create_task(here.registry.departures.erase("gone"))
    await asyncio.sleep(0)
    pause.go.set()
    await opening
    await erasing
    await eventually(lambda: not here.registry.live)
    assert await here.ledger.phase("gone") is Phase.ERASED


async def test_what_another_replica_runs_is_not_ended_here(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    async with replica(valkey.url, "there") as there:
        await there.registry.open("theirs", TERMS.manifest(), claim())
        assert not await here.registry.end("theirs")
        assert await here.ledger.phase("theirs") is Phase.OPEN
        here.registry.declare_dead("there")
        assert await here.registry.end("theirs")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LeaseHeld("s", "other", 900), ErrorCode.NOT_READY),
        (LeaseSettling("s", 900), ErrorCode.NOT_READY),
        (LeaseLost("s", "another owner"), ErrorCode.LEASE_LOST),
    ],
)
def test_what_passes_is_not_called_corrupt(error: Exception, code: ErrorCode) -> None:
    with pytest.raises(ClientError) as told, typed_refusals():
        raise error
    assert told.value.code is code


async def test_waking_a_session_begins_one_trace(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await called(here, "woken")
    await here.registry.departures.park("woken")
    begun: list[str] = []
    tracing = here.registry._assembly.tracing
    begin = tracing.session

    def count(session: str, before: str | None, reason: Any) -> Any:
        begun.append(reason.value)
        return begin(session, before, reason)

    monkeypatch.setattr(tracing, "session", count)
    await here.open("woken", TERMS)
    assert begun == ["resumed"]


async def test_every_kind_of_ledger_call_is_timed(here: Replica) -> None:
    await called(here, "timed")
    metrics = here.registry._assembly.metrics
    await eventually(lambda: b'call="renew"' in metrics.prometheus_page().replace(b"duplex_", b""))
    await here.registry.departures.park("timed")
    await here.registry.departures.erase("timed")
    page = metrics.prometheus_page().decode()
    for call in ("acquire", "renew", "accept", "commit", "journal", "park", "erase"):
        assert f'call="{call}"' in page, call


async def test_what_is_given_back_late_costs_the_next_start_nothing(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take-up is given up while it loads; its give-back reaches the server when the same replica
    has the session again. So does the one of whoever found a lease that was left behind."""
    caller = await called(here, "late")
    await caller.hang_up()
    late: list[dict[str, Any]] = []
    give_back = here.ledger.break_lease

    async def lose(session: str, **which: Any) -> bool:
        late.append(which)
        return False

    for left_behind in (False, True):
        await here.registry.departures.park("late", grace_s=0.0)
        pause = held_up(monkeypatch, here, "load")
        opening = asyncio.create_task(here.open("late", TERMS))
        await reached(pause)
        monkeypatch.setattr(here.ledger, "break_lease", lose)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        if left_behind:
            with pytest.raises(LeaseHeld):
                await here.registry._owners.acquire_if_free("late")
        monkeypatch.undo()
        await caller.dial(here)
        lease = here.registry.live["late"].lease
        assert len(late) == 1 + left_behind
        for which in late:
            await give_back("late", **which)
        late.clear()
        await here.ledger.renew(lease)
        await caller.talk(6 if left_behind else 4)
        await caller.hang_up()
