"""One request to the API server: throttled, bounded, counted, and tried again while that can help.

Throttling, timeouts and server errors are tried again here, and nowhere else.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import kopf
import msgspec

from duplex_operator.kube.errors import ApiError, NotLeadingError, UnavailableError, failure_of
from duplex_operator.kube.resources import Resource
from duplex_operator.lines import LineTooLongError, lines_of

REQUEST_TIMEOUT_S = 10.0
ATTEMPTS = 4
LONGEST_RETRY_AFTER_S = 10.0
STREAM_SILENCE_S = 90.0
"""Where anything changes bookmarks come every minute: a watch without a word for so long is begun
anew, lest its connection is dead and nobody has noticed."""
MOST_LINE_BYTES = 16 * 1_048_576
REQUESTS_AT_ONCE = 48
TLS_CLOSE_S = 0.25


class Throttle:
    """At most `per_s` requests a second on average, `burst` at once. Waits, never refuses."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._next_s = 0.0

    def delay_s(self) -> float:
        """Takes one turn; how long to wait for it."""
        now = self._clock()
        self._next_s = max(self._next_s, now - self._burst / self._per_s) + 1 / self._per_s
        return max(0.0, self._next_s - now)


class ApiConnection:
    """reconnect: how the server is reached by now, asked when it knows us no more. requests: counts
    by "verb resource", each attempt one."""

    def __init__(
        self,
        server: kopf.ConnectionInfo,
        *,
        reconnect: Callable[[], kopf.ConnectionInfo] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        requests_per_s: float = 400.0,
    ) -> None:
        self._server = server
        self._reconnect = reconnect
        self._sleep = sleep
        self._throttle = Throttle(requests_per_s, 400, clock)
        self._gate = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self.requests: Counter[str] = Counter()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            # Nobody waits for the end of TLS of a connection whose call was cancelled.
            await asyncio.sleep(TLS_CLOSE_S)

    async def ask(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        may_send: Callable[[], bool] = lambda: True,
    ) -> bytes:
        """The answer's content. verb: what it counts as. timeout_s: of one attempt. may_send: asked
        before each. Raises ApiError, NotLeadingError where it may not be sent (any more)."""
        last: _RetryError | None = None
        for attempt in range(ATTEMPTS):
            if last is not None:
                await self._sleep(_backoff_s(attempt, last.retry_after_s))
            if not may_send():
                raise NotLeadingError
            await self._sleep(self._throttle.delay_s())
            self.requests[f"{verb} {resource.plural}"] += 1
            try:
                return await self._once(method, path, body, query or {}, timeout_s)
            except _RetryError as error:
                last = error
        assert last is not None
        failure = last.failure
        raise UnavailableError(failure.status, failure.reason, failure.message)

    @asynccontextmanager
    async def stream(
        self, verb: str, resource: Resource, path: str, query: Mapping[str, str]
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Lines of an answer without an end, once it has begun; tried once. A stream that falls
        silent ends as one that the server ends. Raises ApiError, in mid-stream too."""
        self.requests[f"{verb} {resource.plural}"] += 1
        timeout = aiohttp.ClientTimeout(
            total=None, connect=REQUEST_TIMEOUT_S, sock_read=STREAM_SILENCE_S
        )
        begun = False
        session = self._opened()
        try:
            async with session.get(path, params=query, timeout=timeout) as answer:
                if answer.status != 200:
                    failure = failure_of(answer.status, await answer.content.read(MOST_LINE_BYTES))
                    raise await self._reconnected(failure, session)
                try:
                    begun = True
                    yield lines_of(answer.content, MOST_LINE_BYTES)
                finally:
                    # In mid-stream nobody waits for the end of TLS.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()
        except (aiohttp.ClientError, TimeoutError, OSError, LineTooLongError) as error:
            if begun and isinstance(error, TimeoutError):
                return
            raise UnavailableError(0, "Unreachable", type(error).__name__) from error

    async def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        timeout_s: float,
    ) -> bytes:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            async with self._gate:
                session = self._opened()
                async with session.request(
                    method,
                    path,
                    params=query,
                    data=None if body is None else msgspec.json.encode(body),
                    headers={"Content-Type": kind, "Accept": "application/json"},
                    timeout=aiohttp.ClientTimeout(total=timeout_s, connect=REQUEST_TIMEOUT_S),
                ) as answer:
                    content = await answer.read()
                    retry_after = answer.headers.get("Retry-After", "")
                    status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            unreachable = UnavailableError(0, "Unreachable", type(error).__name__)
            raise _RetryError(unreachable) from error
        if status < 300:
            return content
        failure = failure_of(status, content)
        if status == 401 and self._reconnect is not None:
            raise _RetryError(await self._reconnected(failure, session))
        if status == 429 or status >= 500:
            raise _RetryError(failure, retry_after)
        raise failure

    async def _reconnected(self, failure: ApiError, session: aiohttp.ClientSession) -> ApiError:
        """A service account's token is replaced on disk about every hour: the failure, after the
        connection was made anew where that is why. session: which was refused. Of many calls with
        the old token the first one does it: the others must not end what goes over the new one."""
        if failure.status == 401 and self._reconnect is not None and session is self._session:
            self._server = self._reconnect()
            await self.close()
        return failure

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                base_url=self._server.server,
                headers=self._server.as_http_headers(),
                # Calls are bounded by the gate; watches stand beside them.
                connector=aiohttp.TCPConnector(ssl=self._server.as_ssl_context(), limit=0),
            )
        return self._session


class _RetryError(Exception):
    def __init__(self, failure: ApiError, retry_after: str = "") -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0


def _backoff_s(attempt: int, asked_s: float) -> float:
    grown = 0.1 * 2**attempt * (0.5 + random.random())
    return min(max(asked_s, grown), LONGEST_RETRY_AFTER_S)
