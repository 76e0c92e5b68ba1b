"""The same conversations in bfloat16: a token that differs from the reference's was a near tie.

Rounding moves logits by a tenth, so that equal tokens are no promise there. The reference computes
in float32 with the rounded weights and rows and follows what was really said, token by token.
"""

from collections.abc import AsyncIterator, Sequence
from functools import reduce
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from support.exact_checks import Leaning, NearTies, NotExact, contexts, leaning, near_ties
from support.exact_defects import Defect
from support.exact_reference import Reference
from support.exact_session import (
    CASTS,
    CRASH,
    EVICTION,
    Talk,
    World,
    engine,
    make_world,
    talk,
    talk_badly,
)
from support.exact_stages import Said

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.stages.envelope import ElementType

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

UNITS = 40
SEED = 3
SHADOWED_UNIT = 17
LEAST_PAST_UNITS = 9
MOST_NEAR_TIES = 0.03
"""Share of the tokens that were sampled."""
FARTHEST_SHARE = 0.25
"""From 1 with a defect, from 0 without: half of what would tell them apart at all."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tiny_checkpoint: Path, valkey: EmbeddedValkey) -> AsyncIterator[World]:
    torch.set_num_threads(1)
    half = ElementType.BFLOAT16
    async with engine(tiny_checkpoint, default_cache_dir(), element_type=half) as running:
        yield make_world(tiny_checkpoint, valkey.url, running, half)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Reference:
    return Reference(tiny_checkpoint, rounded=torch.bfloat16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(world: World) -> dict[str, Talk]:
    return await talk(
        world, CASTS, UNITS, label="calm", shadowed=lambda _, unit: unit == SHADOWED_UNIT
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def badly(world: World, calm: dict[str, Talk]) -> dict[str, Talk]:
    """After the calm one, not beside it."""
    kinds = (EVICTION, CRASH)
    return await talk_badly(world, CASTS, UNITS, label="bad", kinds=kinds, seed=SEED)


def judged(talks: dict[str, Talk], world: World, reference: Reference) -> NearTies:
    whole = NearTies()
    for name, one in talks.items():
        ties = near_ties(one, world.script_of(one.cast), world.language, reference)
        print(f"{name}: {ties}")
        whole = whole.and_then(ties)
    print(f"together: {whole}")
    return whole


async def test_a_differing_token_is_a_near_tie(
    world: World, calm: dict[str, Talk], reference: Reference
) -> None:
    ties = judged(calm, world, reference)
    assert ties.sampled > 500
    assert len(ties.gaps) <= MOST_NEAR_TIES * ties.sampled


async def test_a_conversation_treated_badly_differs_in_near_ties_alone(
    world: World, calm: dict[str, Talk], badly: dict[str, Talk], reference: Reference
) -> None:
    ties = judged(badly, world, reference)
    assert len(ties.gaps) <= MOST_NEAR_TIES * ties.sampled
    same = sum(badly[name].said == one.said for name, one in calm.items())
    print(f"{same} of {len(calm)} conversations have the tokens of the undisturbed one")


async def test_a_missing_unit_is_noticed_by_the_logits_alone(
    world: World, calm: dict[str, Talk], reference: Reference
) -> None:
    for one in calm.values():
        spoilt = one.spoilt(SHADOWED_UNIT, Defect.UNIT_MISSING)
        with pytest.raises(NotExact):
            near_ties(spoilt, world.script_of(one.cast), world.language, reference)


@pytest.mark.parametrize("defect", Defect)
async def test_every_defect_is_told_from_rounding(
    world: World,
    calm: dict[str, Talk],
    badly: dict[str, Talk],
    reference: Reference,
    defect: Defect,
) -> None:
    """Where a defect is as small as the rounding, its direction is known: a context that has it
    answers along all of it, one that has not along nothing. Six answers each, taken together: one
    of every conversation."""
    kinds = {"with it": [], "without": [], "treated badly": []}
    for name, one in calm.items():
        script = world.script_of(one.cast)
        context = contexts(one, script)[SHADOWED_UNIT - 1].context
        wrong = one.tape.spoilt[SHADOWED_UNIT, defect]
        kinds["with it"].append(leaning(wrong, context, defect, script, reference))
        right = one.tape.last(SHADOWED_UNIT)
        kinds["without"].append(leaning(right, context, defect, script, reference))
        lost = badly[name]
        again = rebuilt_answer(lost)
        context = contexts(lost, script)[again.unit - 1].context
        kinds["treated badly"].append(leaning(again, context, defect, script, reference))
    shares = {kind: sum_of(leanings).share for kind, leanings in kinds.items()}
    alone = {kind: [one.share for one in leanings] for kind, leanings in kinds.items()}
    print(f"{defect}: {shares}; each: {alone}")
    assert abs(shares["with it"] - 1) < FARTHEST_SHARE
    assert abs(shares["without"]) < FARTHEST_SHARE
    assert abs(shares["treated badly"]) < FARTHEST_SHARE


def rebuilt_answer(talk: Talk) -> Said:
    """The newest answer that is the first one of its stream, with a past to have defects in."""
    return [a for a in talk.tape.answers if a.rebuilt and a.unit >= LEAST_PAST_UNITS][-1]


def sum_of(leanings: Sequence[Leaning]) -> Leaning:
    return reduce(Leaning.and_then, leanings)
