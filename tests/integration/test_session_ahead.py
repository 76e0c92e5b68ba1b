"""Rebuild ahead in whole conversations: the same prompts, the same tokens, only earlier."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.stages.envelope import Ids, ThinkerAnswer, ThinkerFeed
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_thinker import FakeThinker, Submission
from session_kit import (
    VOCABULARY,
    WORD_IDS,
    Caller,
    Replica,
    Stages,
    Terms,
    check_events,
    check_prompts,
    eventually,
    frames_of,
    png,
    replica,
    tokens,
    with_camera,
)

pytestmark = pytest.mark.integration
UNITS = 60
Frames = Callable[[int], tuple[bytes, ...]]


def no_frames(_: int) -> tuple[bytes, ...]:
    return ()


async def conversation(
    here: Replica, session: str, terms: Terms, frames: Frames = no_frames, units: int = UNITS
) -> tuple[list[tuple[int, ...]], Caller, list[Submission]]:
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    await caller.dial(here)
    await caller.talk(units)
    check_events(caller)
    said = await tokens(here.ledger, session)
    submissions = check_prompts([here.stages], session, terms, said, caller, frames)
    await caller.close()
    await eventually(lambda: here.stages.held() == [])
    return said, caller, submissions


def plans_of(caller: Caller) -> list[object]:
    """What the client is told of each unit, without what depends on time and place."""
    return [
        structs.replace(unit, rebuild_ms=None, head=0, wall_ms=0.0, stage_ms={}, replica="")
        for unit in caller.units
    ]


def some_frames(number: int) -> tuple[bytes, ...]:
    return () if number % 4 else (png(96, number),)


CASES: dict[str, tuple[Terms, Frames]] = {
    "context-audio": (Terms("context"), no_frames),
    "context-camera": (with_camera(Terms("context")), frames_of),
    "basic-audio": (Terms("basic"), no_frames),
    "basic-camera": (with_camera(Terms("basic")), frames_of),
    "basic-some-frames": (replace(Terms("basic"), camera=True), some_frames),
}
NEVER_SURE = "basic-camera"
"""The append that passes the mark is always one with frames, and so might have been shorter."""


@pytest.mark.parametrize("case", CASES)
async def test_prompts_and_tokens_are_those_without_it(valkey: EmbeddedValkey, case: str) -> None:
    terms, frames = CASES[case]
    said: dict[bool, list[tuple[int, ...]]] = {}
    plans: dict[bool, list[object]] = {}
    for ahead in (False, True):
        async with replica(valkey.url, rebuild_ahead=ahead) as here:
            session = f"same-{case}-{ahead}"
            said[ahead], caller, submissions = await conversation(here, session, terms, frames)
        plans[ahead] = plans_of(caller)
        slides = [unit.unit for unit in caller.units if unit.rebuild_cause == "slide"]
        assert [one.unit for one in submissions if one.opened] == [1, *slides]
        opened = [one for one in here.stages.thinker.opened_ahead if one.unit < UNITS]
        assert bool(opened) == (ahead and case != NEVER_SURE)
        foreseen = [one.unit + 1 for one in opened]
        assert set(foreseen) <= set(slides), "what is foreseen comes true"
        assert not opened or foreseen == slides or "basic" in case
        extended = {one.stream for one in submissions}
        wasted = [one for one in opened if one.stream not in extended]
        assert bool(wasted) == bool(opened and case == "basic-some-frames")
        assert not opened or len(wasted) < len(opened)
    assert said[True] == said[False]
    assert plans[True] == plans[False]


async def test_a_unit_that_found_its_prompt_made_waited_for_nothing(valkey: EmbeddedValkey) -> None:
    async with replica(valkey.url) as here:
        await here.open("waits", Terms("context", max_units=3))
        caller = Caller("waits")
        await caller.dial(here)
        await caller.talk(5)
        waited_ms: list[float] = []
        for unit in range(6, 16):
            await eventually(lambda made=unit - 4: len(here.stages.thinker.opened_ahead) == made)
            await caller.talk(unit)
            done = caller.units[-1]
            assert done.rebuild_cause == "slide"
            assert done.rebuild_ms is not None
            waited_ms.append(done.rebuild_ms)
        assert statistics.median(waited_ms) < 1.0
        # One that is still being made is waited for.
        pause = here.stages.thinker.pause(16, after=True)
        await caller.say(16)
        await pause.reached.wait()
        pause.go.set()
        await caller.until_unit(16)
        page = here.registry.live["waits"].runner._metrics.prometheus_page().decode()
    assert 'duplex_window_rebuilds_total{duplex_window_cause="slide"} 12.0' in page


class Stumbling(FakeThinker):
    """Fails what is opened ahead, before or after its work, every time in turn."""

    def __init__(self, fault: StageFault) -> None:
        super().__init__(VOCABULARY, WORD_IDS)
        self.fault = fault
        self.failed = 0

    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer:
        if not isinstance(request.parts[-1], Ids):
            return await super().feed(request)
        self.failed += 1
        if self.failed % 3 == 1:
            raise self._stumble()
        answer = await super().feed(request)
        if self.failed % 3 == 2:
            raise self._stumble()
        return answer

    def _stumble(self) -> Exception:
        if self.fault is StageFault.GONE:
            self.kill()
        return self.error(self.fault, "as told")


@pytest.mark.parametrize("fault", list(StageFault))
async def test_whatever_happens_to_it_changes_no_token(
    valkey: EmbeddedValkey, fault: StageFault
) -> None:
    terms = Terms("context")
    async with replica(valkey.url, rebuild_ahead=False) as here:
        said, _, _ = await conversation(here, f"calm-{fault}", terms)
    stages = Stages(thinker=Stumbling(fault))
    async with replica(valkey.url, stages=stages) as here:
        stumbled, caller, _ = await conversation(here, f"stumbles-{fault}", terms)
        assert stages.thinker.failed > 20
        spare = here.registry._assembly.stages.thinker_spare
        await eventually(lambda: spare.free == 2)
    assert stumbled == said
    causes = {unit.rebuild_cause for unit in caller.units}
    assert causes == {None, "slide"} | ({"engine_restart"} if fault is StageFault.GONE else set())


async def test_more_sessions_than_seats_still_say_what_they_say_alone(
    valkey: EmbeddedValkey,
) -> None:
    """Four sessions that slide each second share two spare seats."""
    terms = Terms("context", max_units=3)
    alone: list[list[tuple[int, ...]]] = []
    for voice in range(4):
        async with replica(valkey.url, rebuild_ahead=False) as here:
            await here.open(f"alone-{voice}", terms)
            caller = Caller(f"alone-{voice}", voice=voice)
            await caller.dial(here)
            await caller.talk(30)
            alone.append(await tokens(here.ledger, f"alone-{voice}"))
    async with replica(valkey.url) as here:
        callers = [Caller(f"crowd-{voice}", voice=voice) for voice in range(4)]
        for caller in callers:
            await here.open(caller.session, terms)
            await caller.dial(here)
            await caller.say(30)
        for voice, caller in enumerate(callers):
            await caller.until_unit(30)
            check_events(caller)
            assert await tokens(here.ledger, caller.session) == alone[voice]
        # Units 5 to 30 slide, and so would 31, which is made ready behind 30.
        assert 0 < len(here.stages.thinker.opened_ahead) <= 4 * 27
