"""The one way out to Kubernetes: plain JSON over HTTPS, bounded, counted, with typed failures.

Every write names what it was decided on (a resourceVersion or a uid), so a decision on an old view
is refused by the API server instead of undoing somebody's change. Throttling, timeouts and server
errors are tried again here, and nowhere else.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast, overload

import aiohttp
import kopf
import msgspec

from duplex_api.constants import API_GROUP, API_VERSION_NAME, POOL_PLURAL, SESSION_PLURAL
from duplex_operator.json_text import Event, Page, decoded
from duplex_operator.lines import LineTooLongError, lines_of
from duplex_operator.names import FIELD_MANAGER
from duplex_operator.objects import ObjectKey, RawObject
from duplex_operator.texts import MOST_NOTE_BYTES, MOST_WORD_BYTES, cut_bytes

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
LIST_TIMEOUT_S = 60.0
ATTEMPTS = 4
LONGEST_RETRY_AFTER_S = 10.0
LONGEST_MESSAGE = 1024
LIST_PAGE = 100
"""An object may have 1.5 MiB, and a page of the largest has to fit into the operator's memory."""
WATCH_S = 300
"""The API server ends a watch then; somewhat later where it is one of many."""
WATCH_SILENCE_S = 90.0
"""Where anything changes bookmarks come every minute: a watch without a word for so long is begun
anew, lest its connection is dead and nobody has noticed."""
MOST_WATCH_BYTES = 16 * 1_048_576
REQUESTS_AT_ONCE = 48
TLS_CLOSE_S = 0.25

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Resource:
    """One REST resource. namespaced False: nodes."""

    base: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        parts = [self.base]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


_OURS = f"/apis/{API_GROUP}/{API_VERSION_NAME}"
SESSIONS = Resource(_OURS, SESSION_PLURAL)
POOLS = Resource(_OURS, POOL_PLURAL)
PODS = Resource("/api/v1", "pods")
SECRETS = Resource("/api/v1", "secrets")
CONFIG_MAPS = Resource("/api/v1", "configmaps")
NODES = Resource("/api/v1", "nodes", namespaced=False)
EVENTS = Resource("/apis/events.k8s.io/v1", "events")
LEASES = Resource("/apis/coordination.k8s.io/v1", "leases")
PDBS = Resource("/apis/policy/v1", "poddisruptionbudgets")


class ApiError(Exception):
    """status: HTTP, 0 when no answer came. reason: Kubernetes' one word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}"[:LONGEST_MESSAGE])
        self.status = status
        self.reason = reason
        self.message = message[:LONGEST_MESSAGE]


class ConflictError(ApiError):
    """409: the object changed since it was read, or exists already. Observe again, decide again."""


class MissingError(ApiError):
    """404, or 410 for an object: it is gone. For a create: its namespace is gone or ending."""


class RefusedError(ApiError):
    """Any other 4xx: the same request will be refused again."""


class UnavailableError(ApiError):
    """No usable answer after all attempts: later, with backoff."""


class NotLeadingError(Exception):
    """Another operator may be leading: nothing may be written now."""


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Listing(Generic[_Item]):
    """version: of the whole list."""

    items: tuple[_Item, ...]
    version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """type: ADDED, MODIFIED, DELETED, or BOOKMARK, whose object has a resourceVersion alone."""

    type: str
    object: RawObject


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object that an Event is about."""

    api_version: str
    kind: str
    key: ObjectKey
    uid: str


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


class KubernetesApi:
    """may_write: asked before each write (leadership). requests: counts by "verb resource"."""

    def __init__(
        self,
        connection: kopf.ConnectionInfo,
        *,
        may_write: Callable[[], bool] = lambda: True,
        reconnect: Callable[[], kopf.ConnectionInfo] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        requests_per_s: float = 400.0,
    ) -> None:
        self._connection = connection
        self._reconnect = reconnect
        self._may_write = may_write
        self._sleep = sleep
        self._throttle = Throttle(requests_per_s, 400, clock)
        self._gate = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self.requests: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            # Nobody waits for the end of TLS of a connection whose call was cancelled.
            await asyncio.sleep(TLS_CLOSE_S)

    async def get(self, resource: Resource, key: ObjectKey) -> RawObject:
        """Raises MissingError."""
        return _object(await self._ask("get", resource, resource.path(key.namespace, key.name)))

    @overload
    async def list(
        self, resource: Resource, namespace: str = "", *, selector: str = ""
    ) -> Listing[RawObject]: ...

    @overload
    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        selector: str = "",
        read: Callable[[RawObject], _Item],
    ) -> Listing[_Item]: ...

    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        selector: str = "",
        read: Callable[[RawObject], Any] = lambda raw: raw,
    ) -> Listing[Any]:
        """Every object of the selection, in pages. A page token that ran out starts over. read: of
        each object as its page comes, so that thousands of raw ones are never held together."""
        for _ in range(ATTEMPTS):
            try:
                return await self._list_pages(resource, namespace, selector, read)
            except MissingError as error:
                if error.status != 410:
                    raise
        raise UnavailableError(410, "Expired", f"the list of {resource.plural} kept expiring")

    async def watch(
        self, resource: Resource, namespace: str, version: str, *, selector: str = ""
    ) -> AsyncGenerator[WatchEvent | None]:
        """Changes after `version`, until the API server ends the watch, which is usual. The first
        is None: the watch stands. Raises MissingError 410 where the server does not remember that
        version, UnavailableError when the connection breaks, RefusedError."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S + random.randrange(WATCH_S // 5)),
        } | ({"labelSelector": selector} if selector else {})
        self.requests[f"watch {resource.plural}"] += 1
        timeout = aiohttp.ClientTimeout(
            total=None, connect=REQUEST_TIMEOUT_S, sock_read=WATCH_SILENCE_S
        )
        path, stands = resource.path(namespace), False
        session = self._opened()
        try:
            async with session.get(path, params=query, timeout=timeout) as answer:
                if answer.status != 200:
                    failure = _failure(answer.status, await answer.content.read(MOST_WATCH_BYTES))
                    raise await self._reconnected(failure, session)
                try:
                    stands = True
                    yield None
                    async for line in lines_of(answer.content, MOST_WATCH_BYTES):
                        yield _watch_event(line)
                finally:
                    # In mid-stream nobody waits for the end of TLS.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()
        except (aiohttp.ClientError, TimeoutError, OSError, LineTooLongError) as error:
            if stands and isinstance(error, TimeoutError):
                return
            raise UnavailableError(0, "Unreachable", type(error).__name__) from error

    async def create(self, resource: Resource, namespace: str, body: RawObject) -> RawObject:
        """Raises ConflictError when the name is taken, MissingError when the namespace is gone."""
        return await self._write("create", "POST", resource, resource.path(namespace), body)

    async def patch(
        self,
        resource: Resource,
        key: ObjectKey,
        body: Mapping[str, Any],
        *,
        version: str | None,
        subresource: str = "",
    ) -> RawObject:
        """A JSON merge patch (RFC 7386: null removes). version: refused by ConflictError if the
        object has another resourceVersion by now; None: whatever it has."""
        if version is not None:
            meta = cast("dict[str, Any]", body.get("metadata") or {})
            body = {**body, "metadata": {**meta, "resourceVersion": version}}
        path = resource.path(key.namespace, key.name, subresource)
        verb = f"patch-{subresource}" if subresource else "patch"
        return await self._write(verb, "PATCH", resource, path, body)

    async def delete(
        self,
        resource: Resource,
        key: ObjectKey,
        *,
        uid: str,
        version: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        """Deletes this very object; one that is gone already is fine. Raises ConflictError when
        another one has its name, or its resourceVersion differs from a given `version`."""
        preconditions = {"uid": uid} | ({} if version is None else {"resourceVersion": version})
        body: dict[str, Any] = {"preconditions": preconditions, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            path = resource.path(key.namespace, key.name)
            await self._write("delete", "DELETE", resource, path, body)
        except MissingError:
            return

    async def create_lease(self, namespace: str, body: RawObject) -> RawObject:
        """As `create`, without the lead: this is how it is got."""
        path = LEASES.path(namespace)
        return _object(await self._ask("create", LEASES, path, method="POST", body=body))

    async def patch_lease(self, key: ObjectKey, spec: Mapping[str, Any], version: str) -> RawObject:
        """As `patch`, without the lead."""
        body = {"metadata": {"resourceVersion": version}, "spec": spec}
        path = LEASES.path(key.namespace, key.name)
        return _object(await self._ask("patch", LEASES, path, method="PATCH", body=body))

    async def event(
        self,
        regarding: Regarding,
        *,
        reason: str,
        note: str,
        action: str,
        event_type: EventType = EventType.NORMAL,
    ) -> None:
        """One Event. Its loss is logged and stops nothing: Events inform, they decide nothing."""
        key = regarding.key
        now = time.time_ns()
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{key.name[:230]}.{now:x}{random.randrange(256):02x}",
                "namespace": key.namespace or "default",
            },
            "eventTime": _micro_time(now),
            "reportingController": f"{API_GROUP}/{FIELD_MANAGER}",
            "reportingInstance": FIELD_MANAGER,
            "action": cut_bytes(action, MOST_WORD_BYTES),
            "reason": cut_bytes(reason, MOST_WORD_BYTES),
            "note": cut_bytes(note, MOST_NOTE_BYTES),
            "type": str(event_type),
            "regarding": {
                "apiVersion": regarding.api_version,
                "kind": regarding.kind,
                "name": key.name,
                "namespace": key.namespace,
                "uid": regarding.uid,
            },
        }
        try:
            await self.create(EVENTS, key.namespace or "default", body)
        except ApiError as error:
            log.warning("event %s of %s is lost: %s", reason, key, error)

    async def _list_pages(
        self,
        resource: Resource,
        namespace: str,
        selector: str,
        read: Callable[[RawObject], Any],
    ) -> Listing[Any]:
        items: list[Any] = []
        token = ""
        while True:
            query = {"limit": str(LIST_PAGE)}
            query |= {"labelSelector": selector} if selector else {}
            query |= {"continue": token} if token else {}
            path = resource.path(namespace)
            content = await self._ask("list", resource, path, query=query, timeout_s=LIST_TIMEOUT_S)
            page = cast("Page", _readable(content, Page))
            items.extend(read(_readable(item)) for item in page.items or ())
            meta = page.metadata or {}
            token = str(meta.get("continue") or "")
            if not token:
                return Listing(tuple(items), str(meta.get("resourceVersion") or ""))

    async def _write(
        self, verb: str, method: str, resource: Resource, path: str, body: Mapping[str, Any]
    ) -> RawObject:
        if not self._may_write():
            raise NotLeadingError
        query = {} if method == "DELETE" else {"fieldManager": FIELD_MANAGER}
        content = await self._ask(verb, resource, path, method=method, body=body, query=query)
        return _object(content)

    async def _ask(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> bytes:
        """One request, tried again while trying again can help: the answer's content."""
        last: _RetryError | None = None
        for attempt in range(ATTEMPTS):
            if last is not None:
                await self._sleep(_backoff_s(attempt, last.retry_after_s))
                if method != "GET" and resource is not LEASES and not self._may_write():
                    raise NotLeadingError
            await self._sleep(self._throttle.delay_s())
            self.requests[f"{verb} {resource.plural}"] += 1
            try:
                return await self._once(method, path, body, query or {}, timeout_s)
            except _RetryError as error:
                last = error
                self.failures[error.failure.reason] += 1
        assert last is not None
        failure = last.failure
        raise UnavailableError(failure.status, failure.reason, failure.message)

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
        failure = _failure(status, content)
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
            self._connection = self._reconnect()
            await self.close()
        return failure

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                base_url=self._connection.server,
                headers=self._connection.as_http_headers(),
                # Calls are bounded by the gate; watches stand beside them.
                connector=aiohttp.TCPConnector(ssl=self._connection.as_ssl_context(), limit=0),
            )
        return self._session


class _RetryError(Exception):
    def __init__(self, failure: ApiError, retry_after: str = "") -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0


def _readable(text: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    """Raises UnavailableError: who answered was not the API server."""
    try:
        return decoded(text, kind)
    except msgspec.MsgspecError as error:
        raise UnavailableError(0, "Unreadable", "an answer is not the JSON it should be") from error


def _object(content: bytes) -> RawObject:
    """Raises UnavailableError."""
    return cast(RawObject, _readable(content)) if content else {}


def _watch_event(line: bytes) -> WatchEvent:
    """Raises what an event of type ERROR says."""
    found = cast("Event", _readable(line, Event))
    body = found.object or {}
    if found.type == "ERROR":
        code = body.get("code")
        raise _failure(code if isinstance(code, int) else 500, msgspec.json.encode(body))
    return WatchEvent(found.type, body)


def _backoff_s(attempt: int, asked_s: float) -> float:
    grown = 0.1 * 2**attempt * (0.5 + random.random())
    return min(max(asked_s, grown), LONGEST_RETRY_AFTER_S)


class _StatusBody(msgspec.Struct):
    reason: str = ""
    message: str = ""


def _failure(status: int, content: bytes) -> ApiError:
    try:
        body = msgspec.json.decode(content, type=_StatusBody)
    except msgspec.MsgspecError:
        body = _StatusBody(message=content[:256].decode(errors="replace"))
    kind = {404: MissingError, 409: ConflictError, 410: MissingError}.get(
        status, RefusedError if status < 500 and status not in (401, 429) else UnavailableError
    )
    return kind(status, body.reason or str(status), body.message)


def _micro_time(now_ns: int) -> str:
    seconds, rest = divmod(now_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:06d}Z"
