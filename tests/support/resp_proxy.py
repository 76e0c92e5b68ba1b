"""A proxy between one replica and its ledger that understands RESP: it pairs commands and replies,
records both with their times, and loses, delays or keeps back what a plan says.

One Unix socket a replica. Whatever the server was sent is recorded with its answer, also when the
replica is gone by then: a write that nobody waits for may be executed all the same.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from support.observing import Observer

from duplex_sidecar.history.commands import CommandFacts, facts_of
from duplex_sidecar.history.observations import Command
from duplex_sidecar.ledger import scripts
from duplex_sidecar.ledger.call import ScriptName

Value = bytes | int | None | list["Value"] | Exception
DRAIN_S = 2.0
"""How long answers are still waited for once the replica is gone."""
LIMIT_BYTES = 64 * 1024 * 1024


class Deed(StrEnum):
    PASS = "pass"
    CUT = "cut"
    """The connection ends here: the command is not sent, or its reply not passed on."""
    LATE = "late"
    """The connection ends here; the command is kept and sent when `send_late` is called."""


class Plan:
    """What happens to each command and reply. May wait; a proxy's connections do not wait for each
    other. This one lets everything pass."""

    async def before(self, command: "Seen") -> Deed:
        return Deed.PASS

    async def after(self, command: "Seen") -> Deed:
        return Deed.PASS


@dataclass
class Seen:
    """A command under way. nth: counts commands of its name in this proxy, from 1."""

    facts: CommandFacts
    raw: bytes
    connection: int
    number: int
    nth: int
    seen_ns: int
    sent: bool = False
    executed_ns: int | None = None
    replied_ns: int | None = None
    reply: tuple[str, ...] = ()
    recorded: bool = False


@dataclass(eq=False)
class _Link:
    """One connection of the replica and its own one to the server."""

    number: int
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    waiting: deque[Seen] = field(default_factory=deque[Seen])
    gone: bool = False

    def cut(self) -> None:
        self.gone = True
        self.near.transport.abort()


class RespProxy:
    """Use as `async with`. plan, upstream: may be replaced at any time. shut: connections are
    refused."""

    def __init__(
        self, upstream: str, path: Path, replica: str, observer: Observer, plan: Plan | None = None
    ) -> None:
        self.upstream = upstream
        self._path = path
        self._replica = replica
        self.observer = observer
        self.plan = plan or Plan()
        self._names = {scripts.sha1(name): str(name) for name in ScriptName}
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._number = 0
        self._nth: dict[str, int] = {}
        self._late: list[Seen] = []
        self.shut = False

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    async def __aenter__(self) -> "RespProxy":
        self._server = await asyncio.start_unix_server(
            self._serve, str(self._path), limit=LIMIT_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self.kill()
        # Who dialled before is served before: none is left half accepted.
        with suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(str(self._path))
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def kill(self) -> None:
        """As the end of the replica's process: all of its connections end at once, none begins.
        What was sent is sent."""
        self.shut = True
        for link in self._links:
            link.cut()

    @property
    def idle(self) -> bool:
        """No command waits for the server's answer."""
        return not any(link.waiting for link in self._links)

    async def send_late(self) -> None:
        """What was kept arrives now."""
        late, self._late = self._late, []
        for seen in late:
            reader, writer = await dialled(self.upstream)
            writer.write(seen.raw)
            seen.sent = True
            _, reply = await read_reply(reader)
            self._answered(seen, reply)
            self._record(seen)
            writer.close()

    # --- one connection ---------------------------------------------------------------------------

    async def _serve(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.shut:
            writer.transport.abort()
            return
        self._tasks.add(task)
        self._connections += 1
        number = self._connections
        try:
            far, far_writer = await dialled(self.upstream)
        except OSError:  # the server is away
            writer.transport.abort()
            self._tasks.discard(task)
            return
        link = _Link(number, writer, far_writer)
        if self.shut:
            link.cut()
        self._links.add(link)
        replies = asyncio.create_task(self._replies(link, far))
        try:
            await self._commands(link, near)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            link.gone = True
            writer.transport.abort()
            if link.waiting:
                await asyncio.wait({replies}, timeout=DRAIN_S)
            replies.cancel()
            await asyncio.gather(replies, return_exceptions=True)
            far_writer.transport.abort()
            for seen in link.waiting:
                self._record(seen)
            self._links.discard(link)
            self._tasks.discard(task)

    async def _commands(self, link: _Link, near: asyncio.StreamReader) -> None:
        while not link.gone:
            raw, words = await read_command(near)
            seen = self._see(link, raw, words)
            deed = Deed.CUT if link.gone else await self.plan.before(seen)
            if deed is not Deed.PASS or link.gone:
                if deed is Deed.LATE:
                    self._late.append(seen)
                else:
                    self._record(seen)
                link.cut()
                return
            seen.sent = True
            link.waiting.append(seen)
            link.far.write(raw)

    async def _replies(self, link: _Link, far: asyncio.StreamReader) -> None:
        try:
            while True:
                raw, reply = await read_reply(far)
                seen = link.waiting[0]
                self._answered(seen, reply)
                deed = Deed.CUT if link.gone else await self.plan.after(seen)
                if deed is Deed.PASS and not link.gone:
                    seen.replied_ns = self.observer.clock_ns()
                    link.near.write(raw)
                link.waiting.popleft()
                self._record(seen)
                if deed is not Deed.PASS:
                    link.cut()
                if link.gone and not link.waiting:
                    return
        except (OSError, asyncio.IncompleteReadError):
            link.cut()

    # --- records ----------------------------------------------------------------------------------

    def _see(self, link: _Link, raw: bytes, words: list[bytes]) -> Seen:
        script = self._names.get(words[1].decode()) if words[0].upper() == b"EVALSHA" else None
        facts = facts_of(words, script)
        self._number += 1
        nth = self._nth[facts.name] = self._nth.get(facts.name, 0) + 1
        now = self.observer.clock_ns()
        return Seen(facts, raw, link.number, self._number, nth, now)

    def _answered(self, seen: Seen, reply: Value) -> None:
        seen.executed_ns = self.observer.clock_ns()
        seen.reply = words_of(reply)

    def _record(self, seen: Seen) -> None:
        if seen.recorded:
            return
        seen.recorded = True
        facts = seen.facts
        self.observer.note(
            Command(
                replica=self._replica,
                connection=seen.connection,
                number=seen.number,
                name=facts.name,
                session=facts.session,
                fence=facts.fence,
                nonce=facts.nonce,
                operation=facts.operation,
                write=facts.write,
                arguments=facts.arguments,
                seen_ns=seen.seen_ns,
                sent=seen.sent,
                executed_ns=seen.executed_ns,
                replied_ns=seen.replied_ns,
                reply=seen.reply,
            )
        )


async def dialled(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a server at unix://PATH or redis://HOST:PORT."""
    if url.startswith("unix://"):
        return await asyncio.open_unix_connection(url.removeprefix("unix://"), limit=LIMIT_BYTES)
    host, _, port = url.removeprefix("redis://").partition(":")
    return await asyncio.open_connection(host, int(port), limit=LIMIT_BYTES)


# --- RESP2 ----------------------------------------------------------------------------------------


async def read_command(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """An array of strings: its bytes and its words. Raises IncompleteReadError at the end."""
    line = await reader.readuntil(b"\r\n")
    assert line[:1] == b"*", "clients send arrays"
    parts, words = [line], list[bytes]()
    for _ in range(int(line[1:])):
        head = await reader.readuntil(b"\r\n")
        data = await reader.readexactly(int(head[1:]) + 2)
        parts += (head, data)
        words.append(data[:-2])
    return b"".join(parts), words


async def read_reply(reader: asyncio.StreamReader) -> tuple[bytes, Value]:
    """One value of any kind: its bytes, and what they say. Raises IncompleteReadError."""
    line = await reader.readuntil(b"\r\n")
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+":
            return line, rest
        case b"-":
            return line, Exception(rest.decode("utf-8", "replace"))
        case b":":
            return line, int(rest)
        case b"$":
            if int(rest) < 0:
                return line, None
            data = await reader.readexactly(int(rest) + 2)
            return line + data, data[:-2]
        case b"*":
            raw, values = [line], list[Value]()
            for _ in range(int(rest)):
                part, value = await read_reply(reader)
                raw.append(part)
                values.append(value)
            return b"".join(raw), values
        case _:
            raise AssertionError(f"not RESP2: {line[:20]!r}")


def words_of(reply: Value) -> tuple[str, ...]:
    """The first words of a reply; an error as its code behind a minus."""
    if isinstance(reply, Exception):
        return (f"-{str(reply).split(' ')[0]}",)
    values = reply[:6] if isinstance(reply, list) else [reply]
    return tuple(_word(value) for value in values)


def _word(value: Value) -> str:
    if isinstance(value, bytes):
        return value[:80].decode("utf-8", "replace")
    return "..." if isinstance(value, list) else str(value)
