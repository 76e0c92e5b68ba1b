"""Calls between the sidecar and a stage over a real Unix socket."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from duplex_sidecar.stages.envelope import (
    Done,
    Health,
    HealthReport,
    Request,
    ThinkerClose,
    WaveClose,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.link import StageLink
from duplex_sidecar.stages.rpc import MAX_FRAME_BYTES, serve_calls

pytestmark = pytest.mark.integration


class Stage:
    """Answers health at once, closes only when told to, and fails in both ways."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def handle(self, request: Request) -> msgspec.Struct:
        match request:
            case Health():
                return HealthReport("fake", {}, ("x" * 200_000,))
            case ThinkerClose(stream="refused"):
                raise StageError("fake", StageFault.REFUSED, "not that one")
            case ThinkerClose(stream="broken"):
                raise KeyError("a defect")
            case _:
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
                return Done()


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[tuple[Stage, StageLink]]:
    stage, link = Stage(), StageLink("fake")
    server = await serve_calls(path, "fake", stage.handle)
    await link.attach(path)
    try:
        yield stage, link
    finally:
        await link.detach()
        server.close()


async def fault_of(link: StageLink, request: Request, timeout_s: float = 60) -> StageError:
    with pytest.raises(StageError) as caught:
        await link.call(request, Done, timeout_s)
    return caught.value


async def test_calls_overtake_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (stage, link):
        slow = asyncio.create_task(link.call(WaveClose("slow"), Done, 60))
        reports = await asyncio.gather(*(link.call(Health(), HealthReport, 60) for _ in range(50)))
        assert all(len(report.streams[0]) == 200_000 for report in reports)
        assert not slow.done()
        stage.release.set()
        assert await slow == Done()


async def test_faults_concern_one_call(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (_, link):
        refused = await fault_of(link, ThinkerClose("refused"))
        assert (refused.fault, refused.reason) == (StageFault.REFUSED, "not that one")
        broken = await fault_of(link, ThinkerClose("broken"))
        assert broken.fault is StageFault.INTERNAL
        assert "KeyError" in broken.reason
        assert (await link.call(Health(), HealthReport, 60)).stage == "fake"


async def test_a_late_reply_hits_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (stage, link):
        late = await fault_of(link, WaveClose("late"), timeout_s=0.05)
        assert late.fault is StageFault.TIMEOUT
        stage.release.set()
        assert (await link.call(Health(), HealthReport, 60)).stage == "fake"


async def test_a_lost_connection_cancels_on_both_sides(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (stage, link):
        waiting = asyncio.create_task(link.call(WaveClose("w"), Done, 60))
        await link.call(Health(), HealthReport, 60)
        await link.detach()
        with pytest.raises(StageError) as caught:
            await waiting
        assert caught.value.fault is StageFault.GONE
        assert (await fault_of(link, Health())).fault is StageFault.GONE
        await asyncio.wait_for(stage.cancelled.wait(), 60)
        # The next process: one generation more.
        await link.attach(tmp_path / "s")
        assert link.generation == 2
        assert (await link.call(Health(), HealthReport, 60)).stage == "fake"


async def test_attaching_to_nothing_leaves_the_link_as_it_is(tmp_path: Path) -> None:
    link = StageLink("fake")
    with pytest.raises(OSError, match="No such file"):
        await link.attach(tmp_path / "nothing")
    assert link.generation == 0
    assert not link.connected


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + b"\xc0",
        struct.pack("<I", 100) + b"cut off",
    ],
    ids=["oversized", "no message", "wrong message", "short"],
)
async def test_a_broken_peer_loses_its_own_connection_only(tmp_path: Path, frame: bytes) -> None:
    async with serving(tmp_path / "s") as (_, link):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(frame)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert (await link.call(Health(), HealthReport, 60)).stage == "fake"


async def test_the_overhead_of_a_call_is_small(tmp_path: Path) -> None:
    """Well below the 2 ms that a unit may cost. Processor time of both sides, because cores are
    shared; nothing in a call waits for a clock."""
    async with serving(tmp_path / "s") as (stage, link):
        stage.release.set()
        times: list[float] = []
        for _ in range(200):
            start = time.process_time()
            await link.call(ThinkerClose("x"), Done, 60)
            times.append(time.process_time() - start)
        assert sorted(times)[100] < 0.002
