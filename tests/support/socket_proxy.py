"""A proxy between clients and the realtime door that records every WebSocket message of both ways.

It passes bytes on as they come and reads the frames (RFC 6455) beside that, so it adds no handshake
of its own; pings and closes pass through. One proxy serves all clients; who dials whom is said by
the path: `/<client>/<replica>/...`.
"""

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from support.observing import Observer

from duplex_sidecar.history.frames import facts_of_message
from duplex_sidecar.history.observations import Frame

TEXT, BINARY, CONTINUATION = 1, 2, 0
READ_BYTES = 256 * 1024


class FrameReader:
    """Takes bytes of one direction, gives whole messages. Control frames are left out."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        self._bytes += data
        messages: list[bytes] = []
        while (frame := self._frame()) is not None:
            final, opcode, payload = frame
            if opcode not in (TEXT, BINARY, CONTINUATION):
                continue
            self._parts.append(payload)
            if final:
                messages.append(b"".join(self._parts))
                self._parts.clear()
        return messages

    def _frame(self) -> tuple[bool, int, bytes] | None:
        held = self._bytes
        if len(held) < 2:
            return None
        final, opcode = bool(held[0] & 0x80), held[0] & 0x0F
        masked, length, at = bool(held[1] & 0x80), held[1] & 0x7F, 2
        if length >= 126:
            size, form = (2, ">H") if length == 126 else (8, ">Q")
            if len(held) < at + size:
                return None
            length = struct.unpack_from(form, held, at)[0]
            at += size
        key = bytes(held[at : at + 4]) if masked else b""
        at += 4 if masked else 0
        if len(held) < at + length:
            return None
        payload = bytes(held[at : at + length])
        del held[: at + length]
        return final, opcode, unmasked(payload, key) if masked else payload


def unmasked(payload: bytes, key: bytes) -> bytes:
    whole = (key * (len(payload) // 4 + 1))[: len(payload)]
    number = int.from_bytes(payload, "little") ^ int.from_bytes(whole, "little")
    return number.to_bytes(len(payload), "little")


@dataclass(eq=False)
class _Call:
    """One connection of a client."""

    client: str
    replica: str
    session: str
    number: int
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    cut: bool = False
    deaf: bool = False
    """What the server says is seen and not passed on."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


class SocketProxy:
    """Use as `async with`. port: of the door of all replicas, which is told the whole path. ports:
    of the replicas that have one each, and are told their own part of it."""

    def __init__(self, port: int, observer: Observer, ports: Mapping[str, int] | None = None):
        self._door_port = port
        self._ports: Mapping[str, int] = {} if ports is None else ports
        self._observer = observer
        self._calls: set[_Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counted: dict[str, int] = {}
        self._dead: set[str] = set()
        self._held: dict[str, asyncio.Event] = {}
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> "SocketProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for gate in self._held.values():
            gate.set()
        for call in self._calls:
            self._cut(call)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def kill(self, replica: str) -> None:
        """All sockets of that replica end without a word, and no new one begins."""
        self._dead.add(replica)
        for call in list(self._calls):
            if call.replica == replica:
                self._cut(call)

    def hold(self, replica: str, until: asyncio.Event) -> None:
        """Nothing passes to or from that replica, and nothing ends, until then."""
        self._held[replica] = until

    def hang_up(self, client: str) -> None:
        """The network between that client and its door is gone; both sides see a reset."""
        for call in list(self._calls):
            if call.client == client:
                self._cut(call)

    def deafen(self, client: str) -> None:
        """One way: the client hears nothing more on its present connection."""
        for call in self._calls:
            call.deaf = call.deaf or call.client == client

    async def _serve(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        call: _Call | None = None
        try:
            head = await near.readuntil(b"\r\n\r\n")
            client, replica, session = _named(head)
            if replica in self._dead:
                return
            if (gate := self._held.get(replica)) is not None:
                await gate.wait()
            port = self._ports.get(replica, self._door_port)
            if replica in self._ports:
                head = head.replace(f"/{client}/{replica}/".encode(), b"/", 1)
            far, far_writer = await asyncio.open_connection("127.0.0.1", port)
            number = self._counted[client] = self._counted.get(client, 0) + 1
            call = _Call(client, replica, session, number, writer, far_writer)
            self._calls.add(call)
            if replica in self._dead:
                self._cut(call)
            try:
                far_writer.write(head)
                writer.write(await far.readuntil(b"\r\n\r\n"))
                await self._converse(call, near, far)
            finally:
                self._calls.discard(call)
                far_writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if call is None or call.cut:
                writer.transport.abort()
            else:
                writer.close()  # what is on its way arrives
            self._tasks.discard(task)

    async def _converse(
        self, call: _Call, near: asyncio.StreamReader, far: asyncio.StreamReader
    ) -> None:
        call.tasks = [
            asyncio.create_task(self._pump(call, far, call.near, down=True)),
            asyncio.create_task(self._pump(call, near, call.far, down=False)),
        ]
        await asyncio.wait(call.tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in call.tasks:
            task.cancel()
        await asyncio.gather(*call.tasks, return_exceptions=True)

    async def _pump(
        self,
        call: _Call,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        down: bool,
    ) -> None:
        frames = FrameReader()
        while data := await source.read(READ_BYTES):
            if (gate := self._held.get(call.replica)) is not None:
                await gate.wait()
            passes = not call.cut and not (down and call.deaf)
            for message in frames.feed(data):
                self._note(call, message, down=down, passed_on=passes)
            if passes:
                sink.write(data)
                await sink.drain()

    def _note(self, call: _Call, message: bytes, *, down: bool, passed_on: bool) -> None:
        facts = facts_of_message(message)
        self._observer.note(
            Frame(
                client=call.client,
                connection=call.number,
                replica=call.replica,
                session=call.session,
                down=down,
                at_ns=self._observer.clock_ns(),
                passed_on=passed_on,
                type=facts.type,
                size_bytes=len(message),
                event=facts.event,
                acknowledged=facts.acknowledged,
                opened=facts.opened,
                resumes_after=facts.resumes_after,
                oldest=facts.oldest,
                problem=facts.problem,
                played=facts.played,
                applied=facts.applied,
            )
        )

    def _cut(self, call: _Call) -> None:
        call.cut = True
        call.near.transport.abort()
        call.far.transport.abort()


def _named(head: bytes) -> tuple[str, str, str]:
    """Client, replica and session out of `GET /<client>/<replica>/v1/realtime?session=<id>...`."""
    path = head.split(b" ", 2)[1].decode()
    place, _, query = path.partition("?")
    _, client, replica, *_ = place.split("/")
    values = dict(pair.partition("=")[::2] for pair in query.split("&"))
    return client, replica, values["session"]
