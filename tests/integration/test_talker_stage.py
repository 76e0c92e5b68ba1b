"""The Talker as a process on stock vLLM, against a plain Llama loop over the same weights."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_kit import (
    HIDDEN,
    TalkerReference,
    make_engine_checkpoint,
    random_rows,
    running,
    stage_spec,
    tensor,
)
from numpy.typing import NDArray
from support.plain_talker import END, TALKER, next_code

from duplex_sidecar.model.minicpmo45.decode import GREEDY_SAMPLING, Sampling
from duplex_sidecar.model.minicpmo45.talker import (
    CODEC_EOS,
    TALKER_SAMPLING,
    UnitKind,
    UnitRules,
    encode_rules,
    recent_codes,
)
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import (
    Condition,
    Done,
    ElementType,
    Ids,
    TalkerClose,
    TalkerFeed,
    TalkerPart,
    Tensor,
    ThinkerClose,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.link import StageLink
from duplex_sidecar.stages.talker.client import TalkerClient
from duplex_sidecar.stages.talker.config import TalkerSettings

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

CONTEXT_TOKENS = 512
SEATS = 4
TEXT_IDS = 1024
ENDINGS = 1_000


@dataclass
class Stage:
    link: StageLink
    talker: TalkerClient
    reference: TalkerReference


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("talker")
    config = make_engine_checkpoint(folder / "checkpoint")
    settings = TalkerSettings(
        checkpoint=str(folder / "checkpoint"),
        device=Device.CPU,
        element_type=ElementType.FLOAT32,
        context_tokens=CONTEXT_TOKENS,
        seats=SEATS,
        kv_bytes=16 * 1024 * 1024,
        runtime_dir=str(folder / "run"),
        cache_dir=str(request.config.cache.mkdir("stage-caches")),
        max_batched_tokens=64,
    )
    async with running(stage_spec("talker", settings)) as (supervisor, _):
        link = supervisor.link("talker")
        yield Stage(link, TalkerClient(link), TalkerReference(folder / "checkpoint", config))


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _leaves_nothing(stage: Stage) -> AsyncIterator[None]:
    """Whatever a test did, the stage lives and holds no stream afterwards."""
    yield
    for stream in (await stage.talker.health()).streams:
        await stage.talker.close(TalkerClose(stream))
    assert (await stage.talker.health()).streams == ()


@dataclass
class Text:
    ids: tuple[int, ...]
    hidden: NDArray[np.float32]

    @classmethod
    def random(cls, seed: int) -> "Text":
        count = 1 + seed % 18
        ids = np.random.default_rng(seed).integers(0, TEXT_IDS, count)
        return cls(tuple(ids.tolist()), random_rows(count, seed, scale=1.0))

    def part(self) -> Condition:
        return Condition(self.ids, tensor(self.hidden))


@dataclass
class Turn:
    """Feeds one stream and checks every unit against the reference loop."""

    stage: Stage
    name: str
    sampling: Sampling = GREEDY_SAMPLING
    unit: int = 0
    position: int = 0
    recent: tuple[int, ...] = ()
    cache: Any = None
    answers: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def rules(self, kind: UnitKind) -> UnitRules:
        return UnitRules(kind, self.recent, self.sampling, f"{self.name}:{self.unit}")

    def request(self, parts: Sequence[TalkerPart], rules: UnitRules) -> TalkerFeed:
        return TalkerFeed(
            session=self.name,
            stream=self.name,
            unit=self.unit,
            opens=self.position == 0,
            position=self.position,
            parts=tuple(parts),
            rules=encode_rules(rules),
        )

    async def say(self, kind: UnitKind, text: Text, before: Sequence[TalkerPart] = ()) -> None:
        rules = self.rules(kind)
        answer = await self.stage.talker.feed(self.request([*before, text.part()], rules))
        reference = self.stage.reference
        rows = [_rows(reference, part) for part in (*before, text.part())]
        expected = self.loop(torch.cat(rows), rules)
        assert list(answer.codes) == expected
        self.position += sum(map(len, rows)) + len(expected)
        self.recent = recent_codes(self.recent, answer.codes)
        self.unit += 1
        self.answers.append(answer.codes)

    def loop(self, rows: torch.Tensor, rules: UnitRules) -> list[int]:
        """One unit, one code after the other; the end code is never fed. The choice is written
        there anew, so the product's own is not asked."""
        sampling = None if rules.sampling.greedy else TALKER
        codes: list[int] = []
        logits, self.cache = self.stage.reference.feed(rows, self.cache)
        while True:
            code = next_code(
                logits.tolist(), rules.kind, rules.recent_codes, codes, sampling, rules.seed
            )
            if code == END:
                return codes
            codes.append(code)
            logits, self.cache = self.stage.reference.feed(
                self.stage.reference.codes([code]), self.cache
            )


def _rows(reference: TalkerReference, part: TalkerPart) -> torch.Tensor:
    if isinstance(part, Ids):
        return reference.codes(part.ids)
    hidden = np.frombuffer(part.hidden.data, np.float32).reshape(part.hidden.shape)
    return reference.condition(part.ids, hidden)


async def speak(turn: Turn, seed: int) -> None:
    for unit, kind in enumerate((UnitKind.START, UnitKind.MID, UnitKind.MID, UnitKind.END)):
        await turn.say(kind, Text.random(100 * seed + unit))


@pytest.mark.parametrize("sampling", [GREEDY_SAMPLING, TALKER_SAMPLING], ids=["greedy", "sampled"])
async def test_a_turn_equals_the_reference(stage: Stage, sampling: Sampling) -> None:
    turn = Turn(stage, "alone", sampling)
    await speak(turn, seed=1)
    assert [len(codes) for codes in turn.answers[1:3]] == [25, 25]
    assert len(turn.answers[0]) <= 25
    assert len(turn.answers[3]) <= 103


async def test_turns_side_by_side_are_what_they_are_alone(stage: Stage) -> None:
    turns = [Turn(stage, f"side-{i}", TALKER_SAMPLING) for i in range(SEATS)]
    await asyncio.gather(*(speak(turn, seed=i + 2) for i, turn in enumerate(turns)))


async def test_a_rebuild_is_the_previous_condition_its_codes_and_the_new_one(stage: Stage) -> None:
    turn = Turn(stage, "old", TALKER_SAMPLING)
    texts = [Text.random(seed) for seed in (700, 701)]
    await turn.say(UnitKind.START, Text.random(699))
    await turn.say(UnitKind.MID, texts[0])
    rebuilt = Turn(stage, "new", TALKER_SAMPLING, unit=turn.unit, recent=turn.recent)
    await rebuilt.say(UnitKind.MID, texts[1], before=(texts[0].part(), Ids(turn.answers[-1])))
    assert len(rebuilt.answers[0]) == 25


@pytest.mark.parametrize("beyond", [-1, 0, 1], ids=["limit - 1", "limit", "limit + 1"])
async def test_the_longest_condition_at_the_limit(stage: Stage, beyond: int) -> None:
    """19 tokens and the row that closes them, and 25 codes of a budget of 26: the session fills the
    limit exactly and rebuilds above it; the engine has 32 positions more."""
    text = Text(tuple(range(100, 119)), random_rows(19, 950, scale=1.0))
    before = Text.random(951)
    filling = CONTEXT_TOKENS + beyond - 26 - 20 - (len(before.ids) + 1)
    codes = Ids(tuple(np.random.default_rng(952).integers(0, CODEC_EOS, filling).tolist()))
    turn = Turn(stage, f"limit-{beyond}", TALKER_SAMPLING)
    await turn.say(UnitKind.MID, text, before=(before.part(), codes))
    assert len(turn.answers[0]) == 25
    assert turn.position == CONTEXT_TOKENS + beyond - 1


async def test_hidden_rows_may_be_bfloat16(stage: Stage) -> None:
    text = Text.random(800)
    rounded = torch.from_numpy(text.hidden).bfloat16()
    short = Tensor(ElementType.BFLOAT16, tuple(rounded.shape), _bytes(rounded))
    as_bfloat16, as_float32 = Turn(stage, "bf16"), Turn(stage, "fp32")
    rules = as_bfloat16.rules(UnitKind.START)
    parts = [Condition(text.ids, short)]
    answer = await stage.talker.feed(as_bfloat16.request(parts, rules))
    await as_float32.say(UnitKind.START, Text(text.ids, rounded.float().numpy()))
    assert answer.codes == as_float32.answers[0]


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def _condition(ids: Sequence[int], shape: tuple[int, ...]) -> Condition:
    return Condition(tuple(ids), Tensor(ElementType.FLOAT32, shape, bytes(4 * int(np.prod(shape)))))


_INFINITE = random_rows(2, 0)
_INFINITE[1, 1] = np.inf

HOSTILE: dict[str, dict[str, object]] = {
    "a wrong width": {"parts": (_condition([1, 2], (2, HIDDEN - 1)),)},
    "a wrong row count": {"parts": (_condition([1, 2], (3, HIDDEN)),)},
    "a text id out of range": {"parts": (_condition([TEXT_IDS], (1, HIDDEN)),)},
    "a negative text id": {"parts": (_condition([-1], (1, HIDDEN)),)},
    "an empty condition": {"parts": (_condition([], (0, HIDDEN)),)},
    "a condition too long": {"parts": (_condition([1] * 64, (64, HIDDEN)),)},
    "rows that are no numbers": {"parts": (Condition((1, 2), tensor(_INFINITE)),)},
    "integer rows": {
        "parts": (Condition((1,), Tensor(ElementType.INT64, (1, HIDDEN), bytes(8 * HIDDEN))),)
    },
    "the end code in a prompt": {"parts": (Ids((CODEC_EOS,)), _condition([1], (1, HIDDEN)))},
    "no condition": {"parts": (Ids((1, 2)),)},
    "nothing": {"parts": ()},
    "a prompt beyond the length": {"parts": (Ids((1,) * 500), _condition([1], (1, HIDDEN)))},
    "a wrong position": {"position": 1},
    "rules that are no message": {"rules": b"\xc1"},
    "a recent code that is none": {
        "rules": msgspec.msgpack.encode(
            {"kind": "mid", "recent_codes": [CODEC_EOS], "sampling": {}, "seed": "x"}
        )
    },
}


async def test_hostile_feeds_are_refused_and_nobody_notices(stage: Stage) -> None:
    turn = Turn(stage, "victim", TALKER_SAMPLING)
    await turn.say(UnitKind.START, Text.random(900))
    good = turn.request([Text.random(901).part()], turn.rules(UnitKind.MID))
    for what, changes in HOSTILE.items():
        with pytest.raises(StageError) as caught:
            await stage.talker.feed(msgspec.structs.replace(good, **changes))
        assert caught.value.fault is StageFault.REFUSED, what
    with pytest.raises(StageError) as caught:
        await stage.talker.feed(msgspec.structs.replace(good, stream="nobody"))
    assert caught.value.fault is StageFault.UNKNOWN_STREAM
    # The very same stream goes on with the reference's codes.
    await turn.say(UnitKind.MID, Text.random(902))


async def test_a_request_for_another_stage_is_refused(stage: Stage) -> None:
    with pytest.raises(StageError, match="not for the talker"):
        await stage.link.call(ThinkerClose("s"), Done, 60.0)


async def test_closing_under_way_leaves_no_seat(stage: Stage) -> None:
    """A thousand times, on all seats at once: a unit is cut when the stage has only just been sent
    it, when the stage has its stream, and after so many more of the stage's answers. What a stream
    left behind would be missing long before the last: there are a few hundred blocks."""
    ends = ENDINGS // SEATS
    assert (await stage.talker.health()).limits["blocks"] < ENDINGS // 2
    faults = await asyncio.gather(*(cut(stage, f"cut-{seat}", ends) for seat in range(SEATS)))
    assert {fault for each in faults for fault in each} == {StageFault.UNKNOWN_STREAM}
    assert (await stage.talker.health()).streams == ()
    turns = [Turn(stage, f"after-{i}") for i in range(SEATS)]
    await asyncio.gather(*(t.say(UnitKind.START, Text.random(i)) for i, t in enumerate(turns)))


async def cut(stage: Stage, name: str, times: int) -> set[StageFault]:
    """One seat's streams, one after the other; what their units were told."""
    faults: set[StageFault] = set()
    for number in range(times):
        turn = Turn(stage, f"{name}-{number}")
        request = turn.request([Text.random(number).part()], turn.rules(UnitKind.MID))
        feed = asyncio.create_task(stage.talker.feed(request))
        await asyncio.sleep(0)
        if number % 2:
            while turn.name not in (await stage.talker.health()).streams:
                assert not feed.done()
            for _ in range(number % 20):
                await stage.talker.health()
        await stage.talker.close(TalkerClose(turn.name))
        try:
            await feed
        except StageError as error:
            faults.add(error.fault)
        assert turn.name not in (await stage.talker.health()).streams
    return faults
