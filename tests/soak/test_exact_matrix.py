"""The whole matrix at 120 units: every window mode, with and without a camera, under each kind of
disturbance and all of them; and each defect really in the context while the session goes on."""

from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from support.exact_checks import NotExact, decided, equals_loop, equals_reference, equals_talk
from support.exact_defects import Defect
from support.exact_reference import Decided, Reference
from support.exact_session import (
    CASTS,
    CRASH,
    DISTURBANCES,
    MOVE,
    Talk,
    World,
    engine,
    make_world,
    plans_for,
    talk,
    talk_badly,
)

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [
    pytest.mark.soak,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(3600),
]

UNITS = 120
SPOILT_UNIT = 26
SPOILT_UNITS = 32

MATRIX = [*((kind,) for kind in DISTURBANCES), DISTURBANCES]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tiny_checkpoint: Path, valkey: EmbeddedValkey) -> AsyncIterator[World]:
    torch.set_num_threads(1)
    async with engine(tiny_checkpoint, default_cache_dir()) as running:
        yield make_world(tiny_checkpoint, valkey.url, running)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Reference:
    return Reference(tiny_checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(world: World) -> dict[str, Talk]:
    return await talk(world, CASTS, UNITS, label="calm")


@pytest.fixture(scope="module")
def truth(world: World, calm: dict[str, Talk], reference: Reference) -> dict[str, list[Decided]]:
    return {name: decided(one, world.script_of(one.cast), reference) for name, one in calm.items()}


async def test_undisturbed_conversations_have_the_logits_of_the_reference(
    world: World,
    calm: dict[str, Talk],
    truth: dict[str, list[Decided]],
    reference: Reference,
) -> None:
    for name, one in calm.items():
        known = truth[name]
        print(
            name, equals_reference(one, world.script_of(one.cast), world.language, reference, known)
        )
        if one.cast.mode == "off":
            print(
                name, "loop", equals_loop(one, world.script_of(one.cast), world.language, reference)
            )


@pytest.mark.parametrize("kinds", MATRIX, ids=lambda kinds: "+".join(kinds).replace(" ", "-"))
async def test_disturbed_conversations_are_the_undisturbed_ones(
    kinds: tuple[str, ...], world: World, calm: dict[str, Talk], reference: Reference
) -> None:
    """And each defect in what was rebuilt is noticed, in every conversation behind every kind."""
    number = MATRIX.index(kinds)
    _, plans = plans_for(CASTS, kinds, UNITS, number)
    behind = {f"bad-{number}-{name}": plan.behind() for name, plan in plans.items()}
    talks = await talk_badly(
        world,
        CASTS,
        UNITS,
        label=f"bad-{number}",
        kinds=kinds,
        seed=number,
        shadowed=lambda session, unit: unit in behind[session],
    )
    for name, one in talks.items():
        script = world.script_of(one.cast)
        known = decided(one, script, reference)
        print(name, equals_talk(one, calm[name], reference))
        print(name, equals_reference(one, script, world.language, reference, known))
        for unit, defect in product(plans[name].behind(), Defect):
            spoilt = one.spoilt(unit, defect)
            with pytest.raises(NotExact) as noticed:
                equals_reference(spoilt, script, world.language, reference, known[: unit - 1])
            assert noticed.value.unit == unit
            with pytest.raises(NotExact) as noticed:
                equals_talk(spoilt, calm[name].until(unit), reference)
            assert noticed.value.unit == unit
        causes = {unit.rebuild_cause for unit in one.units}
        for kind in kinds:
            # An eviction is to a session what the loss of an engine is to its one stream.
            cause = {CRASH: "replica_restart", MOVE: "move"}.get(kind, "engine_restart")
            # In `context` each unit slides, and a prompt that is made anew for that says so.
            slides = one.cast.mode == "context" and cause == "engine_restart"
            assert cause in causes or (slides and "slide" in causes), (name, kind)


@pytest.mark.parametrize("defect", Defect, ids=lambda defect: defect.replace(" ", "-"))
async def test_a_session_that_goes_on_with_a_defect_is_found_out(
    defect: Defect,
    world: World,
    calm: dict[str, Talk],
    truth: dict[str, list[Decided]],
    reference: Reference,
) -> None:
    label = f"spoilt-{list(Defect).index(defect)}"
    spoils = {(f"{label}-{cast.name}", SPOILT_UNIT): defect for cast in CASTS}
    talks = await talk(world, CASTS, SPOILT_UNITS, label=label, spoils=spoils)
    for name, one in talks.items():
        known = truth[name][: SPOILT_UNIT - 1]
        with pytest.raises(NotExact) as noticed:
            equals_reference(one, world.script_of(one.cast), world.language, reference, known)
        assert noticed.value.unit == SPOILT_UNIT
        with pytest.raises(NotExact) as noticed:
            equals_talk(one, calm[name].until(SPOILT_UNITS), reference)
        assert noticed.value.unit == SPOILT_UNIT
        if one.cast.mode == "off":
            with pytest.raises(NotExact) as noticed:
                equals_loop(one, world.script_of(one.cast), world.language, reference)
            assert noticed.value.unit == SPOILT_UNIT
