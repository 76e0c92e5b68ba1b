"""One caller at a time for a session: what opens, parks, ends or erases it never crosses."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class _Door:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0


class Turnstile:
    """Those who wait go in the order in which they came."""

    def __init__(self) -> None:
        self._doors: dict[str, _Door] = {}

    @asynccontextmanager
    async def only_caller(self, session: str) -> AsyncGenerator[None]:
        door = self._doors.setdefault(session, _Door())
        door.callers += 1
        try:
            async with door.lock:
                yield
        finally:
            door.callers -= 1
            if door.callers == 0:
                del self._doors[session]
