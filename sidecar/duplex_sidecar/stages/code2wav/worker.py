"""The one thread that computes: chunks that wait together go through the vocoder together.

A chunk never waits for company. While a batch is computed others arrive; the oldest of them is
taken next, with every waiting chunk of the same shape (number of codes, `last`), at most one a
stream, so that a stream's chunks keep their order. Only this thread touches stream states.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.stream import Chunk, StreamState, Vocoder

_FULL_SCALE = 32_767

logger = logging.getLogger(__name__)


class Dropped(Exception):
    """A waiting chunk was dropped because its stream ended (`text` says how)."""


class QueueFull(Exception):
    """Too many chunks wait already."""


@dataclass(slots=True, eq=False)
class Stream:
    """One epoch of one session. `dropped` says why it takes nothing any more: set by the event loop
    when the epoch is over, by the worker when a chunk of it failed. `state` belongs to the worker:
    None before the first chunk and after the last."""

    voice: str
    state: StreamState | None = None
    dropped: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """s16le samples of one chunk, and the time from its arrival to them."""

    pcm_s16le: bytes
    engine_ms: float


@dataclass(slots=True, eq=False)
class _Job:
    """`chunk` None: only make sure that the stream's voice is loaded."""

    stream: Stream
    chunk: Chunk | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Sound]
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def shape(self) -> tuple[int, bool] | None:
        """What the chunks of a batch have in common; None computes alone."""
        if self.chunk is None or not self.chunk.codes:
            return None
        return len(self.chunk.codes), self.chunk.last

    def resolve(self, result: Sound | BaseException) -> None:
        def deliver() -> None:
            if self.future.done():
                return
            if isinstance(result, BaseException):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        self.loop.call_soon_threadsafe(deliver)


class Worker:
    """Owns a vocoder and the start states of voices. lost_reason: set when the device is lost."""

    def __init__(
        self,
        vocoder: Vocoder,
        load_voice: Callable[[str], Voice],
        *,
        max_batch: int,
        max_queue: int,
        max_voices: int,
        starts: Mapping[str, StreamState],
    ) -> None:
        """`load_voice` runs in the worker's thread; what it raises goes to who asked. `starts`:
        start states of voices that are known already."""
        self._vocoder = vocoder
        self._load_voice = load_voice
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_voices = max_voices
        self._starts: OrderedDict[str, StreamState] = OrderedDict(starts)
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._busy_since_s: float | None = None
        self.lost_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name="code2wav", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Drop what waits and end the thread (it finishes the batch under way)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)

    @property
    def busy_s(self) -> float:
        """How long the batch under way has been computing; 0 when idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def prepare(self, stream: Stream) -> asyncio.Future[Sound]:
        """Load the stream's voice if need be; resolves with an empty sound."""
        return self._submit(stream, None)

    def feed(self, stream: Stream, chunk: Chunk) -> asyncio.Future[Sound]:
        """Queue a chunk. Raises QueueFull; the future fails with Dropped, or as the vocoder."""
        return self._submit(stream, chunk)

    def _submit(self, stream: Stream, chunk: Chunk | None) -> asyncio.Future[Sound]:
        loop = asyncio.get_running_loop()
        job = _Job(stream, chunk, loop, loop.create_future())
        with self._changed:
            if self._closed or len(self._waiting) >= self._max_queue:
                raise QueueFull
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    waiting, self._waiting = list(self._waiting), deque()
                    break
                jobs = self._take()
            self._busy_since_s = time.monotonic()
            self._serve(jobs)
            self._busy_since_s = None
        for job in waiting:
            job.resolve(Dropped("the stage is closing"))

    def _take(self) -> list[_Job]:
        """The oldest job and those that may be computed with it, removed from the queue."""
        shape = self._waiting[0].shape
        taken: list[_Job] = []
        left: deque[_Job] = deque()
        seen: set[int] = set()
        for job in self._waiting:
            joins = shape is not None and job.shape == shape and len(taken) < self._max_batch
            if (joins or not taken) and id(job.stream) not in seen:
                taken.append(job)
            else:
                left.append(job)
            seen.add(id(job.stream))
        self._waiting = left
        return taken

    def _serve(self, jobs: list[_Job]) -> None:
        live: list[_Job] = []
        for job in jobs:
            if job.stream.dropped is None:
                live.append(job)
            else:
                job.resolve(Dropped(job.stream.dropped))
        if not live:
            return
        try:
            self._compute(live)
        except Exception as error:
            self._after_failure(live, error)

    def _after_failure(self, jobs: list[_Job], error: Exception) -> None:
        """No stream has changed. One chunk alone is to blame; of several, find out which."""
        if isinstance(error, torch.AcceleratorError):
            self.lost_reason = f"{type(error).__name__}: {error}"
        if len(jobs) == 1 or self.lost_reason is not None:
            for job in jobs:
                # Before anyone is told: chunks of the stream may be waiting already.
                job.stream.dropped = job.stream.dropped or "a chunk before it failed"
                job.resolve(error)
            return
        logger.warning("a batch of %d failed (%s), once more one by one", len(jobs), error)
        for job in jobs:
            self._serve([job])

    def _compute(self, jobs: list[_Job]) -> None:
        """All of `jobs` or, with an exception, none of them."""
        states = [job.stream.state or self._start_of(job.stream.voice) for job in jobs]
        chunks = [job.chunk for job in jobs if job.chunk is not None]
        if not chunks:
            results: list[tuple[bytes, StreamState | None]] = [(b"", None) for _ in jobs]
        elif not chunks[0].codes:
            results = [(_to_pcm(state.tail[0]), None) for state in states]
        else:
            results = [
                (_to_pcm(samples), None if chunk.last else state)
                for chunk, (samples, state) in zip(
                    chunks, self._vocoder.advance(states, chunks), strict=True
                )
            ]
        now_s = time.monotonic()
        for job, (pcm, state) in zip(jobs, results, strict=True):
            job.stream.state = state
            job.resolve(Sound(pcm, (now_s - job.arrived_s) * 1_000))

    def _start_of(self, voice: str) -> StreamState:
        """The shared start state of a voice; the least recently used one makes room."""
        state = self._starts.get(voice)
        if state is None:
            state = self._vocoder.start(self._load_voice(voice))
            self._starts[voice] = state
            while len(self._starts) > self._max_voices:
                self._starts.popitem(last=False)
        self._starts.move_to_end(voice)
        return state


def _to_pcm(samples: Tensor) -> bytes:
    """Samples [n] in -1..1 as s16le. Raises ValueError when one is not finite."""
    if not bool(samples.isfinite().all()):
        raise ValueError("the vocoder made samples that are not finite")
    return (samples * _FULL_SCALE).round().to(torch.int16).cpu().numpy().tobytes()
