"""The encoder's sessions: which there are, one append after the other, and what a failure leaves.

The event loop owns the sessions; one worker thread runs everything that computes, another one
decodes frames. An append is cut into chunks and each chunk waits in one queue for its pass, so
sessions take turns second by second even while one replays a minute. The blocks of an append's
frames wait in a queue of their own. Up to `max_batch` sessions share a pass of either kind
(`passes.py`). A session's state is replaced only when its whole append has succeeded.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from duplex_sidecar.model.minicpmo45.constants import FIRST_CHUNK_SAMPLES
from duplex_sidecar.stages.encoder.audio import AudioEncoder, AudioState, AudioStep, open_state
from duplex_sidecar.stages.encoder.chunks import PcmFault, cut
from duplex_sidecar.stages.encoder.images import FrameError, Pixels, frame_blocks
from duplex_sidecar.stages.encoder.passes import Passes, Worker
from duplex_sidecar.stages.encoder.vision import VisionEncoder
from duplex_sidecar.stages.envelope import EncoderFeed, EncoderOpen
from duplex_sidecar.stages.errors import StageError, StageFault

STAGE = "encoder"


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


class EncoderEngine:
    """Lives in one event loop. Every public coroutine raises StageError and nothing else, but for
    what a broken device raises."""

    def __init__(
        self, audio: AudioEncoder, vision: VisionEncoder, *, max_sessions: int, max_batch: int
    ) -> None:
        self._audio = audio
        self._max_sessions = max_sessions
        self._sessions: dict[str, _Session] = {}
        self._worker = Worker("encoder")
        self._decoder = Worker("frames")
        self._hearing = Passes[tuple[AudioState, bytes], AudioStep](
            self._worker, audio.step, max_batch, self._probe
        )
        self._seeing = Passes[Sequence[Pixels], list[Tensor]](
            self._worker, vision.encode_appends, max_batch, self._probe
        )
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
            async with self._worker.turn:
                return await self._worker.compute(lambda: self._audio.reference(samples))
        except ValueError as error:
            raise _refused(str(error)) from None

    async def lost(self) -> str:
        """Why nothing can be encoded any more; waits for ever while the device is well."""
        return await asyncio.shield(self._lost)

    async def stop(self) -> None:
        """Finish the pass under way and end the threads."""
        self._sessions.clear()
        for passes in (self._hearing, self._seeing):
            passes.stop()
        for worker in (self._worker, self._decoder):
            await worker.stop()

    async def _see(self, frames: Sequence[bytes], high_resolution: bool) -> tuple[Tensor, ...]:
        if not frames:
            return ()
        try:
            async with self._decoder.turn:  # pictures are large: one append's at a time
                blocks = await self._decoder.compute(
                    lambda: frame_blocks(frames, high_resolution=high_resolution)
                )
        except FrameError as error:
            raise StageError(STAGE, StageFault.UNDECODABLE, str(error)) from None
        return tuple(await self._seeing.through(blocks))

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
            step = await self._hearing.through((state, chunk))
            state, reset = step.state, reset or step.reset
            if not discard:
                if step.rows is None:
                    raise _refused("rows are asked for before the replay reached the last reset")
                rows.append(step.rows)
        return EncodedAppend(tuple(rows), vision, reset, state.reset_mark_samples), state

    async def _probe(self) -> None:
        """Something failed alone. If silence cannot be encoded either, it was not its own fault."""
        silence = [(open_state(0), bytes(2 * FIRST_CHUNK_SAMPLES))]
        try:
            async with self._worker.turn:
                await self._worker.compute(lambda: self._audio.step(silence))
        except Exception as error:
            if not self._lost.done():
                self._lost.set_result(f"{type(error).__name__}: {error}")


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
