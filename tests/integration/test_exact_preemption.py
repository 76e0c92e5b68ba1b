"""vLLM preempts a unit and replays it: the same tokens, the same rows.

Admission makes that impossible in the product. Here the guard looks away and two streams fill the
few KV blocks that there are, so that one of them loses its place in the middle of its answer.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from engine_kit import array, make_engine_checkpoint, random_rows, tensor
from numpy.typing import NDArray
from support.exact_session import engine

from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    PolicyState,
    UnitRules,
    advance,
    encode_rules,
    initial_state,
)
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.stages.engine.settings import BLOCK_TOKENS, UNIT_MARGIN_TOKENS
from duplex_sidecar.stages.envelope import Ids, Rows, ThinkerAnswer, ThinkerClose, ThinkerFeed
from duplex_sidecar.stages.thinker.client import ThinkerClient

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS  # layers, keys and values, heads, size, float32
BLOCKS = 16
HALF_TOKENS = BLOCKS // 2 * BLOCK_TOKENS
NEXT_UNIT = 13
MORE_TOKENS = 3
SEEDS = 200
ATTEMPTS = 20
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Crowd:
    thinker: ThinkerClient
    vocabulary: Vocabulary

    async def preemptions(self) -> int:
        """By vLLM's own count."""
        return (await self.thinker.health()).limits["preemptions"]


@dataclass
class Speech:
    """One stream that is spoken to, with seeded rows."""

    crowd: Crowd
    name: str
    seed: int
    answers: list[ThinkerAnswer] = field(default_factory=list[ThinkerAnswer])
    held: int = 0
    policy: PolicyState = field(default_factory=lambda: initial_state(seeded_text=False))

    async def unit(self, positions: int) -> None:
        """Feed so many positions."""
        number = len(self.answers)
        last = self.answers[-1].emitted_ids[-1:] if self.answers else ()
        head = Ids((*last, self.crowd.vocabulary.unit))
        rows = random_rows(positions - len(head.ids), 10 * self.seed + number)
        rules = UnitRules(
            policy=self.policy,
            is_speech=True,
            force_listen=False,
            max_tokens=None,
            sampling=GREEDY_SAMPLING,
            seed=self.name,
        )
        answer = await self.crowd.thinker.feed(
            ThinkerFeed(
                session=self.name,
                stream=self.name,
                unit=number,
                opens=not self.answers,
                position=self.held,
                parts=(head, Rows(tensor(rows))),
                rules=encode_rules(rules),
            )
        )
        self.policy = advance(rules, answer.sampled_ids, answer.emitted_ids, self.crowd.vocabulary)
        self.held += positions + len(answer.emitted_ids) - 1
        self.answers.append(answer)

    async def close(self) -> None:
        await self.crowd.thinker.close(ThinkerClose(self.name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crowd]:
    checkpoint: Path = tmp_path_factory.mktemp("crowd") / "checkpoint"
    make_engine_checkpoint(checkpoint)
    async with engine(
        checkpoint,
        default_cache_dir(),
        module="support.exact_crowded_thinker",
        context_tokens=BLOCKS * BLOCK_TOKENS - UNIT_MARGIN_TOKENS,
        kv_bytes=(BLOCKS + 1) * BLOCK_BYTES,
        seats=4,
        max_batched_tokens=2 * HALF_TOKENS,
    ) as running:
        yield Crowd(running.client, load_vocabulary(checkpoint))


async def alone(crowd: Crowd, seed: int, positions: int) -> Speech:
    """Two units with all blocks to itself."""
    speech = Speech(crowd, f"alone-{seed}-{positions}", seed)
    await speech.unit(positions)
    await speech.unit(NEXT_UNIT)
    await speech.close()
    return speech


async def two_that_talk(crowd: Crowd, room: int) -> list[Speech]:
    """Two streams alone, whose answers go on for some tokens after the first `room`."""
    found: list[Speech] = []
    for seed in range(1, SEEDS):
        speech = await alone(crowd, seed, HALF_TOKENS - room)
        if len(speech.answers[0].emitted_ids) > room + MORE_TOKENS:
            found.append(speech)
        if len(found) == 2:
            return found
    raise AssertionError("no seeds with long answers")


@pytest.mark.parametrize("room", [6, 8, 10])
async def test_a_preempted_unit_is_replayed_as_it_was(crowd: Crowd, room: int) -> None:
    """room: tokens that each answer has before it needs a block that is not there."""
    calm = await two_that_talk(crowd, room)
    before = await crowd.preemptions()
    for attempt in range(ATTEMPTS):
        await crowded(crowd, calm, HALF_TOKENS - room, f"crowded-{room}-{attempt}")
        if await crowd.preemptions() > before:
            return
        # The second one came when the first had taken its last block, and waited outside.
    raise AssertionError("nobody was preempted")


async def crowded(crowd: Crowd, calm: list[Speech], positions: int, name: str) -> None:
    """Both at once. Whoever is done first leaves, and the other one says what it says alone."""
    speeches = [Speech(crowd, f"{name}-{each.seed}", each.seed) for each in calm]
    tasks = [asyncio.create_task(speech.unit(positions)) for speech in speeches]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1, "there is no room for both answers"
    for task, speech, twin in zip(tasks, speeches, calm, strict=True):
        if task in done:
            await speech.close()
            same(speech.answers, twin.answers[:1])
    for task, speech, twin in zip(tasks, speeches, calm, strict=True):
        if task not in done:
            await task
            # What was replayed holds: it is gone on from.
            await speech.unit(NEXT_UNIT)
            await speech.close()
            same(speech.answers, twin.answers)


def same(some: list[ThinkerAnswer], others: list[ThinkerAnswer]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.emitted_ids, one.sampled_ids) == (other.emitted_ids, other.sampled_ids)
        assert np.abs(states(one) - states(other)).max() <= TOLERANCE


def states(answer: ThinkerAnswer) -> NDArray[np.float32]:
    """Of every token's decision: [tokens, hidden]."""
    assert answer.decision_row is not None
    return np.concatenate([array(answer.decision_row), array(answer.hidden)])
