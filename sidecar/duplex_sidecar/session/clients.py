"""The client of a session: who is connected, what it said and nobody has heard yet, what it hears.

At most one at a time. A newer connection replaces the one before; what the old one said and nobody
has taken yet is dropped with it, since it sends it again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from duplex_sidecar.protocol.commands import Command
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Event, Failure
from duplex_sidecar.session.ending import Ending
from duplex_sidecar.session.input import InputDesk
from duplex_sidecar.session.mailbox import Mailbox
from duplex_sidecar.session.outbox import Outbox

log = logging.getLogger(__name__)

Greet = Callable[[Outbox, int], Coroutine[None, None, None]]
"""Tells a new client (its outbox, its number) how the session stands and what it has missed."""


class Clients:
    """Of one session, which begins detached."""

    def __init__(
        self,
        session: str,
        desk: InputDesk,
        clock_s: Callable[[], float],
        wake: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """clock_s: what `attached_s` and `detached_s` are told in. wake: the session's task has to
        look. on_change: called when a client has come or gone."""
        self.session = session
        self._desk = desk
        self._clock_s = clock_s
        self._wake = wake
        self._on_change = on_change
        self._mailbox = Mailbox()
        self._room = asyncio.Event()
        """Those who wait for room in the mailbox may look again."""
        self._outbox: Outbox | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._count = 0
        self._over: Ending | None = None
        self.attached_s = clock_s()
        self.detached_s: float | None = self.attached_s

    @property
    def attached(self) -> bool:
        return self._outbox is not None

    def attach(self, greet: Greet, on_message: Callable[[], None]) -> "ClientAttachment":
        """A new client. on_message: as in `ClientAttachment`. Raises ClientError when the session
        is over."""
        self._require_running()
        self._count += 1
        if self._outbox is not None:
            self._outbox.fail(ErrorCode.SESSION_TAKEN_OVER)
        self._stop_greeting()
        self._mailbox.clear()
        self._room.set()
        outbox = self._outbox = Outbox()
        self.attached_s, self.detached_s = self._clock_s(), None
        self._greeting = asyncio.create_task(_greeted(greet, outbox, self._count))
        self._desk.new_client()
        self._on_change()
        return ClientAttachment(self, self._count, outbox, on_message)

    def offer(self, attachment: int, command: Command) -> bool:
        """False: the mailbox is full, wait for `room`. Raises ClientError (taken over, parked,
        ended)."""
        self._require_running()
        if attachment != self._count:
            raise ClientError(ErrorCode.SESSION_TAKEN_OVER)
        if self._mailbox.full:
            return False
        if self._mailbox.put(command, self._desk.missing_bytes):
            self._wake()
        return True

    async def room(self) -> None:
        """Wait until the mailbox is worth another look."""
        self._room.clear()
        await self._room.wait()

    def take(self) -> list[Command]:
        """What was said next; see `Mailbox.take`. Empty: those who wait for room look again."""
        run = self._mailbox.take(self._desk.sample_bytes)
        if not run:
            self._room.set()
        return run

    def detach(self, attachment: int) -> None:
        """That client is gone, unless it was replaced; what it has submitted still counts."""
        if attachment != self._count or self._outbox is None:
            return
        self._outbox = None
        self.detached_s = self._clock_s()
        self._stop_greeting()
        self._on_change()

    def publish(self, event: Event) -> None:
        if self._outbox is not None:
            self._outbox.put(event)

    def finish(self, ending: Ending) -> None:
        """The session is over: its farewell, and nothing after it. Never fails, never waits."""
        self._over = ending
        self._stop_greeting()
        if self._outbox is not None:
            self._outbox.finish(ending.farewell())
        self._mailbox.clear()
        self._room.set()

    def _require_running(self) -> None:
        if self._over is not None:
            raise ClientError(self._over.code, self._over.detail)

    def _stop_greeting(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()


class ClientAttachment:
    """`session.port.Attachment` of one session."""

    def __init__(
        self,
        clients: Clients,
        number: int,
        outbox: Outbox,
        on_message: Callable[[], None] = lambda: None,
    ) -> None:
        """on_message: called for each command that the session has taken."""
        self._clients = clients
        self._number = number
        self._outbox = outbox
        self._on_message = on_message

    @property
    def session(self) -> str:
        return self._clients.session

    async def submit(self, command: Command) -> None:
        while not self._clients.offer(self._number, command):
            await self._clients.room()
        self._on_message()

    def refuse(self, failure: Failure) -> None:
        self._outbox.put(failure)

    async def next_event(self) -> Event | None:
        return await self._outbox.next()

    async def detach(self) -> None:
        self._clients.detach(self._number)


async def _greeted(greet: Greet, outbox: Outbox, number: int) -> None:
    """A client that cannot be greeted is told to dial again; it would wait for ever."""
    try:
        await greet(outbox, number)
    except Exception:
        log.exception("client cannot be greeted")
        outbox.fail(ErrorCode.NOT_READY)
