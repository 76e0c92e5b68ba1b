"""Events to one client: a replay and the live stream meet without a gap or a repeat."""

import asyncio

import pytest

from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed, InputAccepted, Sequenced, Transcript
from duplex_sidecar.session.outbox import MAX_WAITING_BYTES, Outbox

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
