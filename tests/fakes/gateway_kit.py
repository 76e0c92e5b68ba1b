"""Gateways before replicas with fake stages: real sockets, a real ledger, and somebody who does
what an operator does: writes route records, listens for wakes, says where a session runs."""

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket
from redis.asyncio import Redis
from session_kit import TOKEN, Replica, Terms, claim, replica
from support.realtime import Heard, RealtimeClient
from websockets.asyncio.client import connect

from duplex_api.routes import WAKE_FIELD, WAKE_STREAM, RouteRecord, route_key
from duplex_api.session import SessionPhase
from duplex_gateway.server import listen, serve
from duplex_gateway.settings import GatewaySettings
from duplex_sidecar.doors.openai_realtime import serve_realtime
from duplex_sidecar.doors.websocket import DoorWebSocket
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.session.handing_over import HandOver

READY_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 30.0


def sha256_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@dataclass
class House:
    """A replica behind its door."""

    replica: Replica
    address: str
    server: uvicorn.Server
    opened: dict[str, int] = field(default_factory=dict)
    """Sessions that were placed here, and under which fence."""

    def cut_off(self) -> None:
        """Its door is gone without a word, as if its node were."""
        for server in self.server.servers:
            server.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


@asynccontextmanager
async def house(url: str, name: str, **options: Any) -> AsyncIterator[House]:
    with listen("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with replica(url, name, placed=True, address=address, **options) as here:
            app = FastAPI()

            @app.websocket("/v1/realtime")
            async def realtime(websocket: WebSocket) -> None:
                await serve_realtime(websocket, here.registry, "duplex")

            config = uvicorn.Config(
                app,
                log_config=None,
                lifespan="off",
                ws=DoorWebSocket,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=2,
            )
            server = _Server(config)
            task = asyncio.create_task(server.serve([listener]))
            try:
                yield House(here, address, server)
            finally:
                await here.registry.close()
                server.should_exit = True
                await task


class Operator:
    """Places a session that is asked for on the first replica of `targets`."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url)
        self._fence = 0
        self._placing = asyncio.Lock()
        self.targets: list[House] = []
        self.terms: dict[str, Terms] = {}
        self.tokens: dict[str, str] = {}
        self.wakes: list[str] = []
        self.awake = True
        """Whether it does anything about wakes."""
        self.stopping = False
        self.stopped = asyncio.Event()

    async def declare(
        self,
        session: str,
        terms: Terms | None = None,
        *,
        phase: SessionPhase = SessionPhase.PENDING,
        token: str = TOKEN,
        **more: Any,
    ) -> None:
        """A session exists: its route record does."""
        self.terms[session] = terms or self.terms.get(session) or Terms("context")
        self.tokens[session] = token
        values = {"token_sha256": sha256_of(token), "phase": phase} | more
        record = RouteRecord(pool="test/pool", session=f"test/{session}", **values)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(route_key(session))
            pipeline.hset(route_key(session), mapping=dict(record.to_hash()))
            await pipeline.execute()

    async def place(self, session: str, where: House) -> None:
        async with self._placing:
            await self._place(session, where)

    async def move(self, session: str, here: House, there: House, *, grace_s: float = 0.0) -> None:
        """From one that runs it to one that makes itself ready first."""
        async with self._placing:
            self._fence += 1
            there.opened[session] = self._fence
            order = claim(self.tokens[session], self._fence)
            manifest = self.terms[session].manifest()
            await there.replica.registry.prepare(session, manifest, order)
            hand_over = here.replica.registry.departures.hand_over
            await hand_over(session, HandOver(there.replica.name, self._fence), grace_s=grace_s)

    async def _place(self, session: str, where: House) -> None:
        self._fence += 1
        where.opened[session] = self._fence
        order = claim(self.tokens[session], self._fence)
        await where.replica.registry.open(session, self.terms[session].manifest(), order)

    async def forge_lease(self, session: str, *, fence: int, address: str) -> None:
        """What a ledger would say that has lost its newest writes."""
        until_ms = 2**52
        await self._redis.hset(
            session_keys(session).meta,
            mapping={"fence": fence, "address": address, "until": until_ms},
        )

    async def run(self) -> None:
        newest = await self._redis.xrevrange(WAKE_STREAM, count=1)
        last = newest[0][0] if newest else "0"
        while not self.stopping:
            entries = await self._redis.xread({WAKE_STREAM: last}, count=10, block=50)
            for _, rows in entries:
                for number, fields in rows:
                    last = number
                    session = fields[WAKE_FIELD.encode()].decode()
                    self.wakes.append(session)
                    if self.awake and self.targets:
                        await self._answer(session)
        self.stopped.set()

    async def _answer(self, session: str) -> None:
        async with self._placing:
            target = self.targets[0]
            if session in self.terms and session not in target.replica.registry.live:
                await self._place(session, target)

    async def close(self) -> None:
        await self._redis.aclose()


@dataclass
class Gate:
    """A running gateway. stop: ends it as SIGTERM does."""

    port: int
    health_port: int
    stop: asyncio.Event
    task: "asyncio.Task[None]"

    def url(self, session: str, resume: bool = False, scheme: str = "ws") -> str:
        more = "&resume=1" if resume else ""
        return f"{scheme}://127.0.0.1:{self.port}/v1/realtime?model=duplex&session={session}{more}"


@asynccontextmanager
async def gate(
    redis_url: str, *, send_buffer_bytes: int | None = None, **settings: Any
) -> AsyncIterator[Gate]:
    """send_buffer_bytes: of the system, for each client."""
    values = {"drain_grace_s": 0.0} | settings
    with listen("127.0.0.1", 0) as doors, listen("127.0.0.1", 0) as health:
        if send_buffer_bytes is not None:
            doors.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        ports = (doors.getsockname()[1], health.getsockname()[1])
        stop = asyncio.Event()
        running = GatewaySettings(redis_url=redis_url, **values)
        task = asyncio.create_task(serve(running, doors, health, stop))
        try:
            await until_ready(ports[1])
            yield Gate(*ports, stop, task)
        finally:
            stop.set()
            await task


async def http_get(port: int, path: str) -> tuple[int, str]:
    """(status, body) of a plain GET."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def until_ready(health_port: int) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while (await http_get(health_port, "/readyz"))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def calling(
    gate: Gate,
    session: str,
    token: str = TOKEN,
    *,
    heard: Heard | None = None,
    resume: bool = False,
    **options: Any,
) -> AsyncIterator[RealtimeClient]:
    """A client that has neither said nor read anything."""
    headers = {"authorization": f"Bearer {token}"}
    connection = connect(
        gate.url(session, resume),
        additional_headers=headers,
        compression=None,
        max_size=None,
        proxy=None,
        **options,
    )
    async with connection as socket:
        yield RealtimeClient(socket, session, heard)


@dataclass
class Yard:
    """Everything on one ledger."""

    url: str
    operator: Operator
    stack: AsyncExitStack
    houses: list[House] = field(default_factory=list)

    async def build(self, **options: Any) -> House:
        """One more replica; wakes go to the newest one."""
        name = f"house-{secrets.token_hex(3)}-{len(self.houses)}"
        built = await self.stack.enter_async_context(house(self.url, name, **options))
        for lost in self.houses:
            built.replica.registry.declare_dead(lost.replica.name)
        self.houses.append(built)
        self.operator.targets[:] = [built]
        return built

    async def heard_input(self, session: str) -> list[tuple[int, int, str]]:
        """Of each unit in its ledger: from sample, to sample, sha256 of its PCM."""
        reader = await LedgerReader.connect(self.url)
        try:
            loaded = await reader.load(session)
        finally:
            await reader.close()
        heard: list[tuple[int, int, str]] = []
        for unit in loaded.accepted:
            assert unit.media.pcm is not None
            start, end = unit.input.client_from_samples, unit.input.client_to_samples
            heard.append((start, end, unit.media.pcm.sha256))
        return heard


@asynccontextmanager
async def yard(url: str) -> AsyncIterator[Yard]:
    operator = Operator(url)
    running = asyncio.create_task(operator.run())
    try:
        async with AsyncExitStack() as stack:
            yield Yard(url, operator, stack)
    finally:
        operator.stopping = True
        await running
        await operator.close()
