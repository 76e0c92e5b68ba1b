"""The session's encoder: restored from recorded PCM wherever it was lost, with the same rows."""

import asyncio
from functools import cache
from typing import Literal

import numpy as np
import pytest
from fake_encoder import CHUNKS_PER_CACHE, MEL_SECONDS, FakeEncoder
from session_kit import RATE_HZ, second

from duplex_sidecar.framing.append import Append
from duplex_sidecar.framing.pcm import Samples
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.session.hearing import EncoderDriver, cut_at_mark, first_unit_needed
from duplex_sidecar.stages.envelope import EncoderOpen, EncoderRows
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit
SECONDS = 30


@cache
def appends(count: int = SECONDS) -> list[Append]:
    framer = UnitFramer(5)
    taken: list[Append] = []
    for number in range(1, count + 1):
        framer.push(_samples(number), RATE_HZ)
        append = framer.take()
        assert append is not None
        taken.append(append)
    return taken


def _samples(number: int) -> Samples:
    return np.frombuffer(second(number), "<i2").astype(np.float32) / 32768


class Recorded:
    """PCM of the units that were heard, as a ledger keeps it: nothing below what is needed."""

    def __init__(self) -> None:
        self.pcm: dict[int, bytes] = {}
        self.asked: list[tuple[int, int]] = []

    def hear(self, append: Append, rows: EncoderRows) -> None:
        self.pcm[append.seq] = append.pcm_s16le
        for seq in [s for s in self.pcm if s < first_unit_needed(rows.reset_mark_samples)]:
            del self.pcm[seq]

    async def __call__(self, first: int, last: int) -> list[bytes]:
        self.asked.append((first, last))
        return [self.pcm[seq] for seq in range(first, last + 1)]


async def whole_way() -> list[EncoderRows]:
    driver = EncoderDriver(FakeEncoder(), "s", Recorded(), asyncio.Lock())
    return [await driver.feed(append) for append in appends()]


async def test_a_loss_after_each_second_changes_no_row() -> None:
    calm = await whole_way()
    marks = [rows.reset_mark_samples for rows in calm]
    assert marks[0] == 0
    assert marks[-1] == RATE_HZ * (SECONDS // CHUNKS_PER_CACHE * CHUNKS_PER_CACHE - MEL_SECONDS)
    assert sum(rows.encoder_reset for rows in calm) == (SECONDS - 1) // CHUNKS_PER_CACHE
    for lost_after in range(SECONDS):
        encoder, recorded = FakeEncoder(), Recorded()
        driver = EncoderDriver(encoder, "s", recorded, asyncio.Lock())
        for append in appends():
            rows = await driver.feed(append)
            assert rows == calm[append.seq - 1]
            recorded.hear(append, rows)
            if append.seq == lost_after:
                encoder.kill()
                await encoder.health()
        most = CHUNKS_PER_CACHE + MEL_SECONDS
        assert all(samples <= 16_560 + 16_000 * most for samples in encoder.replayed_samples)
        assert len(encoder.replayed_samples) == (1 if lost_after else 0)


async def test_a_successor_restores_at_once_and_goes_on() -> None:
    calm = await whole_way()
    for through in (0, 1, 2, 7, 8, 13, 29):
        encoder, recorded = FakeEncoder(), Recorded()
        for append, rows in zip(appends()[:through], calm, strict=False):
            recorded.hear(append, rows)
        driver = EncoderDriver(encoder, "s", recorded, asyncio.Lock())
        mark_samples = calm[through - 1].reset_mark_samples if through else 0
        await driver.follow(through, mark_samples)
        await driver.follow(through, mark_samples)
        assert len(recorded.asked) == (1 if through else 0), "restored once"
        for append in appends()[through:]:
            assert await driver.feed(append) == calm[append.seq - 1]


async def test_a_restore_that_fails_is_done_again_by_the_next_feed() -> None:
    calm = await whole_way()
    encoder, recorded = FakeEncoder(), Recorded()
    for append, rows in zip(appends()[:9], calm, strict=False):
        recorded.hear(append, rows)
    driver = EncoderDriver(encoder, "s", recorded, asyncio.Lock())
    encoder.fail(9, StageFault.TIMEOUT, after=True)
    with pytest.raises(StageError):
        await driver.follow(9, calm[8].reset_mark_samples)
    assert await driver.feed(appends()[9]) == calm[9]


class Gate(asyncio.Lock):
    """Tells that somebody has asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        self.asked_for.set()
        return await super().acquire()


async def test_a_restore_waits_for_its_turn_with_the_ledger_read() -> None:
    """Whoever has the turn may end the encoder, and a restore that is in it would have lost a try.
    Nobody waits for another one's ledger."""
    calm = await whole_way()
    encoder, recorded, gate = FakeEncoder(), Recorded(), Gate()
    driver = EncoderDriver(encoder, "s", recorded, gate)
    for append in appends()[:9]:
        recorded.hear(append, await driver.feed(append))
    encoder.fail(10, StageFault.GONE)
    async with gate:
        gate.asked_for.clear()
        feeding = asyncio.create_task(driver.feed(appends()[9]))
        await gate.asked_for.wait()
        assert len(recorded.asked) == 1
        assert not encoder.sessions
    assert await feeding == calm[9]
    assert len(recorded.asked) == len(encoder.replayed_samples) == 1


async def test_what_cannot_be_decoded_changes_nothing() -> None:
    calm = await whole_way()
    encoder = FakeEncoder()
    driver = EncoderDriver(encoder, "s", Recorded(), asyncio.Lock())
    for append in appends():
        if append.seq in (1, 5):
            encoder.fail(append.seq, StageFault.UNDECODABLE)
            with pytest.raises(StageError):
                await driver.feed(append)
        assert await driver.feed(append) == calm[append.seq - 1]


async def test_three_losses_of_one_second_are_too_many() -> None:
    encoder = FakeEncoder()
    driver = EncoderDriver(encoder, "s", Recorded(), asyncio.Lock())
    encoder.fail(1, StageFault.GONE, times=3)
    with pytest.raises(StageError) as error:
        await driver.feed(appends(1)[0])
    assert error.value.fault is StageFault.GONE


async def test_a_driver_that_follows_unit_by_unit_hears_nothing_twice() -> None:
    """What another replica encodes is heard here as well, in steps of any size; the state that
    comes of it is adopted by the one who takes the session up."""
    encoder, recorded, calm = FakeEncoder(), Recorded(), await whole_way()
    recorded.pcm = {append.seq: append.pcm_s16le for append in appends()}
    behind = EncoderDriver(encoder, "s", recorded, asyncio.Lock())
    for through in (1, 2, 5, 12):
        await behind.follow(through, calm[through - 1].reset_mark_samples)
    assert recorded.asked == [(1, 1), (2, 2), (3, 5), (6, 12)]
    encoder.fail(14, StageFault.TIMEOUT, after=True)
    with pytest.raises(StageError):
        await behind.follow(14, calm[13].reset_mark_samples)
    await behind.follow(15, calm[14].reset_mark_samples)
    ahead = EncoderDriver(encoder, "s", recorded, asyncio.Lock())
    ahead.adopt(behind)
    asked = len(recorded.asked)
    await ahead.follow(15, calm[14].reset_mark_samples)
    for append in appends()[15:]:
        assert await ahead.feed(append) == calm[append.seq - 1]
    assert len(recorded.asked) == asked


async def test_a_driver_that_is_too_far_behind_begins_anew() -> None:
    recorded, calm = Recorded(), await whole_way()
    recorded.pcm = {append.seq: append.pcm_s16le for append in appends()}
    driver = EncoderDriver(FakeEncoder(), "s", recorded, asyncio.Lock())
    await driver.follow(2, calm[1].reset_mark_samples)
    recorded.pcm[3] = b""  # trimmed
    await driver.follow(16, calm[15].reset_mark_samples)
    for append in appends()[16:]:
        assert await driver.feed(append) == calm[append.seq - 1]


async def test_close_lets_go_whatever_was_restored() -> None:
    encoder, recorded = FakeEncoder(), Recorded()
    driver = EncoderDriver(encoder, "s", recorded, asyncio.Lock())
    await driver.close()
    assert encoder.calls == 0
    recorded.pcm[1] = b"odd"
    with pytest.raises(StageError):
        await driver.follow(1, 0)
    assert list(encoder.sessions) == ["s"]
    await driver.close()
    assert not encoder.sessions


async def test_close_asks_nothing_of_a_process_that_holds_nothing() -> None:
    encoder = FakeEncoder()
    driver = EncoderDriver(encoder, "s", Recorded(), asyncio.Lock())
    await driver.feed(appends(1)[0])
    encoder.kill()
    await encoder.health()
    await encoder.open(EncoderOpen("other", 0))
    calls = encoder.calls
    await driver.close()
    assert encoder.calls == calls, "a new process has nothing of ours"


async def test_a_restart_is_waited_for() -> None:
    encoder = FakeEncoder()
    driver = EncoderDriver(encoder, "s", Recorded(), asyncio.Lock())
    encoder.kill(health_calls=3)
    async with asyncio.timeout(60):
        rows = await driver.feed(appends(1)[0])
    assert rows.audio.shape == (10, 4)


@pytest.mark.parametrize("mark_seconds", range(12))
def test_a_restore_begins_at_the_mark(mark_seconds: int) -> None:
    """The encoder's input is 560 zeros and then all seconds."""
    units = appends(14)
    whole = b"".join(append.pcm_s16le for append in units)
    first = first_unit_needed(RATE_HZ * mark_seconds)
    assert first == max(1, mark_seconds)
    kept = b"".join(append.pcm_s16le for append in units[first - 1 :])
    assert cut_at_mark(kept, RATE_HZ * mark_seconds) == whole[2 * RATE_HZ * mark_seconds :]
