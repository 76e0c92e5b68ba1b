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
LONG_ANSWER_TOKENS = 12
"""The random checkpoint answers with 19 or 20 tokens, but for a few times."""
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
    await speech.unit(13)
    await speech.close()
    return speech


def same(one: Speech, other: Speech) -> None:
    for mine, its in zip(one.answers, other.answers, strict=True):
        assert (mine.emitted_ids, mine.sampled_ids) == (its.emitted_ids, its.sampled_ids)
        assert np.abs(array(mine.hidden) - array(its.hidden)).max(initial=0) <= TOLERANCE
        assert mine.decision_row is not None
        assert its.decision_row is not None
        assert np.abs(array(mine.decision_row) - array(its.decision_row)).max() <= TOLERANCE


@pytest.mark.parametrize("room", [1, 2, 5, 9])
async def test_a_preempted_unit_is_replayed_as_it_was(crowd: Crowd, room: int) -> None:
    """room: tokens that each answer has before it needs a block that is not there."""
    positions = HALF_TOKENS - room
    calm = {seed: await alone(crowd, seed, positions) for seed in (room, 100 + room)}
    for speech in calm.values():
        assert len(speech.answers[0].emitted_ids) >= LONG_ANSWER_TOKENS
    before = await crowd.preemptions()
    speeches = {seed: Speech(crowd, f"crowded-{seed}", seed) for seed in calm}
    tasks = {asyncio.create_task(speech.unit(positions)): speech for speech in speeches.values()}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert len(waiting) == 1, "the other one has lost its place"
    first = tasks[done.pop()]
    await first.close()
    (last_task,) = waiting
    await last_task
    last = tasks[last_task]
    assert await crowd.preemptions() > before
    # What was replayed holds: it is gone on from.
    await last.unit(13)
    await last.close()
    same(last, calm[last.seed])
    only_first = Speech(crowd, "", first.seed, calm[first.seed].answers[:1])
    same(first, only_first)
