"""Code2Wav's verbs: open, feed, close, health, for many sessions.

Admission (epochs, sequence numbers) is decided at once, in order of arrival, by the pure
`model.minicpmo45.consumer`; the sound comes later from the worker. A violation is one session's
matter: its stream is quarantined until an epoch is opened again, all others never notice
(contract section E, "Design it out").
"""

import asyncio
from dataclasses import dataclass

import msgspec

from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.model.minicpmo45 import consumer
from duplex_sidecar.stages.code2wav.config import (
    LOOK_AHEAD_CODES,
    MAX_CHUNK_CODES,
    MIN_CHUNK_CODES,
    Code2WavSettings,
)
from duplex_sidecar.stages.code2wav.hift import SAMPLE_RATE_HZ
from duplex_sidecar.stages.code2wav.stream import Chunk
from duplex_sidecar.stages.code2wav.worker import Dropped, QueueFull, Sound, Stream, Worker
from duplex_sidecar.stages.envelope import (
    Done,
    Health,
    HealthReport,
    Request,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)
from duplex_sidecar.stages.errors import StageError, StageFault

STAGE = "code2wav"
CHUNK_BELOW_LOOKAHEAD_WINDOW = "chunk_below_lookahead_window"
"""Contract section E: a chunk that is not the last has too few codes to sound."""
MAX_NAME_CHARACTERS = 256
STALLED_S = 30.0
"""A batch takes tens of milliseconds; one that takes this long will not end."""
_WATCH_S = 0.5


@dataclass(slots=True)
class _Session:
    """voice: bound until the session is closed. stream: of the newest epoch.
    quarantined: why the stream takes nothing until an epoch is opened."""

    voice: str
    admission: consumer.StreamState
    stream: Stream
    quarantined: str | None = None


class Code2WavService:
    """Serves `StageService`. Use from one event loop."""

    def __init__(self, worker: Worker, settings: Code2WavSettings, codebook_size: int) -> None:
        self._worker = worker
        self._settings = settings
        self._codebook_size = codebook_size
        self._sessions: dict[str, _Session] = {}

    async def handle(self, request: Request) -> msgspec.Struct:
        match request:
            case WaveFeed():
                return await self._feed(request)
            case WaveOpen():
                await self._open(request)
                return Done()
            case WaveClose():
                self._close(request)
                return Done()
            case Health():
                return self._health()
            case _:
                raise _refused(f"no request of this stage: {type(request).__name__}")

    async def failed(self) -> str:
        while True:
            if self._worker.lost_reason is not None:
                return self._worker.lost_reason
            if self._worker.busy_s > STALLED_S:
                return f"a batch has been computing for {self._worker.busy_s:.0f} s"
            await asyncio.sleep(_WATCH_S)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)

    async def _open(self, request: WaveOpen) -> None:
        session = self._sessions.get(request.session)
        if session is None:
            self._check_room(request)
            before = consumer.INITIAL_STREAM_STATE
        elif session.voice != request.voice:
            raise _refused(f"the session speaks with voice {session.voice!r}")
        else:
            before = session.admission
        refusal, after = consumer.open_epoch(before, request.epoch, request.voice)
        if refusal is not None:
            # The stream itself is untouched: a late copy of an old `open` does no harm.
            raise _out_of_order(refusal)
        if session is not None:
            session.stream.dropped = consumer.Refusal.STALE_CACHE_EPOCH
        stream = Stream(request.voice)
        opened = _Session(request.voice, after, stream)
        self._sessions[request.session] = opened
        try:
            await self._worker.prepare(stream)
        except Dropped as error:
            raise _out_of_order(str(error)) from None
        except Exception as error:
            if self._sessions.get(request.session) is opened:
                del self._sessions[request.session]
            raise _fault_of(error, request.voice) from error

    def _check_room(self, request: WaveOpen) -> None:
        if len(request.session) > MAX_NAME_CHARACTERS:
            raise _refused(f"a session id has at most {MAX_NAME_CHARACTERS} characters")
        if len(self._sessions) >= self._settings.max_sessions:
            raise _refused(f"{self._settings.max_sessions} sessions are open, no room for another")

    async def _feed(self, request: WaveFeed) -> WaveSamples:
        session = self._sessions.get(request.session)
        if session is None:
            raise StageError(
                STAGE,
                StageFault.UNKNOWN_STREAM,
                f"{consumer.Refusal.MISSING_STATE_FOR_CHUNK}: no epoch was opened here",
            )
        self._check_values(request)
        self._admit(session, request)
        codes = request.codes[: request.code_count]
        if not codes and not request.last_chunk:
            return WaveSamples(request.session, request.epoch, request.sequence, b"", 0.0)
        sound = await self._compute(session, Chunk(codes, request.last_chunk, request.seed))
        return WaveSamples(
            request.session, request.epoch, request.sequence, sound.pcm_s16le, sound.engine_ms
        )

    def _check_values(self, request: WaveFeed) -> None:
        """What would fail inside the vocoder. Refused as if it had never arrived."""
        if len(request.codes) > MAX_CHUNK_CODES:
            raise _refused(f"{len(request.codes)} codes, at most {MAX_CHUNK_CODES}")
        if any(not 0 <= code < self._codebook_size for code in request.codes):
            raise _refused(f"a code is outside 0..{self._codebook_size - 1}")
        if len(request.seed) > MAX_NAME_CHARACTERS:
            raise _refused(f"a seed has at most {MAX_NAME_CHARACTERS} characters")

    def _admit(self, session: _Session, request: WaveFeed) -> None:
        """Take the chunk's place in its epoch. Raises StageError (out_of_order)."""
        newest = session.admission.epoch
        if newest is not None and request.epoch < newest:
            # That epoch is over; nothing of the present one is missing, so it goes on.
            raise _out_of_order(consumer.Refusal.STALE_CACHE_EPOCH)
        if session.quarantined is not None:
            raise _out_of_order(f"quarantined: {session.quarantined}")
        header = consumer.ChunkHeader(
            epoch=request.epoch,
            sequence=request.sequence,
            sent_codes=len(request.codes),
            code_count=request.code_count,
            last_chunk=request.last_chunk,
            # The sidecar sends a chunk at the end of a unit and at no other time.
            unit_flush=True,
        )
        refusal, after = consumer.admit(session.admission, header)
        if refusal is None and not request.last_chunk:
            below = 0 < request.code_count < MIN_CHUNK_CODES
            refusal = CHUNK_BELOW_LOOKAHEAD_WINDOW if below else None
        if refusal is not None:
            self._quarantine(session, refusal)
            raise _out_of_order(refusal)
        session.admission = after

    async def _compute(self, session: _Session, chunk: Chunk) -> Sound:
        stream = session.stream
        try:
            return await self._worker.feed(stream, chunk)
        except Dropped as error:
            raise _out_of_order(str(error)) from None
        except Exception as error:
            # The chunk's place is taken but its sound is missing: the epoch cannot go on.
            if session.stream is stream:
                self._quarantine(session, "a chunk failed")
            raise _fault_of(error, stream.voice) from error

    def _quarantine(self, session: _Session, reason: str) -> None:
        session.quarantined = reason
        session.stream.dropped = f"quarantined: {reason}"

    def _close(self, request: WaveClose) -> None:
        session = self._sessions.pop(request.session, None)
        if session is not None:
            session.stream.dropped = "the session was closed"

    def _health(self) -> HealthReport:
        return HealthReport(
            stage=STAGE,
            limits={
                "sample_rate_hz": SAMPLE_RATE_HZ,
                "look_ahead_codes": LOOK_AHEAD_CODES,
                "max_chunk_codes": MAX_CHUNK_CODES,
                "codebook_size": self._codebook_size,
                "max_sessions": self._settings.max_sessions,
            },
            streams=tuple(self._sessions),
        )


def _refused(reason: str) -> StageError:
    return StageError(STAGE, StageFault.REFUSED, reason)


def _out_of_order(reason: str) -> StageError:
    return StageError(STAGE, StageFault.OUT_OF_ORDER, reason)


def _fault_of(error: Exception, voice: str) -> StageError:
    """What the worker raised, as the session is to see it."""
    if isinstance(error, QueueFull):
        return _refused("too many chunks wait")
    if isinstance(error, CheckpointError):
        return _refused(f"voice {voice!r} cannot be used: {error.fault}")
    return StageError(STAGE, StageFault.INTERNAL, f"{type(error).__name__}: {error}")
