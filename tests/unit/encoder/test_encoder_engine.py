"""Sessions of the encoder: one append after the other, and failures that leave no trace."""

import asyncio

import pytest
import torch

from duplex_sidecar.stages.encoder.audio import AudioStep, open_state
from duplex_sidecar.stages.encoder.engine import EncoderEngine
from duplex_sidecar.stages.envelope import EncoderFeed, EncoderOpen
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit

FIRST = bytes(33_120)
LATER = bytes(32_000)


@pytest.fixture
async def make_engine(short_encoders):
    engines = []

    def make(*, max_sessions=4, max_batch=1, audio=None):
        engine = EncoderEngine(
            audio or short_encoders.audio,
            short_encoders.vision,
            max_sessions=max_sessions,
            max_batch=max_batch,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()


def opened(session="s", start_samples=0):
    return EncoderOpen(session, start_samples)


def append(unit, pcm=LATER, *, session="s", frames=(), discard=False):
    return EncoderFeed(session, unit, pcm, tuple(frames), True, discard)


async def refused(engine, request, fault=StageFault.REFUSED) -> str:
    with pytest.raises(StageError) as caught:
        await engine.feed(request)
    assert caught.value.fault is fault
    return caught.value.reason


async def test_rows_of_an_append_are_those_of_its_chunks(make_engine, short_encoders, make_sound):
    engine = make_engine()
    engine.open(opened())
    pcm = make_sound(5, 21).tobytes()
    one = await engine.feed(append(1, pcm[:33_120]))
    more = await engine.feed(append(2, pcm[33_120:]))
    assert [len(one.audio), len(more.audio)] == [1, 4]
    assert not one.encoder_reset
    assert more.encoder_reset
    state = open_state(0)
    for row, start, end in zip(
        (*one.audio, *more.audio),
        (0, *range(33_120, len(pcm), 32_000)),
        (*range(33_120, len(pcm) + 1, 32_000),),
        strict=True,
    ):
        (step,) = short_encoders.audio.step([(state, pcm[start:end])])
        assert torch.equal(step.rows, row)
        state = step.state


async def test_an_undecodable_frame_leaves_no_trace(make_engine, make_sound):
    pcm = make_sound(3, 22).tobytes()
    engine = make_engine()
    engine.open(opened("s"))
    engine.open(opened("t"))
    for unit, (start, end) in enumerate(((0, 33_120), (33_120, 65_120), (65_120, 97_120)), 1):
        bad = append(unit, LATER if unit > 1 else FIRST, frames=[b"no image"])
        await refused(engine, bad, StageFault.UNDECODABLE)
        good = await engine.feed(append(unit, pcm[start:end]))
        never = await engine.feed(append(unit, pcm[start:end], session="t"))
        assert torch.equal(good.audio[0], never.audio[0])


async def test_wrong_counts_and_orders_are_refused_without_a_trace(make_engine):
    engine = make_engine()
    engine.open(opened())
    assert "whole" in await refused(engine, append(1, LATER))
    assert "empty" in await refused(engine, append(1, b""))
    assert "odd" in await refused(engine, append(1, b"\0" * 33_121))
    await engine.feed(append(1, FIRST))
    assert "whole" in await refused(engine, append(2, FIRST))
    assert "unit 1" in await refused(engine, append(1))
    assert "frames" in await refused(engine, append(2, frames=[b""], discard=True))
    assert "64 chunks" in await refused(engine, append(2, LATER * 65))
    await engine.feed(append(2))


async def test_an_unknown_or_closed_session_is_told_apart(make_engine):
    engine = make_engine()
    await refused(engine, append(1), StageFault.UNKNOWN_STREAM)
    engine.open(opened())
    engine.close("s")
    engine.close("s")
    await refused(engine, append(1, FIRST), StageFault.UNKNOWN_STREAM)
    assert engine.sessions == ()


async def test_room_is_bounded_and_a_session_may_be_opened_again(make_engine):
    engine = make_engine(max_sessions=2)
    engine.open(opened("a"))
    engine.open(opened("b"))
    with pytest.raises(StageError, match="2 sessions"):
        engine.open(opened("c"))
    await engine.feed(append(7, FIRST, session="a"))
    engine.open(opened("a"))
    await engine.feed(append(1, FIRST, session="a"))
    engine.close("b")
    engine.open(opened("c"))
    with pytest.raises(StageError, match="multiple"):
        engine.open(opened("c", 5))


async def test_a_restore_discards_and_then_gives_the_next_rows(make_engine, make_sound):
    engine = make_engine()
    pcm = make_sound(6, 23).tobytes()
    engine.open(opened("live"))
    engine.open(opened("restored"))
    first = await engine.feed(append(1, pcm[: 33_120 + 4 * 32_000], session="live"))
    assert first.reset_mark_samples == 0
    replay = append(1, pcm[: 33_120 + 4 * 32_000], session="restored", discard=True)
    discarded = await engine.feed(replay)
    assert discarded.audio == ()
    rest = pcm[33_120 + 4 * 32_000 :]
    live = await engine.feed(append(2, rest, session="live"))
    restored = await engine.feed(append(2, rest, session="restored"))
    assert (live.audio[0] - restored.audio[0]).abs().max() <= 1e-5


async def test_rows_before_the_reset_of_a_restore_are_refused(make_engine):
    engine = make_engine()
    engine.open(opened(start_samples=160_000))
    assert "replay" in await refused(engine, append(1, FIRST))
    await engine.feed(append(1, FIRST + LATER, discard=True))
    assert (await engine.feed(append(2))).encoder_reset


async def test_two_appends_of_a_session_at_once_are_refused(make_engine):
    engine = make_engine()
    engine.open(opened())
    first, second = await asyncio.gather(
        engine.feed(append(1, FIRST)), engine.feed(append(2)), return_exceptions=True
    )
    assert not isinstance(first, BaseException)
    assert isinstance(second, StageError)
    assert "under way" in second.reason
    await engine.feed(append(2))


async def test_a_session_that_was_closed_or_replaced_meanwhile_gets_no_rows(make_engine):
    engine = make_engine()
    engine.open(opened())
    task = asyncio.create_task(engine.feed(append(1, FIRST + LATER)))
    await asyncio.sleep(0)
    engine.open(opened())
    with pytest.raises(StageError) as caught:
        await task
    assert caught.value.fault is StageFault.UNKNOWN_STREAM
    await engine.feed(append(1, FIRST))


async def test_a_cancelled_append_leaves_no_trace(make_engine, make_sound):
    engine = make_engine()
    pcm = make_sound(2, 24).tobytes()
    engine.open(opened("s"))
    engine.open(opened("t"))
    for session in "st":
        await engine.feed(append(1, pcm[:33_120], session=session))
    task = asyncio.create_task(engine.feed(append(2, LATER * 3)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await engine.feed(append(2, pcm[33_120:]))
    never = await engine.feed(append(2, pcm[33_120:], session="t"))
    assert torch.equal(after.audio[0], never.audio[0])


async def test_sessions_take_turns_while_one_replays(make_engine):
    engine = make_engine()
    engine.open(opened("long"))
    engine.open(opened("live"))
    await engine.feed(append(1, FIRST, session="live"))
    replay = asyncio.create_task(
        engine.feed(append(1, FIRST + LATER * 60, session="long", discard=True))
    )
    await asyncio.sleep(0)
    await engine.feed(append(2, session="live"))
    assert not replay.done()
    await replay


class Moody:
    """An audio encoder that fails on chosen chunks, or altogether."""

    def __init__(self, encoder) -> None:
        self.encoder = encoder
        self.broken = False
        self.batches: list[int] = []

    def step(self, chunks) -> list[AudioStep]:
        self.batches.append(len(chunks))
        if self.broken or any(pcm.startswith(b"\1") for _, pcm in chunks):
            raise RuntimeError("no")
        return self.encoder.step(chunks)


async def test_one_bad_chunk_does_not_fail_the_batch(make_engine, short_encoders):
    moody = Moody(short_encoders.audio)
    engine = make_engine(audio=moody, max_batch=3)
    for session in "abc":
        engine.open(opened(session))
    answers = await asyncio.gather(
        engine.feed(append(1, FIRST, session="a")),
        engine.feed(append(1, b"\1" + FIRST[1:], session="b")),
        engine.feed(append(1, FIRST, session="c")),
        return_exceptions=True,
    )
    assert moody.batches[0] == 3
    assert isinstance(answers[1], RuntimeError)
    assert len(answers[0].audio) == len(answers[2].audio) == 1
    # It was that chunk's fault: silence still works, so the stage is not lost.
    lost = asyncio.ensure_future(engine.lost())
    await engine.feed(append(1, FIRST, session="b"))
    assert not lost.done()
    lost.cancel()


async def test_a_broken_device_loses_the_stage(make_engine, short_encoders):
    moody = Moody(short_encoders.audio)
    engine = make_engine(audio=moody)
    engine.open(opened())
    moody.broken = True
    with pytest.raises(RuntimeError):
        await engine.feed(append(1, FIRST))
    async with asyncio.timeout(60):
        assert "no" in await engine.lost()
