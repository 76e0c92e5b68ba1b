"""Events on their way to one client: ordered, bounded, and joined to a replay without a seam.

Live events that arrive while the replay is still being read wait behind it; an event that the
replay already holds is dropped by its sequence number. A client that does not read loses its
connection, never an event: it resumes from the journal.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from duplex_sidecar.ledger.journal import MAX_JOURNAL_BYTES
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed, Event, Sequenced

MAX_WAITING_EVENTS = 4096
MAX_WAITING_BYTES = 2 * MAX_JOURNAL_BYTES
"""A whole journal is replayed at once: it must fit, with what happens meanwhile."""
_PLAIN_EVENT_BYTES = 256


def event_bytes(event: Event) -> int:
    """Memory that an event waiting here is counted with."""
    if isinstance(event, Sequenced) and isinstance(event.body, Audio):
        return _PLAIN_EVENT_BYTES + len(event.body.pcm_s16le)
    return _PLAIN_EVENT_BYTES


class Outbox:
    """Single producer side (the session), single consumer (the door's writer)."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._held: deque[Event] | None = deque()
        """Live events that wait for the replay; None once it is there."""
        self._bytes = 0
        self._last_sequence = 0
        self._failure: ErrorCode | None = None
        self._ended = False
        self._wake = asyncio.Event()

    def release(self, replay: Sequence[Sequenced], opening: Sequence[Event]) -> None:
        """The replay is complete: `opening`, then `replay`, then what came in meanwhile."""
        held, self._held = self._held or (), None
        self._bytes = 0
        for event in (*opening, *replay, *held):
            self._append(event)

    def put(self, event: Event) -> None:
        """Queue an event. Too much waiting fails the outbox with `slow_consumer`."""
        if self._held is None:
            self._append(event)
        elif self._failure is None:
            self._held.append(event)
            self._count(event, len(self._held))

    def finish(self, last: Iterable[Event]) -> None:
        """No replay any more, and nothing after `last`."""
        if self._held is not None:
            self.release((), ())
        for event in last:
            self._append(event)
        self._ended = True
        self._wake.set()

    def fail(self, code: ErrorCode) -> None:
        """Drop what waits and end the connection with `code`."""
        self._failure = code
        self._events.clear()
        if self._held is not None:
            self._held.clear()
        self._bytes = 0
        self._wake.set()

    async def next(self) -> Event | None:
        """The next event; None after `Closed` was taken. Raises ClientError once failed."""
        while True:
            if self._failure is not None:
                raise ClientError(self._failure)
            if self._events:
                event = self._events.popleft()
                self._bytes -= event_bytes(event)
                return event
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()

    def _append(self, event: Event) -> None:
        if self._failure is not None or self._ended:
            return
        if isinstance(event, Sequenced):
            if event.sequence <= self._last_sequence:
                return
            self._last_sequence = event.sequence
        self._events.append(event)
        if isinstance(event, Closed):
            self._ended = True
        self._wake.set()
        self._count(event, len(self._events))

    def _count(self, event: Event, waiting: int) -> None:
        self._bytes += event_bytes(event)
        if waiting > MAX_WAITING_EVENTS or self._bytes > MAX_WAITING_BYTES:
            self.fail(ErrorCode.SLOW_CONSUMER)
