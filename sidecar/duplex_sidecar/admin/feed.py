"""The feed: what happens on this replica, line by line, to whoever listens.

Nothing waits for a listener: each is told how things stand when it takes the next lines, so what it
was too slow for is skipped and memory stays bounded. One that takes nothing at all is dropped.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from duplex_sidecar.admin.views import departed_line, feed_line
from duplex_sidecar.session.roster import Departed, Roster

log = logging.getLogger(__name__)

BEAT_S = 1.0
SESSION_EVERY_S = 1.0
"""At most so often a session's numbers are told; a phase is told at once."""
SEND_TIMEOUT_S = 10.0
MAX_LISTENERS = 16

Line = dict[str, Any]


class FeedCursor:
    """What one listener has been told, and what it is to be told now. Pure."""

    def __init__(self) -> None:
        self._told: dict[str, Line] = {}
        self._told_at_s: dict[str, float] = {}
        self._departures = 0
        self._pod: Line = {}
        self._beat_at_s = float("-inf")

    def lines(
        self,
        now_s: float,
        pod: Line,
        live: Mapping[str, Line],
        departed: Mapping[str, Departed],
    ) -> list[Line]:
        """In this order: departures, sessions, the pod, the beat. pod: the first is the hello."""
        lines: list[Line] = [] if self._pod else [pod]
        for session, left in departed.items():
            if left.number > self._departures:
                lines.append(departed_line(session, left))
                self._forget(session)
        self._departures = max(
            (left.number for left in departed.values()), default=self._departures
        )
        for session in self._told.keys() - live.keys():
            self._forget(session)
        for session, line in live.items():
            if self._is_news(now_s, session, line):
                lines.append(line)
                self._told[session], self._told_at_s[session] = line, now_s
        if self._pod and pod != self._pod:
            changed = {name: pod[name] for name in ("ready", "ledgerAway", "draining", "freeSlots")}
            lines.append({"kind": "pod", **changed})
        self._pod = pod
        if now_s - self._beat_at_s >= BEAT_S:
            lines.append({"kind": "beat"})
            self._beat_at_s = now_s
        return lines

    def _is_news(self, now_s: float, session: str, line: Line) -> bool:
        told = self._told.get(session)
        if told is None or (told["phase"], told["fence"]) != (line["phase"], line["fence"]):
            return True
        return told != line and now_s - self._told_at_s[session] >= SESSION_EVERY_S

    def _forget(self, session: str) -> None:
        self._told.pop(session, None)
        self._told_at_s.pop(session, None)


class Feed:
    """pod: the hello line as it would be now."""

    def __init__(self, roster: Roster, pod: Callable[[], Line]) -> None:
        self._roster = roster
        self._pod = pod
        self._closed = False
        self._listeners = 0

    @property
    def full(self) -> bool:
        return self._listeners >= MAX_LISTENERS

    def close(self) -> None:
        """The replica ends: all listeners are let go."""
        self._closed = True
        self._roster.changed()

    async def pour(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Lines for one listener, until the replica ends. Raises TimeoutError when it does not take
        them."""
        cursor = FeedCursor()
        self._listeners += 1
        try:
            with self._roster.watched() as news:
                while not self._closed:
                    news.clear()
                    lines = self._lines(cursor)
                    if lines:
                        async with asyncio.timeout(SEND_TIMEOUT_S):
                            await write(b"".join(lines))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(BEAT_S):
                            await news.wait()
        finally:
            self._listeners -= 1

    def _lines(self, cursor: FeedCursor) -> list[bytes]:
        live = {name: feed_line(entry.actor) for name, entry in self._roster.live.items()}
        lines = cursor.lines(time.monotonic(), self._pod(), live, self._roster.departed)
        stamp = {"changed_ms": time.time_ns() // 1_000_000}
        return [
            msgspec.json.encode(line | stamp if line["kind"] == "session" else line) + b"\n"
            for line in lines
        ]


class FeedResponse(Response):
    """The feed as an HTTP answer without end."""

    media_type = "application/x-ndjson"

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        pouring = asyncio.create_task(self._feed.pour(write))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({pouring, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pouring, leaving):
                task.cancel()
            outcome, _ = await asyncio.gather(pouring, leaving, return_exceptions=True)
        if isinstance(outcome, TimeoutError):
            log.warning("a listener of the feed takes nothing and is dropped")
        elif isinstance(outcome, Exception):
            # The answer ends without its end: the listener sees it broken off and asks again.
            log.error("the feed broke off", exc_info=outcome)
        elif outcome is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
