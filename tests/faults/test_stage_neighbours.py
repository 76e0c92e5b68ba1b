"""A unit that ends a stage each time it is submitted ends its own session and no other one.

Whoever was in the stage when it died is in the same trouble as the culprit, and nobody can tell
them apart: so what was lost is submitted again one session after another.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Closed, Decision, Sequenced, UnitDone
from duplex_sidecar.session.hearing import MAX_TRIES
from duplex_sidecar.stages.envelope import HealthReport
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_stage import FakeStage, Pause
from session_kit import (
    Caller,
    Replica,
    Terms,
    check_events,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault
TERMS = Terms("context")
UNITS = 40
DEATHS = {"encoder": MAX_TRIES, "thinker": 2, "talker": 2, "code2wav": 2}
"""So many times a unit that loses its stage is submitted."""
GIVES_WAY_S = 0.3
"""Who does not wait for his turn is in the stage by then."""


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "here") as started:
        yield started


async def inside(mine: Pause, theirs: Pause) -> None:
    """The culprit is in the stage, the other one with it if it comes without a turn of its own."""
    arrivals = [asyncio.create_task(one.reached.wait()) for one in (mine, theirs)]
    try:
        async with asyncio.timeout(30):
            await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(arrivals, timeout=GIVES_WAY_S)
            if not mine.reached.is_set():
                theirs.go.set()  # it was first: then comes the culprit
            await mine.reached.wait()
    finally:
        for arrival in arrivals:
            arrival.cancel()


def spoken_units(caller: Caller) -> list[int]:
    """Units that all stages had to do with."""
    speaks = [unit for unit in caller.units if unit.decision is Decision.SPEAK]
    return [unit.unit for unit in speaks if unit.audio_samples]


@pytest.mark.parametrize("name", list(DEATHS))
async def test_a_unit_that_no_stage_survives_ends_its_session_alone(
    valkey: EmbeddedValkey, here: Replica, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calm, undisturbed_call = await undisturbed(valkey.url, f"calm-{name}", TERMS, UNITS)
    spoken = spoken_units(undisturbed_call)
    other, culprit = spoken[1], spoken[4]
    stage: FakeStage = getattr(here.stages, name)
    bystander, offender = Caller(f"bystander-{name}"), Caller(f"offender-{name}")
    for caller, until in ((bystander, other), (offender, culprit)):
        await here.open(caller.session, TERMS)
        await caller.dial(here)
        await caller.talk(until - 1)
    monkeypatch.setattr(stage, "kill", partial(stage.kill, health_calls=3))
    stage.fail(culprit, StageFault.GONE, times=DEATHS[name])
    mine, theirs = stage.pause(culprit), stage.pause(other)
    await bystander.say(other)
    await offender.say(culprit)
    for _ in range(DEATHS[name]):
        await inside(mine, theirs)
        in_stage = (mine, theirs)
        mine, theirs = stage.pause(culprit), stage.pause(other)
        for pause in in_stage:
            pause.go.set()
    for pause in (mine, theirs):
        pause.go.set()

    closed = await offender.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert closed.code is ErrorCode.UNIT_FAILED
    await bystander.talk(UNITS)
    check_events(bystander)
    assert await tokens(here.ledger, bystander.session) == calm


async def test_nobody_waits_for_a_stage_that_ended_again_behind_somebody_who_does(
    valkey: EmbeddedValkey, here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may wait so long for it: one after another the last one would wait for the sum."""
    calm, _ = await undisturbed(valkey.url, "calm-queue", TERMS, UNITS)
    stage, unit = here.stages.thinker, 5
    callers = [Caller(f"queue-{number}") for number in range(4)]
    pauses: list[Pause] = []
    for caller in callers:
        await here.open(caller.session, TERMS)
        await caller.dial(here)
        await caller.talk(unit - 1)
        pauses.append(stage.pause(unit))
        await caller.say(unit)
        async with asyncio.timeout(30):
            await pauses[-1].reached.wait()

    health, waiting = stage.health, set[asyncio.Task[None] | None]()

    async def asked() -> HealthReport:
        waiting.add(asyncio.current_task())
        return await health()

    kill = stage.kill
    monkeypatch.setattr(stage, "health", asked)
    monkeypatch.setattr(stage, "kill", partial(kill, health_calls=1_000_000))
    stage.kill()
    for pause in pauses:
        pause.go.set()
    await eventually(lambda: len(waiting) == len(callers))
    stage.fail(unit, StageFault.GONE)  # the first one that comes again ends it for long
    kill()
    await eventually(lambda: stage.deaths == 3)
    waiting.clear()
    await eventually(lambda: len(waiting) == len(callers) - 1, within_s=20)

    monkeypatch.undo()
    stage.kill()
    over = [caller for caller in callers if not await goes_on(caller)]
    assert len(over) == 1
    for caller in callers:
        if caller not in over:
            await caller.talk(UNITS)
            check_events(caller)
            assert await tokens(here.ledger, caller.session) == calm


async def goes_on(caller: Caller) -> bool:
    """Whether the unit under way is done; False: the session is over."""
    told = await caller.until(
        lambda event: (
            isinstance(event, Closed)
            or (isinstance(event, Sequenced) and isinstance(event.body, UnitDone))
        )
    )
    return not isinstance(told, Closed)
