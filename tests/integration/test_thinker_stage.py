"""The Thinker as a process on stock vLLM, against plain transformers on the same weights."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_kit import (
    HIDDEN,
    ThinkerReference,
    array,
    make_engine_checkpoint,
    random_rows,
    running,
    stage_spec,
    tensor,
)
from numpy.typing import NDArray

from duplex_sidecar.checkpoint.config import CheckpointConfig
from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    SESSION_SAMPLING,
    PolicyState,
    Sampling,
    UnitRules,
    advance,
    encode_rules,
    initial_state,
)
from duplex_sidecar.model.minicpmo45.sampling import UnitRow, choose
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import (
    Condition,
    Done,
    ElementType,
    HealthReport,
    Ids,
    Rows,
    TalkerFeed,
    Tensor,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
    ThinkerPart,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.link import StageLink
from duplex_sidecar.stages.thinker.client import ThinkerClient
from duplex_sidecar.stages.thinker.config import ThinkerSettings

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

CONTEXT_TOKENS = 512
SEATS = 4
BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * 32  # layers, keys and values, heads, size, float32, positions
BLOCKS = 48
TOLERANCE = 1e-4
ENDINGS = 1_000


@dataclass
class Stage:
    link: StageLink
    thinker: ThinkerClient
    reference: ThinkerReference
    vocabulary: Vocabulary

    async def streams(self) -> tuple[str, ...]:
        return (await self.thinker.health()).streams


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("thinker")
    config: CheckpointConfig = make_engine_checkpoint(folder / "checkpoint")
    settings = ThinkerSettings(
        checkpoint=str(folder / "checkpoint"),
        device=Device.CPU,
        element_type=ElementType.FLOAT32,
        context_tokens=CONTEXT_TOKENS,
        seats=SEATS,
        kv_bytes=(BLOCKS + 1) * BLOCK_BYTES,
        runtime_dir=str(folder / "run"),
        cache_dir=str(request.config.cache.mkdir("stage-caches")),
        # Small, so that longer prompts are prefilled in chunks, whose early steps must not count.
        max_batched_tokens=64,
    )
    async with running(stage_spec("thinker", settings)) as (supervisor, _):
        link = supervisor.link("thinker")
        yield Stage(
            link=link,
            thinker=ThinkerClient(link),
            reference=ThinkerReference(folder / "checkpoint", config),
            vocabulary=load_vocabulary(folder / "checkpoint"),
        )


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _leaves_nothing(stage: Stage) -> AsyncIterator[None]:
    """Whatever a test did, the stage lives and holds no stream afterwards."""
    yield
    for stream in await stage.streams():
        await stage.thinker.close(ThinkerClose(stream))
    assert await stage.streams() == ()


Piece = Sequence[int] | NDArray[np.float32]


@dataclass
class Conversation:
    """Feeds one stream and checks every answer against the reference."""

    stage: Stage
    name: str
    sampling: Sampling = GREEDY_SAMPLING
    stream: str = ""
    unit: int = 0
    pieces: list[Piece] = field(default_factory=list[Piece])
    """All that the Thinker has seen, and the last answer's terminator."""
    fed: int = 0
    policy: PolicyState = field(default_factory=lambda: initial_state(seeded_text=False))

    def __post_init__(self) -> None:
        self.stream = self.stream or self.name

    @property
    def positions(self) -> int:
        return sum(len(piece) for piece in self.pieces[: self.fed])

    def rules(self, forced_ids: tuple[int, ...] = ()) -> UnitRules:
        return UnitRules(
            policy=self.policy,
            is_speech=True,
            force_listen=False,
            max_tokens=None,
            sampling=self.sampling,
            seed=f"{self.name}:{self.unit}",
            forced_ids=forced_ids,
        )

    def hear(self, seed: int, rows: int = 10) -> None:
        closure = (self.stage.vocabulary.unit_end,) if self.pieces else ()
        self.pieces.append((*closure, self.stage.vocabulary.unit))
        self.pieces.append(random_rows(rows, seed))

    def request(self, rules: UnitRules) -> ThinkerFeed:
        return ThinkerFeed(
            session=self.name,
            stream=self.stream,
            unit=self.unit,
            opens=self.fed == 0,
            position=self.positions,
            parts=tuple(map(_part, self.pieces[self.fed :])),
            rules=encode_rules(rules),
        )

    async def answer(self, forced_ids: tuple[int, ...] = ()) -> ThinkerAnswer:
        rules = self.rules(forced_ids)
        answer = await self.stage.thinker.feed(self.request(rules))
        self.check(rules, answer)
        # The content has KV; the terminator comes with the next feed.
        self.pieces.append(answer.emitted_ids[:-1])
        self.fed = len(self.pieces)
        self.pieces.append(answer.emitted_ids[-1:])
        self.policy = advance(rules, answer.sampled_ids, answer.emitted_ids, self.stage.vocabulary)
        self.unit += 1
        return answer

    def check(self, rules: UnitRules, answer: ThinkerAnswer) -> None:
        """Equal tokens, and the hidden row of each token but the last."""
        reference, vocabulary = self.stage.reference, self.stage.vocabulary
        emitted, sampled = answer.emitted_ids, answer.sampled_ids
        fed = [*self.pieces, emitted[:-1]]
        hidden, logits = reference.forward(torch.cat([reference.embed(piece) for piece in fed]))
        steps = len(emitted)
        for step, row in enumerate(logits[-steps:]):
            so_far = UnitRow(rules, emitted[:step], sampled[:step])
            choice = choose(row[None], [so_far], vocabulary)
            assert (sampled[step], emitted[step]) == (
                choice.sampled_ids[0],
                choice.emitted_ids[0],
            )
        assert emitted[-1] in vocabulary.terminators
        assert not vocabulary.terminators.intersection(emitted[:-1])
        expected = hidden[len(hidden) - steps + 1 :].numpy()
        np.testing.assert_allclose(array(answer.hidden), expected, atol=TOLERANCE)


def _part(piece: Piece) -> ThinkerPart:
    return Rows(tensor(piece)) if isinstance(piece, np.ndarray) else Ids(tuple(piece))


async def converse(conversation: Conversation, units: int, seed: int) -> list[ThinkerAnswer]:
    answers: list[ThinkerAnswer] = []
    for unit in range(units):
        conversation.hear(1000 * seed + unit)
        answers.append(await conversation.answer())
    return answers


@pytest.mark.parametrize("sampling", [GREEDY_SAMPLING, SESSION_SAMPLING], ids=["greedy", "sampled"])
async def test_units_equal_the_reference(stage: Stage, sampling: Sampling) -> None:
    answers = await converse(Conversation(stage, "alone", sampling), units=8, seed=1)
    assert any(len(answer.emitted_ids) > 2 for answer in answers)


async def test_a_redone_unit_is_the_same(stage: Stage) -> None:
    first = await converse(Conversation(stage, "redone", SESSION_SAMPLING, "one"), 3, seed=2)
    again = await converse(Conversation(stage, "redone", SESSION_SAMPLING, "two"), 3, seed=2)
    assert [a.emitted_ids for a in again] == [a.emitted_ids for a in first]


async def test_sessions_side_by_side_are_what_they_are_alone(stage: Stage) -> None:
    talks = [Conversation(stage, f"side-{i}", SESSION_SAMPLING) for i in range(SEATS)]
    await asyncio.gather(*(converse(talk, 5, seed=10 + i) for i, talk in enumerate(talks)))


async def test_a_rebuild_in_chunks_goes_on_equally_while_the_old_stream_lives(
    stage: Stage,
) -> None:
    talk = Conversation(stage, "rebuilt", stream="old")
    await converse(talk, units=6, seed=3)
    # A new stream with the whole prompt: three chunks of 64 positions.
    talk.stream, talk.fed = "new", 0
    talk.hear(3999, rows=70)
    assert sum(map(len, talk.pieces)) > 2 * 64
    await talk.answer()
    assert set(await stage.streams()) == {"old", "new"}
    await stage.thinker.close(ThinkerClose("old"))
    await converse(talk, units=2, seed=4)


async def test_a_stream_opened_ahead_answers_as_if_it_had_had_its_prompt_at_once(
    stage: Stage,
) -> None:
    """Closed units alone, one token that nobody reads, then the append: the reference's tokens and
    hidden rows, and positions as if that token had never been."""
    talk = Conversation(stage, "foreseen", SESSION_SAMPLING, "old")
    await converse(talk, units=5, seed=7)
    # The unit just answered is closed, and the whole of it is given to another stream.
    talk.pieces.append((stage.vocabulary.unit_end,))
    talk.stream, talk.fed, talk.unit = "ahead", 0, talk.unit - 1
    await stage.thinker.feed(talk.request(talk.rules((stage.vocabulary.listen,))))
    talk.fed, talk.unit = len(talk.pieces), talk.unit + 1
    assert set(await stage.streams()) == {"old", "ahead"}
    await stage.thinker.close(ThinkerClose("old"))
    talk.pieces += [(stage.vocabulary.unit,), random_rows(10, 7777)]
    await talk.answer()
    await converse(talk, units=2, seed=8)


async def test_forced_ids_give_their_hidden_rows_again(stage: Stage) -> None:
    talk = Conversation(stage, "forced", SESSION_SAMPLING, "original")
    talk.hear(50)
    original = await talk.answer()
    redo = Conversation(stage, "forced", SESSION_SAMPLING, "redo")
    redo.hear(50)
    again = await redo.answer(forced_ids=original.emitted_ids)
    assert again.emitted_ids == original.emitted_ids
    np.testing.assert_allclose(array(again.hidden), array(original.hidden), atol=TOLERANCE)


async def test_a_unit_at_the_limit_ends_and_one_beyond_is_refused(stage: Stage) -> None:
    """limit - 1, limit, limit + 1, with an answer of 19 tokens and a terminator; and the last
    position at which the engine itself can still end it."""
    longest = (*range(40, 59), stage.vocabulary.chunk_eos)
    for context in (CONTEXT_TOKENS - 1, CONTEXT_TOKENS, CONTEXT_TOKENS + 1, CONTEXT_TOKENS + 12):
        talk = Conversation(stage, f"limit-{context}")
        talk.pieces.append([stage.vocabulary.unit] * (context - 10))
        talk.pieces.append(random_rows(10, context))
        answer = await talk.answer(forced_ids=longest)
        assert len(answer.emitted_ids) == 20
        await stage.thinker.close(ThinkerClose(talk.stream))
    talk = Conversation(stage, "beyond")
    talk.pieces.append([stage.vocabulary.unit] * (CONTEXT_TOKENS + 13))
    with pytest.raises(StageError, match="exceed the engine") as caught:
        await talk.answer(forced_ids=longest)
    assert caught.value.fault is StageFault.REFUSED


Spoil = Callable[[ThinkerFeed], ThinkerFeed]


def _with_rows(rows: Tensor) -> Spoil:
    return lambda feed: msgspec.structs.replace(feed, parts=(*feed.parts[:-1], Rows(rows)))


def _with_ids(*ids: int) -> Spoil:
    return lambda feed: msgspec.structs.replace(feed, parts=(Ids(ids), *feed.parts))


def _with(**changes: object) -> Spoil:
    return lambda feed: msgspec.structs.replace(feed, **changes)


def _with_rules(**changes: object) -> Spoil:
    def spoil(feed: ThinkerFeed) -> ThinkerFeed:
        rules = msgspec.msgpack.decode(feed.rules)
        return msgspec.structs.replace(feed, rules=msgspec.msgpack.encode(rules | changes))

    return spoil


_NAN = random_rows(10, 0)
_NAN[3, 7] = np.nan

HOSTILE: dict[str, tuple[Spoil, StageFault]] = {
    "rows of a wrong width": (
        _with_rows(Tensor(ElementType.FLOAT32, (10, 255), bytes(4 * 2550))),
        StageFault.REFUSED,
    ),
    "rows of a wrong rank": (
        _with_rows(Tensor(ElementType.FLOAT32, (HIDDEN,), bytes(4 * HIDDEN))),
        StageFault.REFUSED,
    ),
    "no rows in a part": (
        _with_rows(Tensor(ElementType.FLOAT32, (0, HIDDEN), b"")),
        StageFault.REFUSED,
    ),
    "rows of a wrong type": (
        _with_rows(Tensor(ElementType.BFLOAT16, (10, HIDDEN), bytes(2 * 10 * HIDDEN))),
        StageFault.REFUSED,
    ),
    "rows that are no numbers": (_with_rows(tensor(_NAN)), StageFault.REFUSED),
    "an id above the vocabulary": (_with_ids(1024), StageFault.REFUSED),
    "a negative id": (_with_ids(-1), StageFault.REFUSED),
    "no positions": (_with(parts=()), StageFault.REFUSED),
    "a prompt beyond the length": (_with_ids(*[5] * 600), StageFault.REFUSED),
    "a wrong position": (_with(position=3), StageFault.REFUSED),
    "a unit that was before": (_with(unit=0), StageFault.REFUSED),
    "a stream that is open": (_with(opens=True, position=0), StageFault.REFUSED),
    "an unknown stream": (_with(stream="nobody"), StageFault.UNKNOWN_STREAM),
    "opening in the middle": (_with(stream="fresh", opens=True), StageFault.REFUSED),
    "rules that are no message": (_with(rules=b"\xc1"), StageFault.REFUSED),
    "rules of another kind": (_with(rules=msgspec.msgpack.encode([1])), StageFault.REFUSED),
    "a penalty id out of range": (
        _with_rules(
            policy={
                "penalty_ids": [5000],
                "turn_ended": True,
                "response_open": False,
                "speech_pending": False,
                "pending_terminator": None,
            }
        ),
        StageFault.REFUSED,
    ),
    "a bench script": (_with_rules(bench_script=[40, 41]), StageFault.REFUSED),
    "a forced id out of range": (_with_rules(forced_ids=[1024]), StageFault.REFUSED),
}


async def test_hostile_feeds_are_refused_and_nobody_notices(stage: Stage) -> None:
    talk = Conversation(stage, "victim")
    await converse(talk, units=2, seed=5)
    talk.hear(5555)
    good = talk.request(talk.rules())
    for what, (spoil, fault) in HOSTILE.items():
        with pytest.raises(StageError) as caught:
            await stage.thinker.feed(spoil(good))
        assert caught.value.fault is fault, what
        assert len(caught.value.reason) < 300, what
    # The very same stream goes on with the reference's tokens.
    await talk.answer()
    await converse(talk, units=1, seed=6)


async def test_a_request_for_another_stage_is_refused(stage: Stage) -> None:
    feed = TalkerFeed("s", "s", 0, True, 0, (Condition((1,), tensor(random_rows(1, 0))),), b"")
    with pytest.raises(StageError, match="not for the thinker"):
        await stage.link.call(feed, Done, 60.0)


async def test_seats_and_blocks_are_never_overcommitted(stage: Stage) -> None:
    talks = [Conversation(stage, f"seat-{i}") for i in range(SEATS + 1)]
    for i, talk in enumerate(talks[:SEATS]):
        await converse(talk, 1, seed=20 + i)
    talks[SEATS].hear(1)
    with pytest.raises(StageError, match="seats are taken"):
        await talks[SEATS].answer()
    for talk in talks[: SEATS - 1]:
        await stage.thinker.close(ThinkerClose(talk.stream))
    # Two streams of 17 blocks fit beside the one that is left, a third does not.
    for i in range(3):
        big = Conversation(stage, f"big-{i}")
        big.pieces.append([stage.vocabulary.unit] * CONTEXT_TOKENS)
        if i < 2:
            await big.answer()
            continue
        with pytest.raises(StageError, match="KV blocks") as caught:
            await big.answer()
        assert caught.value.fault is StageFault.REFUSED
    await converse(talks[SEATS - 1], 1, seed=30)


async def test_closing_under_way_leaves_neither_seat_nor_blocks(stage: Stage) -> None:
    """A unit queued in the instant before an abort comes back as a new request in vLLM unless the
    stream is ended with care; it would hold a seat for ever."""
    chance = random.Random(7)
    faults: set[StageFault] = set()
    for number in range(ENDINGS):
        talk = Conversation(stage, f"cut-{number}")
        if chance.random() < 0.5:
            talk.hear(number)
            await stage.thinker.feed(talk.request(talk.rules((stage.vocabulary.listen,))))
            talk.fed, talk.unit = len(talk.pieces), 1
            talk.pieces.append((stage.vocabulary.listen,))
        talk.hear(number + 1)
        feed = asyncio.create_task(stage.thinker.feed(talk.request(talk.rules())))
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.004, 0.02)))
        await stage.thinker.close(ThinkerClose(talk.stream))
        try:
            await feed
        except StageError as error:
            faults.add(error.fault)
        # A close that overtook its feed ends nothing.
        await stage.thinker.close(ThinkerClose(talk.stream))
        assert await stage.streams() == ()
    assert faults == {StageFault.UNKNOWN_STREAM}
    # All seats and nearly all blocks are free.
    talks = [Conversation(stage, f"after-{i}") for i in range(SEATS)]
    await asyncio.gather(*(converse(talk, 1, seed=40 + i) for i, talk in enumerate(talks)))
    for talk in talks[1:]:
        await stage.thinker.close(ThinkerClose(talk.stream))
    for i in range(2):
        big = Conversation(stage, f"big-{i}")
        big.pieces.append([stage.vocabulary.unit] * CONTEXT_TOKENS)
        await big.answer()


async def test_health_tells_limits(stage: Stage) -> None:
    health: HealthReport = await stage.thinker.health()
    assert health.stage == "thinker"
    assert health.limits["max_model_len"] == CONTEXT_TOKENS + 32
    assert health.limits["blocks"] == BLOCKS
    assert health.limits["seats"] == SEATS
    assert health.limits["hidden_size"] == HIDDEN
    assert health.limits["lapped_records"] == 0
