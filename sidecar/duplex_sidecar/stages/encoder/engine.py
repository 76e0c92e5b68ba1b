"""The encoder's sessions: which there are, one append after the other, and what a failure leaves.

The event loop owns the sessions; one worker thread runs everything that computes. An append is cut
into chunks and each chunk waits in one queue for its pass, so sessions take turns second by second
even while one replays a minute; up to `max_batch` sessions share a pass. A session's state is
replaced only when its whole append has succeeded.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from duplex_sidecar.model.minicpmo45.constants import FIRST_CHUNK_SAMPLES
from duplex_sidecar.stages.encoder.audio import AudioEncoder, AudioState, AudioStep, open_state
from duplex_sidecar.stages.encoder.chunks import PcmFault, cut
from duplex_sidecar.stages.encoder.images import FrameError, frame_blocks
from duplex_sidecar.stages.encoder.vision import VisionEncoder
from duplex_sidecar.stages.envelope import EncoderFeed, EncoderOpen
from duplex_sidecar.stages.errors import StageError, StageFault

STAGE = "encoder"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EncodedAppend:
    """audio: [10, hidden] per chunk (none when discarding). vision: [64, hidden] per block."""

    audio: tuple[Tensor, ...]
    vision: tuple[Tensor, ...]
    encoder_reset: bool
    reset_mark_samples: int


@dataclass(slots=True)
class _Session:
    """fed: something was fed since it was opened. unit: of the newest append that succeeded."""

    state: AudioState
    fed: bool = False
    unit: int | None = None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    state: AudioState
    pcm: bytes
    answer: asyncio.Future[AudioStep]


class EncoderEngine:
    """Lives in one event loop. Every public coroutine raises StageError and nothing else, but for
    what a broken device raises."""

    def __init__(
        self, audio: AudioEncoder, vision: VisionEncoder, *, max_sessions: int, max_batch: int
    ) -> None:
        self._audio = audio
        self._vision = vision
        self._max_sessions = max_sessions
        self._max_batch = max_batch
        self._sessions: dict[str, _Session] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        # One chunk per busy session at a time: never longer than there are sessions.
        self._waiting: list[_Waiting] = []
        self._passes: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def open(self, request: EncoderOpen) -> None:
        """A fresh state, in place of the one there is. An append under way then fails."""
        if request.session not in self._sessions and len(self._sessions) >= self._max_sessions:
            raise _refused(f"{self._max_sessions} sessions are open")
        try:
            state = open_state(request.start_samples)
        except ValueError as error:
            raise _refused(str(error)) from None
        self._sessions[request.session] = _Session(state)

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    async def feed(self, request: EncoderFeed) -> EncodedAppend:
        """Encode one append: frames are decoded first, so that what cannot be decoded costs and
        changes nothing."""
        session = self._sessions.get(request.session)
        if session is None:
            raise StageError(STAGE, StageFault.UNKNOWN_STREAM, "no such session")
        chunks = _checked(session, request)
        session.busy = True
        try:
            vision = await self._see(request.frames, request.high_resolution)
            encoded, state = await self._hear(session.state, chunks, vision, request.discard)
            if self._sessions.get(request.session) is not session:
                raise StageError(STAGE, StageFault.UNKNOWN_STREAM, "closed during the append")
            session.state, session.fed, session.unit = state, True, request.unit
        finally:
            session.busy = False
        return encoded

    async def reference(self, samples: NDArray[np.float32]) -> Tensor:
        """Rows of a reference clip; see `AudioEncoder.reference`. No session is touched."""
        try:
            return await self._compute(lambda: self._audio.reference(samples))
        except ValueError as error:
            raise _refused(str(error)) from None

    async def lost(self) -> str:
        """Why nothing can be encoded any more; waits for ever while the device is well."""
        return await asyncio.shield(self._lost)

    async def stop(self) -> None:
        """Finish the pass under way and end the worker."""
        self._sessions.clear()
        if self._passes is not None:
            self._passes.cancel()
        await asyncio.to_thread(self._worker.shutdown, cancel_futures=True)

    async def _see(self, frames: Sequence[bytes], high_resolution: bool) -> tuple[Tensor, ...]:
        if not frames:
            return ()
        try:
            blocks = await self._compute(
                lambda: frame_blocks(frames, high_resolution=high_resolution)
            )
        except FrameError as error:
            raise StageError(STAGE, StageFault.UNDECODABLE, str(error)) from None
        return tuple(await self._compute(lambda: self._vision.encode(blocks)))

    async def _hear(
        self,
        state: AudioState,
        chunks: Sequence[bytes],
        vision: tuple[Tensor, ...],
        discard: bool,
    ) -> tuple[EncodedAppend, AudioState]:
        rows: list[Tensor] = []
        reset = False
        for chunk in chunks:
            step = await self._step(state, chunk)
            state, reset = step.state, reset or step.reset
            if not discard:
                if step.rows is None:
                    raise _refused("rows are asked for before the replay reached the last reset")
                rows.append(step.rows)
        return EncodedAppend(tuple(rows), vision, reset, state.reset_mark_samples), state

    async def _step(self, state: AudioState, chunk: bytes) -> AudioStep:
        answer: asyncio.Future[AudioStep] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(state, chunk, answer))
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_passes())
        return await answer

    async def _run_passes(self) -> None:
        """Runs while chunks wait. A pass that fails is repeated chunk by chunk, so that only the
        chunk at fault fails."""
        while self._waiting:
            batch = self._waiting[: self._max_batch]
            del self._waiting[: self._max_batch]
            try:
                await self._pass(batch)
            except Exception as error:
                if len(batch) == 1:
                    await self._fail(batch[0], error)
                    continue
                for waiting in batch:
                    try:
                        await self._pass([waiting])
                    except Exception as single_error:
                        await self._fail(waiting, single_error)

    async def _fail(self, waiting: _Waiting, error: Exception) -> None:
        """Fail one chunk. If silence cannot be encoded either, it was not the chunk's fault."""
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
        silence = [(open_state(0), bytes(2 * FIRST_CHUNK_SAMPLES))]
        try:
            await self._compute(lambda: self._audio.step(silence))
        except Exception as probe_error:
            if not self._lost.done():
                self._lost.set_result(f"{type(probe_error).__name__}: {probe_error}")

    async def _pass(self, batch: Sequence[_Waiting]) -> None:
        inputs = [(waiting.state, waiting.pcm) for waiting in batch]
        steps = await self._compute(lambda: self._audio.step(inputs))
        for waiting, step in zip(batch, steps, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(step)

    async def _compute(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _checked(session: _Session, request: EncoderFeed) -> tuple[bytes, ...]:
    """The chunks of a feed that may be tried. Raises StageError (refused)."""
    if session.busy:
        raise _refused("an append of this session is under way")
    if session.unit is not None and request.unit <= session.unit:
        raise _refused(f"unit {request.unit} after unit {session.unit}")
    if request.discard and request.frames:
        raise _refused("frames are not replayed")
    chunks = cut(request.pcm_s16le, first=not session.fed)
    if isinstance(chunks, PcmFault):
        raise _refused(chunks)
    return chunks


def _refused(reason: str) -> StageError:
    return StageError(STAGE, StageFault.REFUSED, reason)
