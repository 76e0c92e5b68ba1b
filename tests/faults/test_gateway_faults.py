"""Owners that die or hang, clients that flood or do not read, a ledger that is away: through the
gateway."""

import asyncio
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.realtime import RealtimeClient

from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from gateway_kit import Gate, Yard, calling, gate, http_get, yard
from session_kit import RATE_HZ, Terms, second

pytestmark = pytest.mark.fault


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url) as front:
        yield front


async def new_session(ground: Yard, terms: Terms | None = None) -> str:
    session = f"f-{secrets.token_hex(4)}"
    await ground.operator.declare(session, terms)
    return session


async def check_ranges(ground: Yard, session: str, seconds: int) -> None:
    ranges = [(start, end) for start, end, _ in await ground.heard_input(session)]
    assert ranges == [(RATE_HZ * n, RATE_HZ * (n + 1)) for n in range(seconds)]


@pytest.mark.parametrize("stage", ["encoder", "thinker", "talker", "code2wav"])
async def test_an_owner_that_dies_in_a_unit(ground: Yard, front: Gate, stage: str) -> None:
    """Not accepted; accepted; committed, but not said. The client hears nothing of it."""
    here = await ground.build()
    session = await new_session(ground, Terms("context", greedy=True))
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        for number in range(1, 6):
            await client.append(second(number))
        await client.until_unit(5)
        pauses = [getattr(here.replica.stages, stage).pause(unit) for unit in range(6, 16)]
        for number in range(6, 16):
            await client.append(second(number))
        reached = [asyncio.create_task(pause.reached.wait()) for pause in pauses]
        await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
        there = await ground.build()
        here.cut_off()
        await ground.operator.place(session, there)
        assert (await client.until("session.moved"))["duplex"]["fence"] == there.opened[session]
        await client.until_unit(15)
        for task in reached:
            task.cancel()
        await asyncio.gather(*reached, return_exceptions=True)
    client.heard.assert_whole()
    assert client.heard.errors == []
    await check_ranges(ground, session, 15)


async def test_an_owner_that_hangs(ground: Yard, front: Gate) -> None:
    """Its socket stays open and silent; the ledger says who the owner is."""
    here = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        await client.append(second(1))
        await client.until_unit(1)
        pause = here.replica.stages.thinker.pause(2)
        await client.append(second(2))
        await pause.reached.wait()
        actor = here.replica.registry.live[session]
        await actor._keeper.stop()  # it does not even learn that it has lost the session
        there = await ground.build()
        await ground.operator.place(session, there)
        await client.until_unit(2)
        assert len(client.heard.of_type("session.moved")) == 1
        pause.go.set()
    client.heard.assert_whole()


async def test_input_while_nobody_runs_the_session(
    ground: Yard, front: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds are kept; more is refused by name, and what was kept arrives."""
    monkeypatch.setattr("duplex_gateway.relay.ROOM_TIMEOUT_S", 0.2)
    ground.operator.awake = False
    house = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        for number in range(1, 14):  # 13 s of 16 kHz are 8.7 s of the default 24 kHz
            await client.append(second(number))
        for number in range(14, 21):
            await client.append(second(number), event_id=f"second-{number}")
        errors = [await client.until("error") for _ in range(5)]
        assert {error["error"]["code"] for error in errors} == {"input_overflow"}
        assert [error["error"]["event_id"] for error in errors] == [
            f"second-{number}" for number in range(16, 21)
        ]
        _, page = await http_get(front.health_port, "/metrics")
        assert "duplex_gateway_input_refused_total 5.0" in page
        await ground.operator.place(session, house)
        await client.until("session.created")
        await client.until_unit(9)
    ranges = [(start, end) for start, end, _ in await ground.heard_input(session)]
    assert ranges == [(24_000 * n, 24_000 * (n + 1)) for n in range(9)]


async def test_a_fast_sender_is_slowed_down_and_loses_nothing(ground: Yard, front: Gate) -> None:
    """Not even when it is being held back as the owner goes."""
    house = await ground.build()
    session = await new_session(ground, Terms("off"))
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        pause = house.replica.stages.thinker.pause(3)
        sending = asyncio.create_task(send_all(client, 120))
        await pause.reached.wait()
        there = await ground.build()
        await house.replica.registry.close()
        await client.until_unit(60)
        await ground.build()
        there.cut_off()
        await ground.operator.place(session, ground.houses[-1])
        await client.until_unit(120)
        await sending
    client.heard.assert_whole()
    assert client.heard.errors == []
    await check_ranges(ground, session, 120)


async def send_all(client: RealtimeClient, seconds: int) -> None:
    for number in range(1, seconds + 1):
        await client.append(second(number))


async def test_a_client_that_does_not_read(
    valkey: EmbeddedValkey, ground: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off, the session goes on, and a redial gets everything."""
    await ground.build()
    session = await new_session(ground)
    async with gate(valkey.url, send_buffer_bytes=16_384) as front:
        with socket.socket() as narrow, monkeypatch.context() as patch:
            patch.setattr("duplex_gateway.client_socket.SEND_TIMEOUT_S", 0.3)
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
            narrow.connect(("127.0.0.1", front.port))
            narrow.setblocking(False)
            async with calling(front, session, sock=narrow) as client:
                await client.until("session.created")
                await client.format()
                client.socket.transport.pause_reading()
                sending = asyncio.create_task(send_all(client, 60))
                await eventually_in_metrics(front, 'ended_total{end="slow_client"} 1.0')
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                client.socket.transport.resume_reading()
                assert (await client.until_closed())[0] in (4008, 1006)
        async with calling(front, session, heard=client.heard, resume=True) as again:
            last = client.heard.last_sequence
            await again.send({"type": "session.resume", "last_received_server_event_seq": last})
            resumed = await again.until("session.resumed")
            await again.until_unit(resumed["duplex"]["next_unit"] - 1)
    again.heard.assert_whole()


async def eventually_in_metrics(front: Gate, line: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await http_get(front.health_port, "/metrics"))[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_messages_that_are_too_large(ground: Yard, front: Gate) -> None:
    await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        assert await client.cut_off_by(b"x" * (16 * 1024 * 1024)) == 1009
    async with calling(front, session) as client:
        await client.until("session.created")


async def test_a_ledger_that_is_away(tmp_path: Path) -> None:
    """Calls that stand are not touched; new ones are told, and let in when it is back."""
    valkey = EmbeddedValkey(tmp_path)
    valkey.start()
    try:
        async with yard(valkey.url) as ground, gate(valkey.url) as front:
            ground.operator.stopping = True
            await ground.operator.stopped.wait()
            house = await ground.build()
            session = await new_session(ground)
            await ground.operator.place(session, house)
            async with calling(front, session) as client:
                await client.until("session.created")
                await client.format()
                valkey.stop()
                async with calling(front, session) as late:
                    error = (await late.until("error"))["error"]
                    assert (error["code"], error["retryable"]) == ("ledger_unavailable", True)
                    assert (await late.until_closed())[0] == 1013
                await client.append(second(1))
                valkey.start()
                await client.until_unit(1)
                assert client.heard.of_type("session.queued") == []
            client.heard.assert_whole()
    finally:
        if valkey.running:
            valkey.stop()


async def test_a_client_that_leaves_while_it_waits(ground: Yard, front: Gate) -> None:
    ground.operator.awake = False
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.queued")
    await eventually_in_metrics(front, 'ended_total{end="client_left"} 1.0')
    await eventually_in_metrics(front, "duplex_gateway_calls 0.0")


async def test_a_connection_that_asks_for_nothing(
    front: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex_sidecar.doors.http.REQUEST_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
