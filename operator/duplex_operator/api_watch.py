"""Watches of the API server, one for each kind and namespace, from where the last list ended.

A watch that breaks goes on from what it last saw. One whose place the server has forgotten (410) is
begun again with a list, which tells what was deleted meanwhile, too.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from duplex_operator.cancelling import raise_if_cancelled
from duplex_operator.kube.api import KubernetesApi, WatchEvent
from duplex_operator.kube.errors import ApiError, MissingError
from duplex_operator.kube.resources import Resource
from duplex_operator.objects import Kind, RawObject, read_meta

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
BOOKMARK = "BOOKMARK"
"""No news of an object: how far the watch has come."""

Sink = Callable[[Kind, str, RawObject], None]
"""(kind, ADDED|MODIFIED|DELETED, the object)."""
List = Callable[["Watched"], Awaitable[str]]
"""Lists it and returns the list's resourceVersion. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class Watched:
    """namespace empty: everywhere. selector: of labels."""

    kind: Kind
    resource: Resource
    namespace: str
    selector: str

    def __str__(self) -> str:
        return f"{self.resource.plural} of {self.namespace or 'all namespaces'}"


class ApiWatch:
    """`run` once; `sink` gets every change. again: lists one of them anew."""

    def __init__(self, api: KubernetesApi, sink: Sink, again: List) -> None:
        self._api = api
        self._sink = sink
        self._again = again
        self._stand: set[Watched] = set()
        self._wanted: frozenset[Watched] = frozenset()

    @property
    def stands(self) -> bool:
        """Every watch has been accepted by the API server once. One that breaks later is tried
        again; whether the server is there at all is known elsewhere."""
        return bool(self._wanted) and self._wanted <= self._stand

    async def run(self, versions: dict[Watched, str]) -> None:
        """Until cancelled. versions: of the list of each."""
        self._wanted = frozenset(versions)
        async with asyncio.TaskGroup() as group:
            for watched, version in versions.items():
                group.create_task(self._follow(watched, version), name=f"watch {watched}")

    async def _follow(self, watched: Watched, version: str) -> None:
        loop, retry_s = asyncio.get_running_loop(), FIRST_RETRY_S
        while True:
            raise_if_cancelled()
            before, began_s = version, loop.time()
            try:
                stream = self._api.watch(
                    watched.resource, watched.namespace, version, selector=watched.selector
                )
                async with aclosing(stream) as events:
                    async for event in events:
                        self._stand.add(watched)
                        if event is None:
                            continue
                        version = read_meta(event.object).version or version
                        if event.type != BOOKMARK:
                            self._tell(watched, event)
            except MissingError as error:
                if error.status != 410:
                    log.warning("watching %s: %s", watched, error)
                else:
                    version = await self._list_again(watched, version)
            except ApiError as error:
                log.info("watching %s: %s", watched, error)
            # The server ends each watch after minutes: that is no trouble, at once is.
            if version != before or loop.time() - began_s > LONGEST_RETRY_S:
                retry_s = FIRST_RETRY_S
            await asyncio.sleep(retry_s * (0.5 + random.random()))
            retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    def _tell(self, watched: Watched, event: WatchEvent) -> None:
        try:
            self._sink(watched.kind, event.type, event.object)
        except Exception:
            # One object that nobody foresaw must not stop the news of all others.
            log.exception("watching %s: an object could not be taken", watched)

    async def _list_again(self, watched: Watched, version: str) -> str:
        """The same version when it cannot be listed now: the watch will ask again."""
        log.info("watching %s: its place is forgotten; it is listed again", watched)
        try:
            return await self._again(watched)
        except ApiError as error:
            log.warning("listing %s: %s", watched, error)
            return version
