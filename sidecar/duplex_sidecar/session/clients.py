"""The client of a session: who is connected, what it said and nobody has heard yet, what it hears.

At most one at a time. A newer connection replaces the one before; what the old one said and nobody
has taken yet is dropped with it, since it sends it again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from duplex_sidecar.protocol.commands import Command
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Event, Failure
from duplex_sidecar.session.mailbox import Mailbox
from duplex_sidecar.session.outbox import Outbox

log = logging.getLogger(__name__)

Greet = Callable[[Outbox, int], Coroutine[None, None, None]]
"""Tells a new client (its outbox, its number) how the session stands and what it has missed."""


class Host(Protocol):
    """The session that a client is connected to."""

    @property
    def session(self) -> str: ...

    def offer(self, attachment: int, command: Command) -> bool: ...

    async def room(self) -> None: ...

    def detach(self, attachment: int) -> None: ...


class ClientAttachment:
    """`session.port.Attachment` of one actor."""

    def __init__(
        self,
        host: Host,
        number: int,
        outbox: Outbox,
        on_message: Callable[[], None] = lambda: None,
    ) -> None:
        """on_message: called for each command that the session has taken."""
        self._host = host
        self._number = number
        self._outbox = outbox
        self._on_message = on_message

    @property
    def session(self) -> str:
        return self._host.session

    async def submit(self, command: Command) -> None:
        while not self._host.offer(self._number, command):
            await self._host.room()
        self._on_message()

    def refuse(self, failure: Failure) -> None:
        self._outbox.put(failure)

    async def next_event(self) -> Event | None:
        return await self._outbox.next()

    async def detach(self) -> None:
        self._host.detach(self._number)


class Clients:
    """clock_s: what `attached_s` and `detached_s` are told in; a session begins detached."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._mailbox = Mailbox()
        self._room = asyncio.Event()
        """Those who wait for room in the mailbox may look again."""
        self._outbox: Outbox | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._count = 0
        self.attached_s = clock_s()
        self.detached_s: float | None = self.attached_s

    @property
    def attached(self) -> bool:
        return self._outbox is not None

    def attach(self, greet: Greet) -> tuple[int, Outbox]:
        """A new client: its number and outbox."""
        self._count += 1
        if self._outbox is not None:
            self._outbox.fail(ErrorCode.SESSION_TAKEN_OVER)
        self._stop_greeting()
        self._mailbox.clear()
        self._room.set()
        outbox = self._outbox = Outbox()
        self.attached_s, self.detached_s = self._clock_s(), None
        self._greeting = asyncio.create_task(_greeted(greet, outbox, self._count))
        return self._count, outbox

    def has_room(self, attachment: int) -> bool:
        """Raises ClientError when that client was replaced."""
        if attachment != self._count:
            raise ClientError(ErrorCode.SESSION_TAKEN_OVER)
        return not self._mailbox.full

    async def room(self) -> None:
        """Wait until the mailbox is worth another look."""
        self._room.clear()
        await self._room.wait()

    def put(self, command: Command, missing_bytes: int) -> bool:
        """Whether the session has to look now; see `Mailbox.put`."""
        return self._mailbox.put(command, missing_bytes)

    def take(self, sample_bytes: int) -> list[Command]:
        """What was said next; see `Mailbox.take`. Empty: those who wait for room look again."""
        run = self._mailbox.take(sample_bytes)
        if not run:
            self._room.set()
        return run

    def detach(self, attachment: int) -> bool:
        """That client is gone; what it has submitted still counts. False: it was replaced."""
        if attachment != self._count or self._outbox is None:
            return False
        self._outbox = None
        self.detached_s = self._clock_s()
        self._stop_greeting()
        return True

    def publish(self, event: Event) -> None:
        if self._outbox is not None:
            self._outbox.put(event)

    def finish(self, last: Sequence[Event]) -> None:
        """The session is over: `last`, and nothing after it. Never fails, never waits."""
        self._stop_greeting()
        if self._outbox is not None:
            self._outbox.finish(last)
        self._mailbox.clear()
        self._room.set()

    def _stop_greeting(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()


async def _greeted(greet: Greet, outbox: Outbox, number: int) -> None:
    """A client that cannot be greeted is told to dial again; it would wait for ever."""
    try:
        await greet(outbox, number)
    except Exception:
        log.exception("client cannot be greeted")
        outbox.fail(ErrorCode.NOT_READY)
