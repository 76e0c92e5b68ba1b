"""A session's stream in an engine: at most one lives, none is left behind, seats never run out."""

import asyncio

import pytest
from fake_stage import rows
from fake_thinker import FakeThinker
from session_kit import VOCABULARY, WORD_IDS

from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    UnitRules,
    encode_rules,
    initial_state,
)
from duplex_sidecar.session.streams import EngineStream, StreamFeed, ThinkerStream
from duplex_sidecar.stages.envelope import (
    Ids,
    Rows,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
    ThinkerPart,
)
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit
PARTS = (Ids((0, 1)), Rows(rows(b"a", b"b")))
RULES = encode_rules(
    UnitRules(
        policy=initial_state(seeded_text=False),
        is_speech=True,
        force_listen=False,
        max_tokens=None,
        sampling=GREEDY_SAMPLING,
        seed="s:1",
    )
)


def stream_of(stage: FakeThinker, spare: SpareSeats, name: str = "s/1") -> ThinkerStream:
    async def feed(f: StreamFeed[ThinkerPart]) -> ThinkerAnswer:
        return await stage.feed(
            ThinkerFeed("s", f.stream, f.unit, f.opens, f.position, f.parts, f.rules)
        )

    async def close(stream: str) -> None:
        await stage.close(ThinkerClose(stream))

    return EngineStream(stage, name, feed, close, spare)


@pytest.fixture
def stage() -> FakeThinker:
    return FakeThinker(VOCABULARY, WORD_IDS, seats=2)


@pytest.fixture
def spare() -> SpareSeats:
    return SpareSeats(1)


def held(answer: ThinkerAnswer) -> int:
    return 4 + len(answer.emitted_ids) - 1


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_rebuild_lets_the_old_stream_go_after_its_answer(
    stage: FakeThinker, spare: SpareSeats
) -> None:
    stream = stream_of(stage, spare)
    assert not stream.live
    first = await stream.rebuild(1, PARTS, RULES)
    assert stream.live
    await stream.extend(2, held(first), PARTS, RULES)
    pause = stage.pause(3, after=True)
    rebuilding = asyncio.create_task(stream.rebuild(3, PARTS, RULES))
    await pause.reached.wait()
    assert (len(stage.streams), spare.free) == (2, 0)
    pause.go.set()
    await rebuilding
    await settled()
    assert (list(stage.streams), spare.free) == (["s/1/2"], 1)
    await stream.close()
    assert not stage.streams
    assert not stream.live


async def test_without_a_spare_seat_the_old_stream_goes_first(stage: FakeThinker) -> None:
    spare = SpareSeats(0)
    stream = stream_of(stage, spare)
    await stream.rebuild(1, PARTS, RULES)
    pause = stage.pause(2)
    rebuilding = asyncio.create_task(stream.rebuild(2, PARTS, RULES))
    await pause.reached.wait()
    assert not stage.streams
    pause.go.set()
    await rebuilding
    assert list(stage.streams) == ["s/1/2"]
    assert spare.free == 0


async def test_rebuilds_of_many_sessions_never_lack_a_seat(spare: SpareSeats) -> None:
    stage = FakeThinker(VOCABULARY, WORD_IDS, seats=9)
    streams = [stream_of(stage, spare, f"s{number}/1") for number in range(8)]
    for unit in range(1, 30):
        await asyncio.gather(*(stream.rebuild(unit, PARTS, RULES) for stream in streams))
    await asyncio.gather(*(stream.close() for stream in streams))
    assert (len(stage.streams), spare.free) == (0, 1)


@pytest.mark.parametrize("fault", list(StageFault))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_failed_feed_forgets_the_stream_and_leaves_none(
    stage: FakeThinker, spare: SpareSeats, fault: StageFault, after: bool
) -> None:
    stream = stream_of(stage, spare)
    first = await stream.rebuild(1, PARTS, RULES)
    stage.fail(2, fault, after=after)
    with pytest.raises(StageError) as error:
        await stream.extend(2, held(first), PARTS, RULES)
    assert error.value.fault is fault
    assert not stream.live
    if fault is StageFault.GONE:
        await stage.health()
    stage.fail(3, fault, after=after)
    with pytest.raises(StageError):
        await stream.rebuild(3, PARTS, RULES)
    if fault is StageFault.GONE:
        await stage.health()
    await stream.rebuild(4, PARTS, RULES)
    await settled()
    assert len(stage.streams) == 1
    await stream.close()
    assert (len(stage.streams), spare.free) == (0, 1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_feed_that_is_given_up_leaves_no_stream(
    stage: FakeThinker, spare: SpareSeats, after: bool
) -> None:
    stream = stream_of(stage, spare)
    await stream.rebuild(1, PARTS, RULES)
    pause = stage.pause(2, after=after)
    rebuilding = asyncio.create_task(stream.rebuild(2, PARTS, RULES))
    await pause.reached.wait()
    rebuilding.cancel()
    await asyncio.gather(rebuilding, return_exceptions=True)
    assert not stream.live
    await stream.close()
    assert (len(stage.streams), spare.free) == (0, 1)


async def test_giving_up_while_the_old_stream_goes_leaves_none(stage: FakeThinker) -> None:
    stream = stream_of(stage, SpareSeats(0))
    await stream.rebuild(1, PARTS, RULES)
    rebuilding = asyncio.create_task(stream.rebuild(2, PARTS, RULES))
    await asyncio.sleep(0)
    rebuilding.cancel()
    await asyncio.gather(rebuilding, return_exceptions=True)
    await stream.close()
    assert not stage.streams


async def test_a_stream_of_an_older_process_is_gone(stage: FakeThinker, spare: SpareSeats) -> None:
    stream = stream_of(stage, spare)
    first = await stream.rebuild(1, PARTS, RULES)
    stage.kill()
    await stage.health()
    assert not stream.live
    with pytest.raises(StageError) as error:
        await stream.extend(2, held(first), PARTS, RULES)
    assert error.value.fault is StageFault.UNKNOWN_STREAM
    await stream.rebuild(2, PARTS, RULES)
    assert spare.free == 1, "nothing stood beside it"
