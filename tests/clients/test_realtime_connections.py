"""Clients that vanish, come back, take over, flood, or do not read: the session goes on, and who
comes back has every event once, byte for byte."""

import asyncio
import contextlib
import socket
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
from support.material import manifest, speech
from support.patience import PATIENCE_S
from support.realtime import (
    UNIT_SAMPLES,
    Gone,
    Heard,
    RealtimeClient,
    append_event,
    conversing,
    dialled,
    joined,
    new_session,
)

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar

pytestmark = pytest.mark.client


async def view(sidecar: LocalSidecar, session: str) -> dict[str, object]:
    return await asyncio.to_thread(sidecar.admin, "GET", f"/sessions/{session}")


async def eventually(
    condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = PATIENCE_S
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {timeout_s} s") from None


async def end(sidecar: LocalSidecar, session: str) -> None:
    await asyncio.to_thread(sidecar.admin, "DELETE", f"/sessions/{session}")


async def test_a_client_that_vanishes_finds_everything_when_it_comes_back(
    sidecar: LocalSidecar,
) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    heard = Heard()
    async with joined(sidecar, session, token, heard=heard) as client:
        await client.speak(speech(24))
        await client.until_unit(3)
        client.socket.transport.abort()

    async def went_on_alone() -> bool:
        state = await view(sidecar, session)
        return state["units"] == 24 and state["attached"] is False

    await eventually(went_on_alone, "the session goes on without its client")
    before = len(heard.units)
    assert before < 24
    async with joined(sidecar, session, token, heard=heard, resume=True) as client:
        assert client.sent_samples == 24 * UNIT_SAMPLES
        await client.until_unit(24)
        await client.speak(speech(1))
        await client.until_unit(25)
        heard.assert_whole()
    # From the very beginning once more: what is known comes again as the same bytes.
    again = Heard(sequenced=dict(heard.sequenced))
    async with dialled(sidecar, session, token, heard=again, resume=True) as client:
        await client.send({"type": "session.resume", "last_received_server_event_seq": 0})
        await client.until("duplex.unit", lambda unit: unit["unit"] == 25)
        replayed = [event for event in again.events if "server_event_seq" in event]
        assert [event["server_event_seq"] for event in replayed] == sorted(heard.sequenced)
        assert again.sequenced == heard.sequenced
        await client.close_session()


async def test_a_lost_connection_loses_no_half_unit(sidecar: LocalSidecar) -> None:
    """Samples that were received and are no unit yet are still there for the next connection. They
    are not durable, so it is told to keep them; sent again they count once."""
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    async with joined(sidecar, session, token) as client:
        await client.speak(speech(1.5))
        await client.until_unit(1)
        await client.send({"type": "session.heartbeat"})
        await client.until("session.heartbeat_ack")
    async with joined(sidecar, session, token, heard=client.heard, resume=True) as client:
        assert client.sent_samples == 16_000
        await client.speak(speech(1.5)[2 * 16_000 :])
        await client.speak(speech(0.5))
        assert (await client.until_unit(2))["unit"] == 2
        client.heard.assert_whole()
        await client.close_session()


async def test_who_does_not_come_back_in_time_finds_the_session_parked(
    sidecar: LocalSidecar,
) -> None:
    text = manifest(lifecycle={"disconnectGrace": "1s"})
    session, token = await asyncio.to_thread(new_session, sidecar, text)
    async with joined(sidecar, session, token) as client:
        await client.speak(speech(1))
        await client.until_unit(1)
        client.socket.transport.abort()

    async def gone() -> bool:
        try:
            await view(sidecar, session)
        except ApiError as error:
            return error.status == 404
        return False

    await eventually(gone, "the grace ends")
    async with joined(sidecar, session, token, resume=True) as again:
        await again.speak(speech(1, 1.0))
        assert (await again.until_unit(2))["rebuild_cause"] == "move"
        await again.close_session()


async def test_a_session_that_is_given_nothing_ends_after_its_idle_timeout(
    sidecar: LocalSidecar,
) -> None:
    text = manifest(lifecycle={"idleTimeout": "5s"})  # in which a client dials, however slowly
    session, token = await asyncio.to_thread(new_session, sidecar, text)
    async with joined(sidecar, session, token) as client:
        closed = await client.until("session.closed")
        assert closed["reason"] == "session_expired"
        assert "idleTimeout" in closed["message"]
        assert await client.until_closed() == (4002, "session_expired")
        assert [error["code"] for error in client.heard.errors] == ["session_expired"]


async def test_a_second_connection_takes_over(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    async with joined(sidecar, session, token) as first:
        await first.speak(speech(2))
        await first.until_unit(2)
        async with joined(sidecar, session, token, resume=True) as second:
            assert await first.until_closed() == (4001, "session_taken_over")
            assert first.heard.errors[-1]["code"] == "session_taken_over"
            await second.speak(speech(1))
            await second.until_unit(3)
            second.heard.assert_whole()
            assert first.heard.sequenced.items() <= second.heard.sequenced.items()
            await second.close_session()


async def test_of_many_connections_at_once_one_stays(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    many, came, everybody = 12, set[int](), asyncio.Event()

    async def try_it(number: int) -> int:
        """Whoever is not taken over when everybody was there speaks, and is done when its unit
        is."""
        async with dialled(sidecar, session, token) as client:
            try:
                try:
                    await client.until("session.created")
                finally:
                    came.add(number)
                    if len(came) == many:
                        everybody.set()
                await everybody.wait()
                await client.format()
                await client.append(bytes(2 * UNIT_SAMPLES))
                await client.until_unit(1)
            except Gone as gone:
                return gone.code
            return 0

    codes = await asyncio.gather(*(try_it(number) for number in range(many)))
    assert sorted(codes) == [0] + (many - 1) * [4001]
    await end(sidecar, session)


async def test_a_position_that_never_was_is_answered_with_the_one_that_is(
    sidecar: LocalSidecar,
) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    async with joined(sidecar, session, token) as client:
        await client.speak(speech(2))
        await client.until_unit(2)
        newest = client.heard.last_sequence
    async with dialled(sidecar, session, token, resume=True) as client:
        await client.send({"type": "session.resume", "last_received_server_event_seq": 999})
        facts = (await client.until("session.resync_required"))["duplex"]
        assert facts == {"requested": 999, "oldest": newest + 1, "ledger_rewound": False}
        await client.format()
        await client.append(speech(1))
        unit = await client.until("duplex.unit")
        assert (unit["unit"], unit["server_event_seq"] > newest) == (3, True)
        await client.close_session()


async def test_a_flood_is_refused_by_name_and_concerns_nobody_else(sidecar: LocalSidecar) -> None:
    """Telephone audio: each message holds six minutes of it."""
    server = sidecar.process
    memory = psutil.Process(server.pid).memory_info if server else None
    before = memory().rss if memory else 0
    flood = append_event(b"\xff" * 8_000 * 360)
    async with conversing(sidecar, manifest()) as other, conversing(sidecar, manifest()) as client:
        await client.format("audio/pcmu", 8_000)
        for _ in range(12):
            await client.send(flood)
        await other.speak(speech(4))
        unit = await other.until_unit(4)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["type"]) == ("input_overflow", "capacity_error")
        assert error["retryable"] is True
        await client.send({"type": "input_audio_buffer.clear"})
        await client.until("input_audio_buffer.cleared")
        done = len(client.heard.units)
        await client.append(b"\xff" * 8_000 * 2)
        await client.until_unit(done + 1)
        client.heard.assert_whole()
        other.heard.assert_whole()
        assert {error["code"] for error in client.heard.errors} == {"input_overflow"}
        assert other.heard.errors == []
        assert unit["unit"] == 4
        # Each of them, but that the machine itself may stand still in one.
        walls_ms = sorted(unit["wall_ms"] for unit in other.heard.units)
        assert statistics.median_high(walls_ms) < 3_000
    if memory:
        assert memory().rss - before < 400 * 1024 * 1024


def deaf(port: int) -> dict[str, Any]:
    """Options of a connection that takes next to nothing while its client does not read."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    return {"sock": connection, "max_queue": 1, "ping_interval": None, "close_timeout": 1}


async def fill_up(client: RealtimeClient) -> None:
    """Ask for more answers than the kernel, the server and the session's outbox hold."""
    for _ in range(60):
        for _ in range(100):
            await client.send({"type": "session.heartbeat", "event_id": "x" * 500})
        await asyncio.sleep(0.01)


async def test_who_does_not_read_is_cut_off_and_nobody_else(sidecar: LocalSidecar) -> None:
    """Nothing stays of one that never reads again; one that reads at last learns why,
    and resumes."""
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    never, never_token = await asyncio.to_thread(new_session, sidecar, manifest())
    port = sidecar.settings.port
    heard = Heard()

    async def cut_off() -> bool:
        return (await view(sidecar, session))["attached"] is False

    async def flood(client: RealtimeClient) -> None:
        with contextlib.suppress(Gone):  # cut off in the middle of it
            await fill_up(client)

    async def why_cut_off(client: RealtimeClient) -> tuple[int, str]:
        # The server keeps what it wrote for a few seconds only: read as soon as it gave up.
        await eventually(cut_off, "the client that does not read is cut off")
        client.socket.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 1_048_576
        )
        return await client.until_closed()

    async def talk_on(client: RealtimeClient) -> None:
        await client.speak(speech(10))
        await client.until_unit(10)
        client.heard.assert_whole()

    async def forgotten() -> bool:
        server = sidecar.process
        assert server is not None
        held = psutil.Process(server.pid).net_connections("tcp")
        return all(not each.raddr or each.raddr.port != never_port for each in held)

    async with (
        conversing(sidecar, manifest()) as other,
        joined(sidecar, never, never_token, **deaf(port)) as silent,
        joined(sidecar, session, token, heard=heard, **deaf(port)) as client,
    ):
        never_port = silent.socket.local_address[1]
        await client.speak(speech(6))
        await client.until_unit(2)
        why, *_ = await asyncio.gather(
            why_cut_off(client), flood(client), flood(silent), talk_on(other)
        )
        assert why == (4008, "slow_consumer")
        await eventually(forgotten, "the server lets the silent connection go")
    async with joined(sidecar, session, token, heard=heard, resume=True) as client:
        await client.until_unit(6)
        await client.speak(speech(1))
        await client.until_unit(7)
        heard.assert_whole()
        await client.close_session()
    await end(sidecar, never)


async def test_who_reads_may_ask_as_often_as_it_likes(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest()) as client:
        room = asyncio.Semaphore(500)  # it reads: so many answers may be on their way

        async def ask() -> None:
            for _ in range(6_000):
                await room.acquire()
                await client.send({"type": "session.heartbeat", "event_id": "x" * 500})

        asking = asyncio.create_task(ask())
        for _ in range(6_000):
            await client.until("session.heartbeat_ack")
            room.release()
        await asking
