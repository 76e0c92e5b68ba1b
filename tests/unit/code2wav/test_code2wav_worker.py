"""The worker: who is computed with whom, in which order, and who is told about a failure."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
import torch

from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.stream import Chunk, StreamState, Vocoder
from duplex_sidecar.stages.code2wav.worker import Dropped, QueueFull, Stream, Worker

pytestmark = pytest.mark.unit


class CountingVocoder:
    """Stands in for the vocoder: a state is (voice, chunks so far), a sound their number. It waits
    at `gate` so that a test decides what piles up meanwhile."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[str]] = []
        self.started: list[str] = []

    def start(self, voice: object) -> StreamState:
        self.started.append(str(voice))
        return cast(StreamState, (str(voice), 0))

    def advance(
        self, states: Sequence[StreamState], chunks: Sequence[Chunk]
    ) -> list[tuple[torch.Tensor, StreamState]]:
        self.batches.append([chunk.seed for chunk in chunks])
        self.entered.set()
        assert self.gate.wait(5)
        if any(chunk.seed == "bad" for chunk in chunks):
            raise RuntimeError("bad chunk")
        pairs = [cast(tuple[str, int], state) for state in states]
        return [
            (torch.full((2,), (count + 1) / 32_767), cast(StreamState, (voice, count + 1)))
            for voice, count in pairs
        ]


@contextlib.asynccontextmanager
async def working(
    max_batch: int = 8, max_queue: int = 64, max_voices: int = 2
) -> AsyncIterator[tuple[Worker, CountingVocoder]]:
    vocoder = CountingVocoder()
    worker = Worker(
        cast(Vocoder, vocoder),
        lambda name: cast(Voice, name),
        max_batch=max_batch,
        max_queue=max_queue,
        max_voices=max_voices,
        starts={},
    )
    worker.start()
    try:
        yield worker, vocoder
    finally:
        vocoder.gate.set()
        worker.close()


def chunk(seed: str, codes: int = 28, last: bool = False) -> Chunk:
    return Chunk((1,) * codes, last, seed)


async def until_entered(vocoder: CountingVocoder) -> None:
    assert await asyncio.to_thread(vocoder.entered.wait, 60)


def until_closing(worker: Worker) -> None:
    with worker._changed:
        assert worker._changed.wait_for(lambda: worker._closed, 60)


async def test_alone_there_is_no_wait_and_together_one_batch() -> None:
    async with working() as (worker, vocoder):
        streams = [Stream("v") for _ in range(4)]
        first = worker.feed(streams[0], chunk("a"))
        await until_entered(vocoder)
        rest = [worker.feed(stream, chunk(f"b{i}")) for i, stream in enumerate(streams[1:])]
        vocoder.gate.set()
        await asyncio.gather(first, *rest)
        assert vocoder.batches == [["a"], ["b0", "b1", "b2"]]


async def test_only_equal_shapes_share_a_batch_and_streams_keep_their_order() -> None:
    async with working() as (worker, vocoder):
        one, two, three = Stream("v"), Stream("v"), Stream("v")
        blocker = worker.feed(Stream("v"), chunk("blocker"))
        await until_entered(vocoder)
        sounds = [
            worker.feed(one, chunk("1a")),
            worker.feed(one, chunk("1b")),
            worker.feed(two, chunk("2a", codes=20)),
            worker.feed(two, chunk("2b")),
            worker.feed(three, chunk("3a")),
            worker.feed(three, chunk("3b", last=True)),
        ]
        vocoder.gate.set()
        await blocker
        numbers = [(await sound).pcm_s16le[0] for sound in sounds]
        assert numbers == [1, 2, 1, 2, 1, 2]
        assert vocoder.batches[1:] == [["1a", "3a"], ["1b"], ["2a"], ["2b"], ["3b"]]
        assert three.state is None


async def test_a_batch_has_a_bound() -> None:
    async with working(max_batch=2) as (worker, vocoder):
        blocker = worker.feed(Stream("v"), chunk("blocker"))
        await until_entered(vocoder)
        sounds = [worker.feed(Stream("v"), chunk(str(i))) for i in range(5)]
        vocoder.gate.set()
        await asyncio.gather(blocker, *sounds)
        assert vocoder.batches[1:] == [["0", "1"], ["2", "3"], ["4"]]


async def test_one_bad_chunk_fails_its_stream_only() -> None:
    async with working() as (worker, vocoder):
        good, bad = Stream("v"), Stream("v")
        blocker = worker.feed(Stream("v"), chunk("blocker"))
        await until_entered(vocoder)
        fine = worker.feed(good, chunk("fine"))
        failing = worker.feed(bad, chunk("bad"))
        following = worker.feed(bad, chunk("next"))
        vocoder.gate.set()
        await blocker
        with pytest.raises(RuntimeError, match="bad chunk"):
            await failing
        with pytest.raises(Dropped, match="before it failed"):
            await following
        assert (await fine).pcm_s16le[0] == 1
        assert worker.lost_reason is None


async def test_dropped_streams_are_not_computed() -> None:
    async with working() as (worker, vocoder):
        blocker = worker.feed(Stream("v"), chunk("blocker"))
        await until_entered(vocoder)
        stream = Stream("v")
        waiting = worker.feed(stream, chunk("late"))
        stream.dropped = "the session was closed"
        vocoder.gate.set()
        await blocker
        with pytest.raises(Dropped, match="session was closed"):
            await waiting
        assert vocoder.batches == [["blocker"]]


async def test_queue_has_a_bound() -> None:
    async with working(max_queue=2) as (worker, vocoder):
        sounds = [worker.feed(Stream("v"), chunk("blocker"))]
        await until_entered(vocoder)
        sounds += [worker.feed(Stream("v"), chunk(str(i))) for i in range(2)]
        with pytest.raises(QueueFull):
            worker.feed(Stream("v"), chunk("too many"))
        vocoder.gate.set()
        await asyncio.gather(*sounds)


async def test_start_states_are_shared_and_bounded() -> None:
    async with working(max_voices=2) as (worker, vocoder):
        vocoder.gate.set()
        for voice in ("x", "y", "x", "z", "x", "y"):
            await worker.prepare(Stream(voice))
        assert vocoder.started == ["x", "y", "z", "y"]


async def test_closing_drops_what_waits() -> None:
    async with working() as (worker, vocoder):
        blocker = worker.feed(Stream("v"), chunk("blocker"))
        await until_entered(vocoder)
        waiting = worker.feed(Stream("v"), chunk("late"))
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asyncio.to_thread(until_closing, worker)
        vocoder.gate.set()
        await closing
        assert (await blocker).pcm_s16le[0] == 1
        with pytest.raises(Dropped):
            await waiting
        with pytest.raises(QueueFull):
            worker.feed(Stream("v"), chunk("after"))


async def test_samples_that_are_not_finite_are_an_error() -> None:
    async with working() as (worker, vocoder):
        vocoder.gate.set()
        stream = Stream("v", state=cast(StreamState, ("v", float("nan"))))
        with pytest.raises(ValueError, match="not finite"):
            await worker.feed(stream, chunk("nan"))


async def test_a_lost_device_is_told() -> None:
    async with working() as (worker, vocoder):
        vocoder.gate.set()

        def lose(*_: object) -> None:
            raise torch.AcceleratorError("device lost")

        vocoder.advance = lose  # pyright: ignore
        with pytest.raises(torch.AcceleratorError):
            await worker.feed(Stream("v"), chunk("x"))
        assert worker.lost_reason is not None
