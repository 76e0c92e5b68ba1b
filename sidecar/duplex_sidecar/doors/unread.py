"""What a connection has received and nobody has taken yet: how much of it, since when. No I/O.

The libraries bound a message. Below that bound a client may begin as many large ones as it has
connections, or one of empty fragments without number, and never end it; it need not even be known.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, Protocol

from duplex_sidecar.doors.openai_wire import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES

FREE_BYTES: Final = MAX_CONTROL_BYTES
"""Read of any connection, a stranger's too, whose first message is no longer."""
MOST_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""A message in as many fragments as make any sense."""
READ_BYTES: Final = 8 * 1024
"""At a time: as much can come that was not asked for."""
ROOM_TIMEOUT_S = 10.0
"""Well below the time in which a ping has to be answered: while nothing is read, no answer is."""
MESSAGE_TIMEOUT_S = 30.0
"""From a message's beginning to its end. A single frame has no longer as it is: between its bytes
no ping can be answered."""
LOOK_EVERY_S = 0.25
"""Whether there is room again."""
_MESSAGE_OBJECTS_BYTES: Final = 256
_FRAGMENT_OBJECTS_BYTES: Final = 64
"""About what it takes to keep one, besides its bytes."""
_EXTENSION: Final = "duplex.unread"


class Holder(Protocol):
    """Whoever keeps an account of memory."""

    def fits(self, more_bytes: int) -> bool:
        """Whether there is room for so many more."""
        ...

    def change(self, by_bytes: int) -> None:
        """So many more are there, or fewer."""
        ...


class Overdue(StrEnum):
    """Why reading cannot go on."""

    NO_ROOM = "no room for so long a message came in time"
    TOO_SLOW = "a message was not ended in time"


class Unread:
    """Of one connection. It is a stranger's until `admit`."""

    def __init__(self, read_on: Callable[[], None]) -> None:
        """read_on: called when more may be read than before."""
        self._read_on = read_on
        self._holder: Holder | None = None
        self._admitted = False
        self._closed = False
        self._whole: deque[int] = deque()
        """Bytes of messages that nobody has taken, oldest first."""
        self._whole_bytes = 0
        self._fragments_bytes = 0
        """Of the message that is not whole."""
        self._rest_bytes = 0
        """Behind the last frame. Of a read in which a frame ended nothing counts: how much of it is
        behind that frame, nobody says."""
        self._frame_ended = False
        self._counted_bytes = 0
        self._began_s: float | None = None
        self._stopped_s: float | None = None
        self._overdue: Overdue | None = None
        self._is_overdue = asyncio.Event()

    # --- for who serves the connection ----------------------------------------------------------

    def count_for(self, holder: Holder) -> None:
        """What is there, and what comes, is the holder's until the connection is closed."""
        if not self._closed:
            self._holder = holder
            holder.change(self._counted_bytes)

    def admit(self) -> None:
        """The client is known: from now on it may send long messages."""
        self._admitted = True
        self._began_s = None
        self._read_on()

    async def overdue(self) -> Overdue:
        """Returns when the connection has to be ended, and why."""
        await self._is_overdue.wait()
        assert self._overdue is not None
        return self._overdue

    # --- for who reads --------------------------------------------------------------------------

    @property
    def may_read(self) -> bool:
        """Whether there is room for another `READ_BYTES`."""
        if self._counted_bytes <= FREE_BYTES:
            return True
        if not self._admitted or self._counted_bytes > MOST_BYTES:
            return False
        return self._holder is None or self._holder.fits(READ_BYTES)

    @property
    def is_long(self) -> bool:
        """Whether the message that is coming is longer than one that any client may send."""
        return self._fragments_bytes > FREE_BYTES

    def frame(self, size_bytes: int) -> None:
        """One that is a message, or a part of it, has come whole."""
        self._frame_ended = True
        self._fragments_bytes += size_bytes + _FRAGMENT_OBJECTS_BYTES

    def other_frame(self) -> None:
        """One that is none, or the opening request."""
        self._frame_ended = True

    def message(self, *, kept: bool) -> None:
        """The frames are a message now. kept: until it is taken."""
        if kept:
            self._whole.append(self._fragments_bytes + _MESSAGE_OBJECTS_BYTES)
            self._whole_bytes += self._whole[-1]
        self._fragments_bytes = 0
        self._began_s = None

    def read(self, size_bytes: int) -> None:
        """So much has come, and the frames that ended in it have been told of."""
        self._rest_bytes = 0 if self._frame_ended else self._rest_bytes + size_bytes
        self._frame_ended = False
        self._stopped_s = None
        self._reckon()

    def taken(self) -> None:
        """The oldest message is somebody else's. What is behind it has its time from now on."""
        self._whole_bytes -= self._whole.popleft()
        self._began_s = None
        self._reckon()

    def closed(self) -> None:
        """The connection is gone, and all that it had."""
        self._closed = True
        if self._holder is not None:
            self._holder.change(-self._counted_bytes)
            self._holder = None

    def look(self, now_s: float) -> float | None:
        """Seconds until to look again; None: not before something happens. To be asked after each
        of the others."""
        if not self._admitted or self._whole or self._overdue is not None:
            return None  # it waits for who serves the connection, who has bounds of their own
        if self._fragments_bytes + self._rest_bytes == 0:
            self._began_s = None
        elif self._began_s is None:
            self._began_s = now_s
        if self.may_read:
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        if self._stopped_s is not None and now_s >= self._stopped_s + ROOM_TIMEOUT_S:
            return self._end(Overdue.NO_ROOM)
        if self._began_s is not None and now_s >= self._began_s + MESSAGE_TIMEOUT_S:
            return self._end(Overdue.TOO_SLOW)
        if self._stopped_s is not None:
            return LOOK_EVERY_S
        return None if self._began_s is None else self._began_s + MESSAGE_TIMEOUT_S - now_s

    def _end(self, why: Overdue) -> None:
        self._overdue = why
        self._is_overdue.set()

    def _reckon(self) -> None:
        there = self._fragments_bytes + self._rest_bytes + self._whole_bytes
        if self._holder is not None:
            self._holder.change(there - self._counted_bytes)
        self._counted_bytes = there


def offer(scope: Any, unread: Unread) -> None:
    """Put it where `unread_of` finds it, as an extension of the connection's ASGI scope."""
    scope["extensions"][_EXTENSION] = {"unread": unread}


def unread_of(scope: Mapping[str, Any]) -> Unread:
    """Of a connection that a `DoorWebSocket` has."""
    unread: Unread = scope["extensions"][_EXTENSION]["unread"]
    return unread
