"""What can be asked of the API server: one method a verb.

Every write names what it was decided on (a resourceVersion or a uid), so a decision on an old view
is refused by the API server instead of undoing somebody's change.
"""

import random
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, overload

import msgspec

from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import MissingError, UnavailableError, failure_of
from duplex_operator.kube.json_text import Event, Page, decoded
from duplex_operator.kube.resources import Resource
from duplex_operator.names import FIELD_MANAGER
from duplex_operator.objects import ObjectKey, RawObject

LIST_TIMEOUT_S = 60.0
LIST_ATTEMPTS = 4
LIST_PAGE = 100
"""An object may have 1.5 MiB, and a page of the largest has to fit into the operator's memory."""
WATCH_S = 300
"""The API server ends a watch then; somewhat later where it is one of many."""

_Item = TypeVar("_Item")


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


class KubernetesApi:
    """may_write: asked before each write (leadership). Every call raises ApiError, writes
    NotLeadingError too."""

    def __init__(
        self, connection: ApiConnection, *, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self.connection = connection
        self._may_write = may_write

    async def get(self, resource: Resource, key: ObjectKey) -> RawObject:
        """Raises MissingError."""
        path = resource.path(key.namespace, key.name)
        return _object(await self.connection.ask("get", resource, path))

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
        for _ in range(LIST_ATTEMPTS):
            try:
                return await self._list_pages(resource, namespace, selector, read)
            except MissingError as error:
                if error.status != 410:
                    raise
        raise UnavailableError(410, "Expired", f"the list of {resource.plural} kept expiring")

    async def _list_pages(
        self,
        resource: Resource,
        namespace: str,
        selector: str,
        read: Callable[[RawObject], Any],
    ) -> Listing[Any]:
        items: list[Any] = []
        path = resource.path(namespace)
        query = {"limit": str(LIST_PAGE)} | _selecting(selector)
        while True:
            content = await self.connection.ask(
                "list", resource, path, query=query, timeout_s=LIST_TIMEOUT_S
            )
            page = cast("Page", _readable(content, Page))
            items.extend(read(_readable(item)) for item in page.items or ())
            meta = page.metadata or {}
            token = str(meta.get("continue") or "")
            if not token:
                return Listing(tuple(items), str(meta.get("resourceVersion") or ""))
            query["continue"] = token

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
        } | _selecting(selector)
        path = resource.path(namespace)
        async with self.connection.stream("watch", resource, path, query) as lines:
            yield None
            async for line in lines:
                yield _watch_event(line)

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

    async def _write(
        self, verb: str, method: str, resource: Resource, path: str, body: Mapping[str, Any]
    ) -> RawObject:
        content = await self.connection.ask(
            verb,
            resource,
            path,
            method=method,
            body=body,
            query={} if method == "DELETE" else {"fieldManager": FIELD_MANAGER},
            may_send=self._may_write,
        )
        return _object(content)


def _selecting(selector: str) -> dict[str, str]:
    return {"labelSelector": selector} if selector else {}


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
        raise failure_of(code if isinstance(code, int) else 500, msgspec.json.encode(body))
    return WatchEvent(found.type, body)
