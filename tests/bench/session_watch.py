"""A user's watch of one namespace's sessions, cheap enough for thousands of changes a second."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Self

import aiohttp
import kopf
import msgspec

from duplex_operator.kube.resources import SESSIONS

WATCH_S = 3_600


class _Placement(msgspec.Struct):
    pod_uid: str = msgspec.field(name="podUID")


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    placement: _Placement | None = None
    conditions: list[_Condition] = []


class _Meta(msgspec.Struct):
    name: str
    uid: str


class _Session(msgspec.Struct):
    metadata: _Meta
    status: _Status = msgspec.field(default_factory=_Status)


class _Event(msgspec.Struct):
    type: str
    object: _Session


_DECODER = msgspec.json.Decoder(_Event)


class SessionWatch:
    """Use it as a context. Times are monotonic seconds.

    uids: by name. placed: (uid, pod's uid) to when it was first seen there. first_true: (name,
    condition) to when it was first seen True."""

    def __init__(self, connection: kopf.ConnectionInfo, namespace: str) -> None:
        self._connection = connection
        self._path = SESSIONS.path(namespace)
        self._task: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        self.uids: dict[str, str] = {}
        self.placed: dict[tuple[str, str], float] = {}
        self.first_true: dict[tuple[str, str], float] = {}
        self.changes: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def until(self, names: "list[str]", condition: str, within_s: float) -> float:
        """When the last of them was first seen so. Raises TimeoutError that says how many."""
        deadline = time.monotonic() + within_s
        left = set(names)
        while True:
            left = {name for name in left if (name, condition) not in self.first_true}
            if not left:
                return max(self.first_true[name, condition] for name in names)
            await self._news(deadline, f"{len(left)} of {len(names)} sessions not {condition}")

    async def moved(self, uids: "list[str]", since_s: float, within_s: float) -> dict[str, float]:
        """By uid, when it was first seen on a pod where it was not before that time."""
        deadline = time.monotonic() + within_s
        wanted, found = set(uids), dict[str, float]()
        while True:
            for (uid, _), at in self.placed.items():
                if uid in wanted and at > since_s:
                    found.setdefault(uid, at)
            if len(found) == len(wanted):
                return found
            await self._news(deadline, f"{len(wanted) - len(found)} sessions were not moved")

    async def _news(self, deadline: float, what: str) -> None:
        assert self._task is not None
        if self._task.done():
            self._task.result()
        self._came.clear()
        try:
            async with asyncio.timeout_at(
                asyncio.get_running_loop().time() + max(0.0, deadline - time.monotonic())
            ):
                await self._came.wait()
        except TimeoutError:
            raise TimeoutError(what) from None

    async def _watch(self) -> None:
        """The server ends a watch when its kind has just been installed, too: a new one begins with
        all that is there."""
        connection = self._connection
        async with aiohttp.ClientSession(
            base_url=connection.server,
            headers=connection.as_http_headers(),
            connector=aiohttp.TCPConnector(ssl=connection.as_ssl_context()),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as http:
            try:
                while True:
                    await self._follow(http)
            finally:
                self._came.set()

    async def _follow(self, http: aiohttp.ClientSession) -> None:
        query = {"watch": "true", "timeoutSeconds": str(WATCH_S)}
        async with http.get(self._path, params=query) as answer:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(_DECODER.decode(line))
                self._came.set()

    def _take(self, event: _Event) -> None:
        now, session = time.monotonic(), event.object
        name, uid = session.metadata.name, session.metadata.uid
        self.changes[event.type] += 1
        self.uids[name] = uid
        if session.status.placement is not None:
            self.placed.setdefault((uid, session.status.placement.pod_uid), now)
        for condition in session.status.conditions:
            if condition.status == "True":
                self.first_true.setdefault((name, condition.type), now)
