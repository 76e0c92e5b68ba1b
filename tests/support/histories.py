"""Whole conversations under observers: replicas over fake stages behind a RESP proxy each, real
doors behind a socket proxy, clients that resume as they should. All in one process and one loop, so
that "before" and "after" mean the same to every observer.
"""

import asyncio
import contextvars
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from session_kit import MODEL, RATE_HZ, TOKEN, Replica, Stages, Terms, replica, second, speaks
from support.aof_witness import AofWitness
from support.observing import Observer
from support.realtime import append_event, session_update
from support.resp_proxy import Plan, RespProxy
from support.socket_proxy import SocketProxy
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from duplex_sidecar.doors.openai_realtime import serve_realtime
from duplex_sidecar.doors.websocket import DoorWebSocket
from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.observations import LedgerEnd, Reference, StageChunk
from duplex_sidecar.history.verdict import Report
from duplex_sidecar.ledger import lease, store
from duplex_sidecar.ledger.errors import LedgerError
from duplex_sidecar.ledger.export import export_lines
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.protocol.errors import ERRORS, ClientError, ErrorCode
from duplex_sidecar.session.model import ServedModel
from duplex_sidecar.session.port import Attachment

AHEAD_UNITS = 2
"""So many seconds are sent beyond the last one that was acknowledged."""
RETRY_S = 0.02
WAIT_S = 60.0
END = "session_ended"

MakeStages = Callable[[], Awaitable[Stages]]

_OF: contextvars.ContextVar[str | None] = contextvars.ContextVar("replica", default=None)


def short_leases(
    patch: pytest.MonkeyPatch, *, lease_ms: int = 600, margin_ms: int = 100, renew_ms: int = 60
) -> None:
    """The same lease, faster. Several renewals fit into a conversation of a second."""
    patch.setattr(store, "LEASE_MS", lease_ms)
    patch.setattr(store, "MARGIN_MS", margin_ms)
    patch.setattr(lease, "RENEW_PERIOD_MS", renew_ms)
    patch.setattr(lease, "RETRY_PERIOD_MS", renew_ms // 2)


async def fake_stages() -> Stages:
    return Stages()


class _Marked:
    """The sessions of a replica; what a door's call starts there is marked as part of it."""

    def __init__(self, here: Replica) -> None:
        self._here = here

    async def attach(self, session: str, token: str, last_sequence: int | None) -> Attachment:
        mark = _OF.set(self._here.name)
        try:
            return await self._here.registry.attach(session, token, last_sequence)
        finally:
            _OF.reset(mark)


class Doors:
    """One HTTP server for the realtime doors of all replicas, by name."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.websocket("/{client}/{name}/v1/realtime")
        async def realtime(websocket: WebSocket, client: str, name: str) -> None:
            here = self.replicas.get(name)
            if here is not None:
                await serve_realtime(websocket, _Marked(here), "duplex")

        _ = realtime
        return app

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Doors"]:
        server = uvicorn.Server(
            uvicorn.Config(
                self.app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws=DoorWebSocket,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        async with asyncio.timeout(WAIT_S):
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        try:
            yield self
        finally:
            server.should_exit = True
            await serving


@dataclass(eq=False)
class Member:
    """A replica with all that belongs to its process."""

    name: str
    replica: Replica
    proxy: RespProxy
    stack: AsyncExitStack
    killed: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    """One history: replicas that come and go, a server, one observer. Use as `async with`."""

    def __init__(
        self,
        doors: Doors,
        url: str,
        folder: Path,
        name: str,
        *,
        lease_ms: int = 0,
        margin_ms: int = 0,
        model: ServedModel = MODEL,
        make_stages: MakeStages = fake_stages,
        durability: Durability = Durability.MEMORY,
        witness: AofWitness | None = None,
    ) -> None:
        """make_stages: what a replica stands on; called for each when its predecessors are gone.
        witness: is told what the ledger's reader says in the end."""
        self.name = name
        self.url = url
        self.members: list[Member] = []
        self.observer = Observer(
            name,
            lease_ms=lease_ms,
            margin_ms=margin_ms,
            special_ids=model.vocabulary.special_ids,
        )
        self._proxy = SocketProxy(doors.port, self.observer)
        self._doors = doors
        self._folder = folder
        self._model = model
        self._make_stages = make_stages
        self._durability = durability
        self._witness = witness
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}
        self._stages: list[tuple[str, Stages]] = []

    @property
    def sockets(self) -> SocketProxy:
        return self._proxy

    async def __aenter__(self) -> "World":
        await self.sockets.__aenter__()
        asyncio.get_running_loop().set_task_factory(self._new_task)
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in list(self.members):
            await self.bury(member) if member.killed.is_set() else await self.leave(member)
        await self.sockets.__aexit__()
        asyncio.get_running_loop().set_task_factory(None)

    # --- replicas ---------------------------------------------------------------------------------

    async def start(
        self, plan: Plan | None = None, *, stages: Stages | None = None, **options: Any
    ) -> Member:
        """A new replica, behind all that are there."""
        name = f"{self.name}-{len(self._stages)}"
        stages = stages or await self._make_stages()
        self._stages.append((name, stages))
        stack = AsyncExitStack()
        try:
            return await self._started(stack, name, plan, stages, options)
        except BaseException:
            await stack.aclose()
            raise

    async def _started(
        self,
        stack: AsyncExitStack,
        name: str,
        plan: Plan | None,
        stages: Stages,
        options: dict[str, Any],
    ) -> Member:
        path = self._folder / f"{len(self._stages)}-{id(self) % 10_000}.sock"
        proxy = await stack.enter_async_context(
            RespProxy(self.url, path, name, self.observer, plan)
        )
        mark = _OF.set(name)  # of the replica alone: its proxy is not part of its process
        try:
            here = await stack.enter_async_context(
                replica(
                    proxy.url,
                    name,
                    model=self._model,
                    stages=stages,
                    durability=self._durability,
                    **options,
                )
            )
        finally:
            _OF.reset(mark)
        member = Member(name, here, proxy, stack)
        self.members.append(member)
        self._doors.replicas[name] = here
        return member

    def kill(self, member: Member) -> None:
        """SIGKILL: nothing of it leaves any more. `bury` takes away what is left of it."""
        if not member.killed.is_set():
            member.proxy.kill()
            self.sockets.kill(member.name)
            self.observer.happened("killed", member.name)
            member.killed.set()

    async def bury(self, member: Member) -> None:
        self.members.remove(member)
        self._doors.replicas.pop(member.name)
        while tasks := [task for task in self._tasks.pop(member.name, ()) if not task.done()]:
            self._tasks[member.name] = set(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # what is called back by the end of tasks
        await member.stack.aclose()

    async def leave(self, member: Member) -> None:
        """An orderly end."""
        self.members.remove(member)
        self._doors.replicas.pop(member.name)
        await member.stack.aclose()

    def declare_dead(self, lost: Member, to: Member) -> None:
        to.replica.registry.declare_dead(lost.name)
        self.observer.happened("declared_dead", lost.name)

    async def open_session(self, member: Member, session: str, terms: Terms) -> None:
        """As the admin API does. Raises ClientError; ConnectionError if the replica dies."""

        async def opening() -> None:
            _OF.set(member.name)
            await member.replica.open(session, terms)

        await self.unless_killed(member, opening)

    async def unless_killed(self, member: Member, work: Callable[[], Any]) -> None:
        """What waits for a process fails with it."""
        working = asyncio.ensure_future(work())
        dying = asyncio.ensure_future(member.killed.wait())
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if working.done() and not member.killed.is_set():
            working.result()
            return
        working.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)
        raise ConnectionError(f"{member.name} has died")

    # --- the end ----------------------------------------------------------------------------------

    async def finish(
        self, session: str, reference: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        """Look at the ledger and at the vocoders' input."""
        end = await ledger_end(self.url, session, self.observer.clock_ns())
        self.observer.note(end)
        if self._witness is not None:
            self._witness.expect(end)
        for name, stages in self._stages:
            for feed in stages.chunks():
                if feed.session == session:
                    self.observer.note(StageChunk(name, session, feed.epoch, feed.sequence))
        if reference is not None:
            self.observer.note(Reference(session, reference))

    def report(self) -> Report:
        return check_history(self.observer.observations)

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        name = _OF.get()
        if name is not None:
            tasks = self._tasks.setdefault(name, set())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task


async def ledger_end(url: str, session: str, at_ns: int = 0) -> LedgerEnd:
    """What `duplex ledger export` writes of the session, and how far its journal goes. at_ns: by
    the observer's clock, where the session may go on meanwhile."""
    reader = await LedgerReader.connect(url)
    try:
        loaded = await reader.load(session)
    except LedgerError as error:
        problem = f"{type(error).__name__}: {error}"
        return LedgerEnd(session=session, lines=(), events_last=0, problem=problem, at_ns=at_ns)
    finally:
        await reader.close()
    lines = tuple(line.decode().strip() for line in export_lines(loaded))
    last = loaded.meta.events_last
    return LedgerEnd(session=session, lines=lines, events_last=last, at_ns=at_ns)


# --- a client -------------------------------------------------------------------------------------


class Lost(Exception):
    """The connection is gone, or the server asks to come again."""


class Street(Protocol):
    """What a client dials through."""

    @property
    def sockets(self) -> SocketProxy: ...


class Named(Protocol):
    """A replica, for who dials it."""

    name: str


class Person:
    """One client over all its connections: resumes behind the last event it has, sends input again
    from the acknowledged position."""

    def __init__(
        self,
        world: Street,
        session: str,
        *,
        client: str = "c",
        sound: Callable[[int], bytes] = second,
        is_speech: Callable[[int], bool] = speaks,
    ) -> None:
        """sound, is_speech: of a second, from 1."""
        self._world = world
        self.session = session
        self.client = client
        self.wait_s = WAIT_S
        """For an event, before something is wrong."""
        self.last_sequence = 0
        self.acknowledged_unit = 0
        self.units_done: set[int] = set()
        self.ended: str | None = None
        self._dialled = False
        self._sound = sound
        self._is_speech = is_speech
        self.sent_unit = 0
        self._socket: ClientConnection | None = None

    # --- a whole conversation ---------------------------------------------------------------------

    async def talk(self, member: Named, units: int, *, close: bool = True) -> None:
        """Dial and speak until that many units are done, and end the session. Raises Lost."""
        async with self._connected(member) as socket:
            await self._greeted(socket)
            await self._speak(socket, units)
            if close:
                await self._send(socket, {"type": "session.close"})
                while self.ended is None:
                    await self._hear(socket)

    @asynccontextmanager
    async def _connected(self, member: Named) -> AsyncIterator[ClientConnection]:
        query = f"session={self.session}" + ("&resume=1" if self._dialled else "")
        port = self._world.sockets.port
        url = f"ws://127.0.0.1:{port}/{self.client}/{member.name}/v1/realtime?{query}"
        headers = {"authorization": f"Bearer {TOKEN}"}
        try:
            async with connect(
                url,
                additional_headers=headers,
                compression=None,
                max_size=None,
                ping_interval=None,
                close_timeout=0.5,
                proxy=None,
            ) as socket:
                resumes, self._dialled = self._dialled, True
                if resumes:
                    last = self.last_sequence
                    event = {"type": "session.resume", "last_received_server_event_seq": last}
                    await self._send(socket, event)
                yield socket
        except (ConnectionClosed, InvalidHandshake, InvalidMessage, OSError, EOFError) as error:
            raise Lost(type(error).__name__) from error

    async def _greeted(self, socket: ClientConnection) -> None:
        while True:
            event = await self._hear(socket)
            if event["type"] in ("session.created", "session.resumed"):
                break
        self.acknowledged_unit = event["duplex"]["acknowledged_sample"] // RATE_HZ
        self.sent_unit = self.acknowledged_unit
        await self._send(socket, session_update())

    async def _speak(self, socket: ClientConnection, units: int) -> None:
        while max(self.units_done, default=0) < units:
            await self.send_input(socket, min(units, self.acknowledged_unit + AHEAD_UNITS))
            await self._hear(socket)

    async def send_input(self, socket: ClientConnection, through: int) -> None:
        while self.sent_unit < through:
            number = self.sent_unit + 1
            more = {"from_sample": RATE_HZ * (number - 1), "is_speech": self._is_speech(number)}
            await self._send(socket, append_event(self._sound(number), **more))
            self.sent_unit = number

    async def _send(self, socket: ClientConnection, event: dict[str, Any]) -> None:
        try:
            await socket.send(json.dumps(event))
        except ConnectionClosed:
            while True:  # what had come before the end counts
                await self._hear(socket)

    async def _hear(self, socket: ClientConnection) -> dict[str, Any]:
        """The next event. Raises Lost, ConnectionClosed."""
        async with asyncio.timeout(self.wait_s):
            event: dict[str, Any] = json.loads(await socket.recv())
        number = event.get("server_event_seq")
        if number is not None:
            self.last_sequence = max(self.last_sequence, number)
        match event["type"]:
            case "input_audio_buffer.committed":
                self.acknowledged_unit = max(self.acknowledged_unit, event["duplex"]["unit"])
            case "duplex.unit":
                self.units_done.add(event["unit"])
            case "session.resync_required":
                self.last_sequence = event["duplex"]["oldest"] - 1
            case "session.closed":
                self._over(event["reason"])
            case "error":
                self._refused(event["error"])
            case _:
                pass
        return event

    def _refused(self, error: dict[str, Any]) -> None:
        self._over(error["code"])

    def _over(self, code: str) -> None:
        entry = ERRORS[ErrorCode(code)]
        if entry.retryable or code in (ErrorCode.LEASE_LOST, ErrorCode.SESSION_TAKEN_OVER):
            raise Lost(code)
        self.ended = code


async def converse(
    world: World,
    person: Person,
    terms: Terms,
    units: int,
    *,
    first: Member,
    proof: bool = True,
    followed: Callable[[Member, int], object] = lambda member, generation: None,
) -> str:
    """Speak to the end, whoever dies on the way; returns why it ended.

    proof: the successor is told that its predecessor is dead; else it waits until the lease has run
    out. followed: is told of each successor and its number.
    """
    here, opened, generation = first, False, 0
    async with asyncio.timeout(2 * WAIT_S):
        while person.ended is None:
            if here.killed.is_set():
                generation += 1
                lost = here
                await world.bury(lost)
                here = await world.start()
                followed(here, generation)
                if proof:
                    world.declare_dead(lost, here)
            with suppress(Lost, ConnectionError):
                if not opened:
                    opened = await _opened(world, here, person.session, terms)
                await person.talk(here, units)
            if person.ended is None and not here.killed.is_set():
                await asyncio.sleep(RETRY_S)
    return person.ended


async def _opened(world: World, here: Member, session: str, terms: Terms) -> bool:
    """Whether the session is there. One that cannot be opened now is tried again."""
    try:
        await world.open_session(here, session, terms)
    except ClientError as error:
        # It had ended already when its opener asked again.
        return error.code is ErrorCode.SESSION_ENDED
    return True
