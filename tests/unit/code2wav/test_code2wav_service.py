"""Admission of Code2Wav: what a session may send, what each violation is called, and that it stays
that session's matter."""

import asyncio
from typing import cast

import pytest

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.stages.code2wav.config import Code2WavSettings
from duplex_sidecar.stages.code2wav.service import Code2WavService
from duplex_sidecar.stages.code2wav.stream import Chunk
from duplex_sidecar.stages.code2wav.worker import Dropped, Sound, Stream, Worker
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import (
    Done,
    EncoderClose,
    Health,
    HealthReport,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit


class InstantWorker:
    """Stands in for the worker: the n-th chunk of a stream sounds as n. Chunks whose seed is in
    `failing` fail; with `held` set, chunks wait until the test lets them go."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.failing: set[str] = set()
        self.unknown_voices: set[str] = set()
        self.held: list[asyncio.Future[Sound]] | None = None
        self.arrived = asyncio.Event()
        self.chunks: list[Chunk] = []
        self.lost_reason: str | None = None
        self.busy_s = 0.0
        self.closed = False

    def prepare(self, stream: Stream) -> asyncio.Future[Sound]:
        future: asyncio.Future[Sound] = asyncio.get_running_loop().create_future()
        if stream.voice in self.unknown_voices:
            error = CheckpointError(CheckpointFault.MISSING, "folder", "no such voice")
            future.set_exception(error)
        else:
            future.set_result(Sound(b"", 0.0))
        return future

    def feed(self, stream: Stream, chunk: Chunk) -> asyncio.Future[Sound]:
        future: asyncio.Future[Sound] = asyncio.get_running_loop().create_future()
        self.chunks.append(chunk)
        self.arrived.set()
        if stream.dropped is not None:
            future.set_exception(Dropped(stream.dropped))
        elif chunk.seed in self.failing:
            future.set_exception(RuntimeError("it broke"))
        elif self.held is not None:
            self.held.append(future)
        else:
            number = self.counts.get(id(stream), 0)
            self.counts[id(stream)] = number + 1
            future.set_result(Sound(bytes([number, 0]), 1.0))
        return future

    def close(self) -> None:
        self.closed = True


class Stage:
    """A service and short names for its verbs."""

    def __init__(self, max_sessions: int = 4) -> None:
        self.worker = InstantWorker()
        settings = Code2WavSettings(
            checkpoint="/checkpoint", device=Device.CPU, max_sessions=max_sessions
        )
        self.service = Code2WavService(cast(Worker, self.worker), settings, codebook_size=64)

    async def open(self, epoch: int, session: str = "s", voice: str = "v") -> None:
        assert await self.service.handle(WaveOpen(session, epoch, voice)) == Done()

    async def feed(
        self,
        epoch: int,
        sequence: int,
        *,
        session: str = "s",
        codes: tuple[int, ...] = (1,) * 28,
        count: int | None = None,
        last: bool = False,
        seed: str = "turn",
    ) -> bytes:
        answer = await self.service.handle(
            WaveFeed(
                session=session,
                epoch=epoch,
                sequence=sequence,
                turn=0,
                unit=0,
                codes=codes,
                code_count=len(codes) if count is None else count,
                last_chunk=last,
                seed=seed,
            )
        )
        assert isinstance(answer, WaveSamples)
        assert (answer.session, answer.epoch, answer.sequence) == (session, epoch, sequence)
        return answer.pcm_s16le

    async def refused(self, call: object) -> tuple[StageFault, str]:
        with pytest.raises(StageError) as caught:
            await call  # type: ignore[misc]
        assert caught.value.stage == "code2wav"
        return caught.value.fault, caught.value.reason


async def test_an_epoch_takes_its_chunks_in_order() -> None:
    stage = Stage()
    await stage.open(0)
    assert [await stage.feed(0, n) for n in range(3)] == [b"\x00\x00", b"\x01\x00", b"\x02\x00"]
    assert await stage.feed(0, 3, last=True) == b"\x03\x00"
    await stage.open(1)
    assert await stage.feed(1, 0) == b"\x00\x00"


async def test_the_authoritative_count_cuts_the_codes() -> None:
    stage = Stage()
    await stage.open(0)
    await stage.feed(0, 0, codes=tuple(range(28)), count=20)
    assert stage.worker.chunks[-1].codes == tuple(range(20))


async def test_a_sequence_number_without_sound() -> None:
    stage = Stage()
    await stage.open(0)
    assert await stage.feed(0, 0, codes=(0,), count=0) == b""
    assert await stage.feed(0, 1) == b"\x00\x00"
    assert len(stage.worker.chunks) == 1
    await stage.feed(0, 2, codes=(), last=True)
    assert stage.worker.chunks[-1] == Chunk((), True, "turn")


@pytest.mark.parametrize(
    ("epoch", "sequence", "count", "reason"),
    [
        (1, 2, 28, "stale_or_reordered_chunk"),
        (1, 0, 28, "stale_or_reordered_chunk"),
        (2, 0, 28, "epoch_not_opened"),
        (2, 1, 28, "new_epoch_requires_first_chunk"),
        (1, -1, 28, "negative_stream_position"),
        (1, 1, -1, "negative_seq_token_count"),
        (1, 1, 29, "seq_token_count_mismatch"),
        (1, 1, 6, "chunk_below_lookahead_window"),
    ],
)
async def test_a_violation_quarantines_one_stream_until_the_next_epoch(
    epoch: int, sequence: int, count: int, reason: str
) -> None:
    stage = Stage()
    await stage.open(1)
    await stage.feed(1, 0)
    await stage.open(7, session="other")
    await stage.feed(7, 0, session="other")
    fault = await stage.refused(stage.feed(epoch, sequence, count=count))
    assert fault == (StageFault.OUT_OF_ORDER, reason)
    quarantined = (StageFault.OUT_OF_ORDER, f"quarantined: {reason}")
    assert await stage.refused(stage.feed(1, 1)) == quarantined
    already = (StageFault.OUT_OF_ORDER, "epoch_already_started")
    assert await stage.refused(stage.open(1)) == already
    assert await stage.feed(7, 1, session="other") == b"\x01\x00"
    await stage.open(2)
    assert await stage.feed(2, 0) == b"\x00\x00"


async def test_a_chunk_of_an_epoch_that_is_over_harms_nothing() -> None:
    """Barge-in: the old epoch's chunk is on its way when the next epoch is opened."""
    stage = Stage()
    await stage.open(1)
    await stage.feed(1, 0)
    await stage.open(2)
    await stage.feed(2, 0)
    stale = (StageFault.OUT_OF_ORDER, "stale_cache_epoch")
    assert await stage.refused(stage.feed(1, 1)) == stale
    assert await stage.refused(stage.open(1)) == stale
    assert await stage.feed(2, 1) == b"\x01\x00"


async def test_waiting_chunks_of_an_old_epoch_are_dropped() -> None:
    stage = Stage()
    await stage.open(1)
    stage.worker.held = []
    under_way = asyncio.create_task(stage.feed(1, 0))
    await stage.worker.arrived.wait()
    await stage.open(2)
    stage.worker.held[0].set_exception(Dropped("stale_cache_epoch"))
    assert await stage.refused(under_way) == (StageFault.OUT_OF_ORDER, "stale_cache_epoch")
    stage.worker.held = None
    assert await stage.feed(2, 0) == b"\x00\x00"


async def test_open_may_be_repeated_until_the_first_chunk() -> None:
    stage = Stage()
    for _ in range(3):
        await stage.open(4)
    assert await stage.feed(4, 0) == b"\x00\x00"
    already = (StageFault.OUT_OF_ORDER, "epoch_already_started")
    assert await stage.refused(stage.open(4)) == already
    assert await stage.feed(4, 1) == b"\x01\x00"


async def test_a_session_keeps_its_voice_until_it_is_closed() -> None:
    stage = Stage()
    await stage.open(0, voice="v")
    fault, reason = await stage.refused(stage.open(1, voice="w"))
    assert fault is StageFault.REFUSED
    assert "'v'" in reason
    await stage.service.handle(WaveClose("s"))
    await stage.open(0, voice="w")


async def test_an_unknown_voice_is_refused_and_leaves_nothing() -> None:
    stage = Stage()
    stage.worker.unknown_voices.add("nobody")
    fault, reason = await stage.refused(stage.open(0, voice="nobody"))
    assert fault is StageFault.REFUSED
    assert reason == "voice 'nobody' cannot be used: missing"
    await stage.open(0, voice="v")


async def test_a_restarted_stage_knows_no_stream() -> None:
    stage = Stage()
    fault, reason = await stage.refused(stage.feed(3, 5))
    assert fault is StageFault.UNKNOWN_STREAM
    assert "missing_state_for_chunk" in reason


async def test_wrong_values_are_refused_and_take_no_place() -> None:
    stage = Stage()
    await stage.open(0)
    for codes in ((64,) * 28, (-1,) * 28, (1,) * 113):
        fault, _ = await stage.refused(stage.feed(0, 0, codes=codes))
        assert fault is StageFault.REFUSED
    fault, _ = await stage.refused(stage.feed(0, 0, seed="x" * 257))
    assert fault is StageFault.REFUSED
    assert await stage.feed(0, 0) == b"\x00\x00"


async def test_a_failing_chunk_ends_its_epoch() -> None:
    stage = Stage()
    await stage.open(0)
    stage.worker.failing.add("bad")
    fault, reason = await stage.refused(stage.feed(0, 0, seed="bad"))
    assert (fault, reason) == (StageFault.INTERNAL, "RuntimeError: it broke")
    fault, reason = await stage.refused(stage.feed(0, 1))
    assert (fault, reason) == (StageFault.OUT_OF_ORDER, "quarantined: a chunk failed")
    await stage.open(1)
    assert await stage.feed(1, 0) == b"\x00\x00"


async def test_room_is_bounded_and_freed_by_close() -> None:
    stage = Stage(max_sessions=2)
    await stage.open(0, session="a")
    await stage.open(0, session="b")
    fault, _ = await stage.refused(stage.open(0, session="c"))
    assert fault is StageFault.REFUSED
    await stage.open(1, session="a")
    await stage.service.handle(WaveClose("a"))
    await stage.service.handle(WaveClose("never opened"))
    await stage.open(0, session="c")
    fault, _ = await stage.refused(stage.open(0, session="d" * 300))
    assert fault is StageFault.REFUSED


async def test_health_and_foreign_requests() -> None:
    stage = Stage()
    await stage.open(0, session="a")
    report = await stage.service.handle(Health())
    assert isinstance(report, HealthReport)
    assert report.streams == ("a",)
    assert report.limits["sample_rate_hz"] == 24_000
    fault, _ = await stage.refused(stage.service.handle(EncoderClose("a")))
    assert fault is StageFault.REFUSED
    await stage.service.close()
    assert stage.worker.closed


async def test_a_lost_device_or_a_stall_ends_the_stage() -> None:
    stage = Stage()
    stage.worker.busy_s = 31.0
    assert "31 s" in await stage.service.failed()
    stage.worker.lost_reason = "gone"
    assert await stage.service.failed() == "gone"
