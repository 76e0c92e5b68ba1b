"""Rebuilds of many sessions at the same moment never ask the engine for more seats than it has."""

import asyncio

import pytest

from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.session.streams import EngineStream, StreamFeed
from duplex_sidecar.stages.envelope import HealthReport
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit


class Engine:
    """Counts the streams that live; refuses one too many, as the real stage does."""

    generation = 1

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.live: set[str] = set()
        self.most = 0

    async def health(self) -> HealthReport:
        return HealthReport("engine", {}, tuple(self.live))

    async def feed(self, feed: StreamFeed[int]) -> str:
        if feed.opens:
            if len(self.live) >= self.seats:
                raise StageError("engine", StageFault.REFUSED, "no seat")
            self.live.add(feed.stream)
            self.most = max(self.most, len(self.live))
        await asyncio.sleep(0)
        return feed.stream

    async def close(self, stream: str) -> None:
        await asyncio.sleep(0)
        self.live.discard(stream)


@pytest.mark.parametrize("spare", [0, 1, 3, 8])
async def test_all_sessions_rebuild_at_once_within_the_seats(spare: int) -> None:
    sessions = 8
    engine, seats = Engine(sessions + spare), SpareSeats(spare)
    streams = [
        EngineStream(engine, f"s{number}", engine.feed, engine.close, seats)
        for number in range(sessions)
    ]
    for unit in range(1, 6):
        await asyncio.gather(*(stream.rebuild(unit, (1,), b"") for stream in streams))
    await asyncio.gather(*(stream.close() for stream in streams))
    assert engine.live == set()
    assert engine.most <= sessions + spare
    assert seats.free == spare


async def test_a_failed_rebuild_gives_its_seat_back() -> None:
    engine, seats = Engine(2), SpareSeats(1)
    stream = EngineStream(engine, "s", engine.feed, engine.close, seats)
    await stream.rebuild(1, (1,), b"")
    engine.seats = 0
    with pytest.raises(StageError):
        await stream.rebuild(2, (1,), b"")
    await stream.close()
    assert seats.free == 1
    assert engine.live == set()
