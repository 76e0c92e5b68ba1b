"""Clients that do not end what they say, and what a gateway has of it meanwhile."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from fastapi import WebSocket
from support.patience import PATIENCE_S
from support.realtime import RealtimeClient, append_event
from websockets.asyncio.client import connect

from duplex_gateway import app
from duplex_gateway.budget import Account
from duplex_gateway.client_socket import ClientSocket
from duplex_gateway.routing import Directory
from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.doors.unread import FREE_BYTES, READ_BYTES, Unread
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, Yard, calling, gate, http_get, until_ready, yard
from session_kit import TOKEN, second

pytestmark = pytest.mark.integration

MEBI = 1024 * 1024
LIMIT_BYTES = 64 * MEBI
"""The least that a gateway can be told to keep; half of it is for whoever asks first."""
PIECE = "x" * 64 * 1024


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url, max_held_bytes=LIMIT_BYTES, max_calls=1_000) as front:
        yield front


@asynccontextmanager
async def process(url: str) -> AsyncGenerator[tuple[Gate, int]]:
    """A gateway of its own, and its process's number."""
    port, health_port = free_port(), free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUPLEX_")}
    settings = {
        "DUPLEX_REDIS_URL": url,
        "DUPLEX_HOST": "127.0.0.1",
        "DUPLEX_PORT": str(port),
        "DUPLEX_HEALTH_HOST": "127.0.0.1",
        "DUPLEX_HEALTH_PORT": str(health_port),
        "DUPLEX_MAX_HELD_BYTES": str(LIMIT_BYTES),
        "DUPLEX_DRAIN_GRACE_S": "0",
    }
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "duplex_gateway", env=clean | settings, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await until_ready(health_port)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        yield (
            Gate(port, health_port, asyncio.Event(), asyncio.create_task(asyncio.sleep(0))),
            (running.pid),
        )
    finally:
        running.kill()
        await running.communicate()


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def new_session(ground: Yard) -> str:
    session = f"u-{secrets.token_hex(4)}"
    await ground.operator.declare(session)
    return session


class Endless:
    """A message in pieces that never ends, sent by an ordinary client as it is taken."""

    def __init__(self, client: RealtimeClient, piece: str = PIECE, pieces: int = 13 * 16) -> None:
        self._client = client
        self._piece = piece
        self._pieces = pieces
        self.said = 0
        self.has_said_it = asyncio.Event()
        self._saying = asyncio.create_task(client.socket.send(self._say()))

    async def _say(self) -> AsyncIterator[str]:
        yield '{"type": "input_audio_buffer.append", "audio": "'
        for _ in range(self._pieces):
            yield self._piece
            self.said += 1
            await asyncio.sleep(0)
        self.has_said_it.set()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self._saying.cancel()
        self._client.socket.transport.abort()
        await asyncio.gather(self._saying, return_exceptions=True)


async def held(front: Gate) -> float:
    _, page = await http_get(front.health_port, "/metrics")
    lines = [line for line in page.splitlines() if line.startswith("duplex_gateway_held_bytes ")]
    return float(lines[0].split()[1])


async def until_held(front: Gate, least: int, most: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not least <= await held(front) <= most:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_they_get_no_further(front: Gate, clients: list[Endless], least: int) -> None:
    """Until each has said it all, or so much is held and none has said anything for a moment."""
    said = -1
    async with asyncio.timeout(PATIENCE_S):
        while not all(client.has_said_it.is_set() for client in clients):
            before, said = said, sum(client.said for client in clients)
            if said == before and await held(front) >= least:
                return
            await asyncio.sleep(0.5)


async def test_the_process_does_not_grow_by_what_is_never_ended(
    valkey: EmbeddedValkey, ground: Yard
) -> None:
    async with process(valkey.url) as (front, pid), AsyncExitStack() as stack:
        before = resident_bytes(pid)
        clients: list[Endless] = []
        for _ in range(24):
            client = await stack.enter_async_context(calling(front, await new_session(ground)))
            clients.append(Endless(client))
            stack.push_async_callback(clients[-1].stop)
        await until_they_get_no_further(front, clients, LIMIT_BYTES // 2 - MEBI)
        grown = resident_bytes(pid) - before
        print(f"24 unfinished messages of 13 MiB: {grown / MEBI:.0f} MiB")
        assert sum(client.said for client in clients) * len(PIECE) > LIMIT_BYTES // 2
        assert grown < LIMIT_BYTES
        assert await held(front) < LIMIT_BYTES


async def test_one_for_whose_message_there_is_no_room_dials_again_and_others_go_on(
    ground: Yard, front: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex_sidecar.doors.unread.ROOM_TIMEOUT_S", 0.5)
    monkeypatch.setattr("duplex_sidecar.doors.unread.MESSAGE_TIMEOUT_S", 10 * PATIENCE_S)
    await ground.build()
    modest = await new_session(ground)
    async with AsyncExitStack() as stack:
        talking = await stack.enter_async_context(calling(front, modest))
        await talking.until("session.created")
        await talking.format()
        greedy: list[Endless] = []
        for _ in range(2):
            client = await stack.enter_async_context(calling(front, await new_session(ground)))
            greedy.append(Endless(client))
            stack.push_async_callback(greedy[-1].stop)
            await greedy[-1].has_said_it.wait()
        await until_held(front, 26 * MEBI, 27 * MEBI)
        too_much = await stack.enter_async_context(calling(front, await new_session(ground)))
        never = Endless(too_much)
        assert (await too_much.until("error"))["error"]["code"] == "resource_exhausted"
        assert (await too_much.until_closed())[0] == 1013
        await never.stop()
        await talking.append(second(1))
        await talking.until_unit(1)
        for client in greedy:
            await client.stop()
        await talking.close_session()
    await until_held(front, 0, 0)


@pytest.mark.parametrize("piece", ["x", ""], ids=["small", "empty"])
async def test_one_that_takes_too_long_is_let_go_of(
    ground: Yard, front: Gate, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it answers pings, and something comes all the time."""
    monkeypatch.setattr("duplex_sidecar.doors.unread.MESSAGE_TIMEOUT_S", 1.0)
    async with calling(front, await new_session(ground)) as client:
        never = Endless(client, piece, pieces=10**9)
        assert (await client.until("error"))["error"]["code"] == "slow_consumer"
        assert (await client.until_closed())[0] == 4008
        assert never.said > 10
        await never.stop()
    await until_held(front, 0, 0)
    _, page = await http_get(front.health_port, "/metrics")
    assert 'duplex_gateway_calls_ended_total{end="slow_client"} 1.0' in page


async def test_of_a_stranger_little_is_read(
    ground: Yard, front: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody knows yet whether its token is good, and behind the answer that it is not."""
    found = asyncio.Event()
    find = Directory.find

    async def slowly(directory: Directory, session: str) -> object:
        await found.wait()
        return await find(directory, session)

    monkeypatch.setattr(Directory, "find", slowly)
    async with calling(front, await new_session(ground), token="wrong") as stranger:
        never = Endless(stranger)
        await until_they_get_no_further(front, [never], FREE_BYTES)
        assert not never.has_said_it.is_set()
        assert FREE_BYTES <= await held(front) <= FREE_BYTES + 2 * READ_BYTES
        found.set()
        assert (await stranger.until("error"))["error"]["code"] == "session_not_found"
        assert (await stranger.until_closed())[0] == 1008
        await never.stop()
    await until_held(front, 0, 0)


async def test_a_client_that_leaves_in_a_message_leaves_nothing(ground: Yard, front: Gate) -> None:
    async with calling(front, await new_session(ground)) as client:
        never = Endless(client)
        await never.has_said_it.wait()
        await until_held(front, 13 * MEBI, 14 * MEBI)
        await never.stop()
        await until_held(front, 0, 0)


@pytest.mark.parametrize("event_id", ["plain", "f\u00fcr \U0001f600"])
async def test_a_long_message_in_many_pieces_arrives(
    ground: Yard, front: Gate, event_id: str
) -> None:
    """With foreign characters, too, which would make it four times as large."""
    await ground.build()
    session = await new_session(ground)
    seconds = b"".join(second(number) for number in range(1, 4))
    event = append_event(seconds, event_id=event_id)
    text = json.dumps(event, ensure_ascii=False)
    assert len(text) > FREE_BYTES
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        await client.socket.send(text[at : at + 999] for at in range(0, len(text), 999))
        await client.until_unit(3)
        await client.send(json.dumps(event | {"audio": "!" * len(text)}, ensure_ascii=False))
        error = (await client.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("invalid_audio", event_id)
        await client.close_session()
    assert len(await ground.heard_input(session)) == 3


async def test_a_request_is_kept_no_longer_than_it_takes_to_let_its_client_in(
    front: Gate, ground: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the names that it offers uvicorn would keep twenty times the bytes, a MiB a call."""
    calls: list[WebSocket] = []

    def noted(websocket: WebSocket, unread: Unread, account: Account) -> ClientSocket:
        calls.append(websocket)
        return ClientSocket(websocket, unread, account)

    monkeypatch.setattr(app, "ClientSocket", noted)
    session = await new_session(ground)
    offered = ",".join(["ab"] * 2_600)
    request = [("authorization", f"Bearer {TOKEN}"), *[("sec-websocket-protocol", offered)] * 6]
    connection = connect(
        front.url(session) + "&more=x" * 500,
        additional_headers=request,
        compression=None,
        proxy=None,
    )
    async with connection as socket:
        await RealtimeClient(socket, session).until("session.queued")
        (call,) = calls
        assert (list(call.headers), call.scope["subprotocols"]) == ([], [])
        assert "_query_params" not in vars(call), "starlette keeps what it has read"
