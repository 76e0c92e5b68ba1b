"""Events on their way to one client: ordered, bounded, and joined to a replay without a seam.

Live events that arrive while the replay is still being read wait behind it; an event that the
replay already holds is dropped by its sequence number. A client that does not read loses its
connection, never an event: it resumes from the journal.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed, Event, Sequenced

MAX_WAITING_EVENTS = 4096
MAX_WAITING_BYTES = 8 * 1024 * 1024
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
        self._held: list[Event] | None = []
        self._bytes = 0
        self._last_sequence = 0
        self._failure: ErrorCode | None = None
        self._ended = False
        self._wake = asyncio.Event()

    def release(self, replay: Sequence[Sequenced], opening: Sequence[Event]) -> None:
        """The replay is complete: `opening`, then `replay`, then what came in meanwhile."""
        held, self._held = self._held or [], None
        for event in (*opening, *replay, *held):
            self._append(event)

    def put(self, event: Event) -> None:
        """Queue an event. Too much waiting fails the outbox with `slow_consumer`."""
        if self._failure is not None or self._ended:
            return
        if self._held is not None:
            self._held.append(event)
            if len(self._held) > MAX_WAITING_EVENTS:
                self.fail(ErrorCode.SLOW_CONSUMER)
            return
        self._append(event)

    def _append(self, event: Event) -> None:
        if isinstance(event, Sequenced):
            if event.sequence <= self._last_sequence:
                return
            self._last_sequence = event.sequence
        self._events.append(event)
        self._bytes += event_bytes(event)
        if len(self._events) > MAX_WAITING_EVENTS or self._bytes > MAX_WAITING_BYTES:
            self.fail(ErrorCode.SLOW_CONSUMER)
        if isinstance(event, Closed):
            self._ended = True
        self._wake.set()

    def fail(self, code: ErrorCode) -> None:
        """Drop what waits and end the connection with `code`."""
        self._failure = code
        self._events.clear()
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
