"""Events to one client: a replay and the live stream meet without a gap or a repeat."""

import asyncio

import pytest

from duplex_sidecar.ledger.journal import MAX_JOURNAL_BYTES
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import (
    Audio,
    Closed,
    Event,
    InputAccepted,
    Sequenced,
    Transcript,
    encode_sequenced,
)
from duplex_sidecar.session.outbox import MAX_WAITING_BYTES, MAX_WAITING_EVENTS, Outbox

pytestmark = pytest.mark.unit


def event(sequence: int) -> Sequenced:
    return Sequenced(sequence, Transcript(1, 1, str(sequence)))


async def test_live_events_wait_behind_the_replay_and_overlap_is_dropped() -> None:
    outbox = Outbox()
    outbox.put(event(3))
    outbox.put(event(4))
    outbox.release([event(2), event(3)], [InputAccepted(1, 0, 16_000)])
    outbox.put(event(5))
    taken = [await outbox.next() for _ in range(5)]
    assert taken == [InputAccepted(1, 0, 16_000), event(2), event(3), event(4), event(5)]


async def test_next_waits_for_an_event() -> None:
    outbox = Outbox()
    outbox.release([], [])
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(event(1))
    assert await waiting == event(1)


async def test_nothing_follows_closed() -> None:
    outbox = Outbox()
    outbox.release([], [])
    outbox.put(Closed(ErrorCode.SESSION_ENDED, ""))
    outbox.put(event(1))
    assert isinstance(await outbox.next(), Closed)
    assert await outbox.next() is None


async def test_a_client_that_does_not_read_is_cut_off_and_memory_is_let_go() -> None:
    outbox = Outbox()
    outbox.release([], [])
    for sequence in range(1, 100):
        outbox.put(Sequenced(sequence, Audio(1, 1, 1, 0, 0, bytes(MAX_WAITING_BYTES // 20))))
    with pytest.raises(ClientError) as error:
        await outbox.next()
    assert error.value.code is ErrorCode.SLOW_CONSUMER


async def test_a_client_that_never_took_its_replay_is_cut_off_too() -> None:
    outbox = Outbox()
    for sequence in range(1, 5000):
        outbox.put(event(sequence))
    with pytest.raises(ClientError):
        await outbox.next()


def audio(sequence: int, size: int) -> Sequenced:
    return Sequenced(sequence, Audio(1, 1, 1, 0, 0, bytes(size)))


async def all_of(outbox: Outbox) -> list[Event]:
    taken: list[Event] = []
    while (event := await outbox.next()) is not None:
        taken.append(event)
    return taken


async def test_a_whole_journal_can_be_replayed() -> None:
    """The fullest that a journal can be, in the smallest and in the largest events."""
    for size in (2_000, 400_000):
        count = MAX_JOURNAL_BYTES // len(encode_sequenced(audio(9_999, size)))
        outbox = Outbox()
        outbox.release([audio(number, size) for number in range(1, count + 1)], [])
        outbox.finish([])
        assert len(await all_of(outbox)) == count


async def test_what_waits_behind_a_replay_is_bounded_in_bytes_too() -> None:
    outbox = Outbox()
    for sequence in range(1, 20):
        outbox.put(audio(sequence, MAX_WAITING_BYTES // 10))
    outbox.release([], [])
    with pytest.raises(ClientError) as error:
        await outbox.next()
    assert error.value.code is ErrorCode.SLOW_CONSUMER


async def test_nothing_is_kept_once_it_has_failed() -> None:
    outbox = Outbox()
    outbox.put(event(1))
    outbox.fail(ErrorCode.SESSION_TAKEN_OVER)
    outbox.put(event(2))
    outbox.release([event(3)], [])
    outbox.finish([Closed(ErrorCode.SESSION_ENDED, "")])
    assert not outbox._events
    with pytest.raises(ClientError) as error:
        await outbox.next()
    assert error.value.code is ErrorCode.SESSION_TAKEN_OVER


async def test_the_end_does_not_wait_for_a_replay() -> None:
    outbox = Outbox()
    outbox.put(event(4))
    last = Closed(ErrorCode.LEASE_LOST, "")
    outbox.finish([last])
    outbox.put(event(5))
    assert await all_of(outbox) == [event(4), last]


async def test_reading_makes_room() -> None:
    outbox = Outbox()
    outbox.release([], [])
    for sequence in range(1, 3 * MAX_WAITING_EVENTS):
        outbox.put(audio(sequence, 16_000))
        assert await outbox.next() == audio(sequence, 16_000)
