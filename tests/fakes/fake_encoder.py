"""The encoder: rows that are a hash of all PCM since its mel buffer's begin, with the real state
rules (16,560 samples first, a reset every few chunks, restore by replay)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fake_stage import HIDDEN, FakeStage, hash_of, rows, rows_in

from duplex_sidecar.framing.frames import read_frame
from duplex_sidecar.model.minicpmo45.constants import IMAGE_ROWS, UNIT_SAMPLES
from duplex_sidecar.model.minicpmo45.framing import block_kinds
from duplex_sidecar.stages.encoder.chunks import PcmFault, cut
from duplex_sidecar.stages.envelope import (
    ElementType,
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    EncoderRows,
    ReferenceRows,
    Tensor,
)
from duplex_sidecar.stages.errors import StageFault

CHUNKS_PER_CACHE = 7
MEL_SECONDS = 3
"""At a reset the mel buffer still holds so much; a restore replays from there."""
BROKEN_FRAME = b"broken"
"""A frame that ends in this has a header and nothing to decode."""


REFERENCE_ROWS = 7


def reference_of(voice: str, count: int = REFERENCE_ROWS) -> Tensor:
    """Rows of a voice's reference clip."""
    return rows(*(hash_of(voice.encode(), b"%d" % k) for k in range(count)))


@dataclass
class _State:
    """pcm: since mark_samples. dropped: number of the chunk at which the cache was dropped, None
    while a restore has not reached that."""

    start: int
    next_chunk: int
    mark_samples: int
    pcm: bytearray = field(default_factory=bytearray)
    dropped: int | None = None
    fed: bool = False
    unit: int | None = None


class FakeEncoder(FakeStage):
    """reference_rows: of voices whose clip has another length than REFERENCE_ROWS."""

    def __init__(
        self, *, max_sessions: int = 8, reference_rows: Mapping[str, int] | None = None
    ) -> None:
        super().__init__("encoder")
        self.sessions: dict[str, _State] = {}
        self.given: dict[tuple[str, int], list[list[bytes]]] = {}
        """(session, unit): rows in KV order, block by block, then chunk by chunk."""
        self.replayed_samples: list[int] = []
        self.references: list[str] = []
        """Voices whose clips were encoded."""
        self._max_sessions = max_sessions
        self._reference_rows = reference_rows or {}

    async def open(self, request: EncoderOpen) -> None:
        await self._enter()
        if request.session not in self.sessions and len(self.sessions) >= self._max_sessions:
            raise self.error(StageFault.REFUSED, "no room")
        chunk, rest = divmod(request.start_samples, UNIT_SAMPLES)
        if rest or chunk < 0:
            raise self.error(StageFault.REFUSED, "start_samples")
        self.sessions[request.session] = _State(request.start_samples, chunk, request.start_samples)

    async def feed(self, request: EncoderFeed) -> EncoderRows:
        await self._enter(request.unit)
        state = self.sessions.get(request.session)
        if state is None:
            raise self.error(StageFault.UNKNOWN_STREAM, "no such session")
        if state.unit is not None and request.unit <= state.unit:
            raise self.error(StageFault.REFUSED, f"unit {request.unit} after {state.unit}")
        chunks = cut(request.pcm_s16le, first=not state.fed)
        if isinstance(chunks, PcmFault) or (request.discard and request.frames):
            raise self.error(StageFault.REFUSED, str(chunks))
        if any(frame.endswith(BROKEN_FRAME) for frame in request.frames):
            raise self.error(StageFault.UNDECODABLE, "not an image")
        blocks = block_kinds(
            [read_frame(frame).size for frame in request.frames],
            high_resolution=request.high_resolution,
        )
        vision = tuple(
            rows(*(hash_of(b"".join(request.frames), b"%d %d" % (block, k)) for k in range(64)))
            for block in range(len(blocks))
        )
        assert all(block.shape[0] == IMAGE_ROWS for block in vision)
        audio: list[Tensor] = []
        reset = False
        for chunk in chunks:
            made, dropped = self._hear(state, chunk)
            reset = reset or dropped
            if made is None and not request.discard:
                raise self.error(StageFault.REFUSED, "rows before the replay reached the reset")
            if made is not None and not request.discard:
                audio.append(made)
        state.fed, state.unit = True, request.unit
        if request.discard:
            self.replayed_samples.append(len(request.pcm_s16le) // 2)
        else:
            self.given[request.session, request.unit] = [
                *(rows_in(block) for block in vision),
                *(rows_in(chunk) for chunk in audio),
            ]
        await self._leave(request.unit)
        data = b"".join(tensor.data for tensor in audio)
        return EncoderRows(
            unit=request.unit,
            audio=Tensor(ElementType.FLOAT32, (10 * len(audio), HIDDEN), data),
            vision=vision,
            encoder_reset=reset,
            reset_mark_samples=state.mark_samples,
        )

    async def reference(self, request: EncoderReference) -> ReferenceRows:
        await self._enter()
        self.references.append(request.voice)
        count = self._reference_rows.get(request.voice, REFERENCE_ROWS)
        return ReferenceRows(reference_of(request.voice, count))

    async def close(self, request: EncoderClose) -> None:
        await self._enter()
        self.sessions.pop(request.session, None)

    def _hear(self, state: _State, pcm: bytes) -> tuple[Tensor | None, bool]:
        number = state.next_chunk
        state.next_chunk += 1
        due = number % CHUNKS_PER_CACHE == 0
        if due:
            mark = max(state.start, UNIT_SAMPLES * (number - MEL_SECONDS))
            del state.pcm[: 2 * (mark - state.mark_samples)]
            state.mark_samples, state.dropped = mark, number
        state.pcm += pcm
        if state.dropped is None:
            return None, False
        heard = hash_of(bytes(state.pcm), b"%d %d" % (number, state.dropped))
        return rows(*(hash_of(heard, b"%d" % k) for k in range(10))), due and number > 0

    def _forget_all(self) -> None:
        self.sessions.clear()

    def drop_notes(self) -> None:
        for notes in (self.given, self.replayed_samples, self.references):
            notes.clear()

    def _held(self) -> Sequence[str]:
        return tuple(self.sessions)
