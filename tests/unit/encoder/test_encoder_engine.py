"""Sessions of the encoder: one append after the other, and failures that leave no trace."""

import asyncio
import io
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from duplex_sidecar.stages.encoder import engine as engine_module
from duplex_sidecar.stages.encoder.audio import AudioStep, open_state
from duplex_sidecar.stages.encoder.engine import EncoderEngine
from duplex_sidecar.stages.encoder.images import frame_blocks
from duplex_sidecar.stages.envelope import EncoderFeed, EncoderOpen
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit

FIRST = bytes(33_120)
LATER = bytes(32_000)


@pytest.fixture
async def make_engine(short_encoders):
    engines = []

    def make(*, max_sessions=4, max_batch=1, audio=None, vision=None):
        engine = EncoderEngine(
            audio or short_encoders.audio,
            vision or short_encoders.vision,
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


def picture(width: int, height: int, seed: int) -> bytes:
    colours = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG", compress_level=1)
    return file.getvalue()


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


class Counted:
    """An encoder of either kind that notes how many sessions each pass had. It sees nothing before
    `decoded` is set."""

    def __init__(self, encoder) -> None:
        self.encoder = encoder
        self.batches: list[int] = []
        self.decoded = threading.Event()
        self.decoded.set()

    def step(self, chunks) -> list[AudioStep]:
        self.batches.append(len(chunks))
        return self.encoder.step(chunks)

    def encode_appends(self, appends) -> list[list[torch.Tensor]]:
        self.batches.append(len(appends))
        assert self.decoded.wait(5)
        return self.encoder.encode_appends(appends)


def seen(unit: int, number: int) -> tuple[bytes, ...]:
    """Frames of a session's unit: none, one, or two that are cut into four blocks."""
    count = (unit + number) % 3
    shapes = [(900, 500), (60, 40)] if count == 2 else [(64, 64)] * count
    return tuple(picture(*shape, seed=10 * unit + number) for shape in shapes)


async def test_sessions_of_different_ages_with_frames_have_the_rows_of_single_runs(
    make_engine, short_encoders, make_sound, monkeypatch
):
    audio, vision = Counted(short_encoders.audio), Counted(short_encoders.vision)
    together = make_engine(max_batch=4, audio=audio, vision=vision)
    alone = make_engine(max_batch=1)
    ages = {"a": 0, "b": 1, "c": 2, "d": 5}
    requests = {}
    for number, (session, age) in enumerate(ages.items()):
        pcm = make_sound(age + 4, 30 + number).tobytes()
        cuts = [0, *range(33_120, len(pcm) + 1, 32_000)]
        chunks = [pcm[start:end] for start, end in pairwise(cuts)]
        requests[session] = [
            append(unit, chunk, session=session, frames=seen(unit, number))
            for unit, chunk in enumerate(chunks)
        ]
        for engine in (together, alone):
            engine.open(opened(session))
            for request in requests[session][:age]:
                await engine.feed(request)
    audio.batches.clear()
    vision.batches.clear()
    to_decode = 0

    def decoding(*frames, **options):
        nonlocal to_decode
        blocks = frame_blocks(*frames, **options)
        to_decode -= 1
        if not to_decode:
            vision.decoded.set()
        return blocks

    monkeypatch.setattr(engine_module, "frame_blocks", decoding)
    for step in range(4):
        asked = [requests[session][age + step] for session, age in ages.items()]
        to_decode = sum(bool(request.frames) for request in asked)
        vision.decoded.clear()
        answers = await asyncio.gather(*(together.feed(request) for request in asked))
        for request, answer in zip(asked, answers, strict=True):
            single = await alone.feed(request)
            assert answer.encoder_reset is single.encoder_reset
            assert len(answer.vision) == len(single.vision) == (0, 1, 4)[len(request.frames)]
            for mine, own in zip(
                (*answer.audio, *answer.vision), (*single.audio, *single.vision), strict=True
            ):
                assert mine.shape == own.shape
                assert (mine - own).abs().max() <= 1e-5
    # They did share, of either kind: a first pass of frames lasts until all are decoded.
    assert sum(audio.batches) == 16 > len(audio.batches)
    assert sum(vision.batches) == 11
    assert max(vision.batches) > 1


async def test_a_frame_that_cannot_be_decoded_touches_nobody_else(make_engine, short_encoders):
    vision = Counted(short_encoders.vision)
    engine = make_engine(max_batch=4, vision=vision)
    for session in "abc":
        engine.open(opened(session))
    frames = {"a": picture(64, 64, 1), "b": b"no image", "c": picture(64, 64, 3)}
    answers = await asyncio.gather(
        *(engine.feed(append(1, FIRST, session=each, frames=[frames[each]])) for each in "abc"),
        return_exceptions=True,
    )
    assert isinstance(answers[1], StageError)
    assert answers[1].fault is StageFault.UNDECODABLE
    alone = make_engine()
    for session, answer in (("a", answers[0]), ("c", answers[2])):
        alone.open(opened(session))
        single = await alone.feed(append(1, FIRST, session=session, frames=[frames[session]]))
        assert (answer.vision[0] - single.vision[0]).abs().max() <= 1e-5
        assert (answer.audio[0] - single.audio[0]).abs().max() <= 1e-5
    await engine.feed(append(1, FIRST, session="b"))


class Picky(Counted):
    """Cannot encode an append of two frames that were not cut."""

    def encode_appends(self, appends) -> list[list[torch.Tensor]]:
        rows = super().encode_appends(appends)
        if any(len(append) == 2 for append in appends):
            raise RuntimeError("no")
        return rows


async def test_a_frame_that_fails_on_the_device_fails_alone(make_engine, short_encoders):
    vision = Picky(short_encoders.vision)
    engine = make_engine(max_batch=4, vision=vision)
    for session in "abc":
        engine.open(opened(session))
    frames = [picture(64, 64, 1)]
    answers = await asyncio.gather(
        engine.feed(append(1, FIRST, session="a", frames=frames)),
        engine.feed(append(1, FIRST, session="b", frames=frames * 2)),
        engine.feed(append(1, FIRST, session="c", frames=frames)),
        return_exceptions=True,
    )
    assert isinstance(answers[1], RuntimeError)
    for answer in (answers[0], answers[2]):
        assert [tuple(block.shape) for block in answer.vision] == [(64, 256)]
        assert len(answer.audio) == 1
    lost = asyncio.ensure_future(engine.lost())
    await engine.feed(append(1, FIRST, session="b", frames=frames))
    assert not lost.done()
    lost.cancel()


async def test_frames_of_many_do_not_hold_up_a_session_without(make_engine):
    """Its second goes between two passes of frames."""
    engine = make_engine(max_sessions=9, max_batch=2)
    for number in range(9):
        engine.open(opened(f"s{number}"))
    watching = [
        asyncio.create_task(
            engine.feed(append(1, FIRST, session=f"s{number}", frames=[picture(64, 64, number)]))
        )
        for number in range(8)
    ]
    await asyncio.sleep(0)
    await engine.feed(append(1, FIRST, session="s8"))
    assert sum(task.done() for task in watching) < 4
    await asyncio.gather(*watching)


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
