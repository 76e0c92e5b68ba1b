"""From raw objects to the shelves, and from changed shelves to dirty sessions and pools.

Everything is listed again every few minutes, whatever the watches have told.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from duplex_operator.api_watch import Watched
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.resources import NODES, PODS, POOLS, SESSIONS, Resource
from duplex_operator.names import POD_SELECTOR
from duplex_operator.objects import (
    AnyObject,
    Kind,
    NodeObject,
    ObjectKey,
    PodObject,
    PoolObject,
    RawObject,
    SessionObject,
    read_meta,
    read_node,
    read_pod,
    read_pool,
    read_session,
)
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Change, Shelf, Store
from duplex_operator.watch import DirtySet

log = logging.getLogger(__name__)

_READERS: dict[Kind, Callable[[RawObject], AnyObject | None]] = {
    Kind.SESSION: read_session,
    Kind.POOL: read_pool,
    Kind.POD: read_pod,
    Kind.NODE: read_node,
}
_LISTS: dict[Kind, tuple[Resource, str]] = {
    Kind.POOL: (POOLS, ""),
    Kind.NODE: (NODES, ""),
    Kind.POD: (PODS, POD_SELECTOR),
    Kind.SESSION: (SESSIONS, ""),
}


class Intake:
    """`take` is the watches' sink; `relist` reads everything; `run` relists when it is time."""

    def __init__(
        self, settings: OperatorSettings, store: Store, dirty: DirtySet, api: KubernetesApi
    ) -> None:
        self._settings = settings
        self._store = store
        self._dirty = dirty
        self._api = api
        self.relists = 0
        self.events = 0
        store.listeners.session.append(self._session_changed)
        store.listeners.pool.append(self._pool_changed)
        store.listeners.node.append(self._node_changed)

    def take(self, kind: Kind, event_type: str, raw: RawObject) -> None:
        """One event of a watch."""
        self.events += 1
        shelf = self._shelf(kind)
        if event_type == "DELETED":
            meta = read_meta(raw)
            shelf.drop(meta.key, meta.uid, meta.version)
            return
        found = _READERS[kind](raw)
        if found is not None:
            shelf.put(found)

    async def run(self) -> None:
        """Lists everything every `relist_period_s`."""
        while True:
            await asyncio.sleep(self._settings.relist_period_s)
            await self.relist()
            self.mark_everything()

    async def relist(self) -> dict[Watched, str]:
        """Returns the version of each list. Raises ApiError; the shelves keep what they had of
        kinds that were not reached."""
        versions = {watched: await self.list_one(watched) for watched in self._watched()}
        self.relists += 1
        return versions

    async def list_one(self, watched: Watched) -> str:
        """Returns the list's version. Raises ApiError."""
        kind = watched.kind
        listing = await self._api.list(
            watched.resource, watched.namespace, selector=watched.selector, read=_READERS[kind]
        )
        found = [one for one in listing.items if one is not None]
        self._shelf(kind).replace_all(found, listing.version, watched.namespace)
        return listing.version

    def _watched(self) -> list[Watched]:
        """Without rights of the cluster (watchNamespaces) nodes are not seen."""
        namespaces = self._settings.watch_namespaces
        return [
            Watched(kind, resource, namespace, selector)
            for kind, (resource, selector) in _LISTS.items()
            if not (kind is Kind.NODE and namespaces)
            for namespace in namespaces or ("",)
        ]

    def mark_everything(self) -> None:
        for pool in self._store.pools.all():
            self._dirty.mark(Kind.POOL, pool.meta.key)
        for session in self._store.sessions.all():
            self._dirty.mark(Kind.SESSION, session.meta.key)

    def _shelf(self, kind: Kind) -> Shelf[AnyObject]:
        shelves: dict[Kind, object] = {
            Kind.SESSION: self._store.sessions,
            Kind.POOL: self._store.pools,
            Kind.POD: self._store.pods,
            Kind.NODE: self._store.nodes,
        }
        return cast("Shelf[AnyObject]", shelves[kind])

    def _session_changed(self, change: Change[SessionObject]) -> None:
        for session in (change.before, change.after):
            if session is not None:
                self._dirty.mark(Kind.POOL, session.pool_key)
        found = change.after or change.before
        if found is not None:
            self._dirty.mark(Kind.SESSION, found.meta.key)

    def _pool_changed(self, change: Change[PoolObject]) -> None:
        found = change.after or change.before
        if found is None:
            return
        self._dirty.mark(Kind.POOL, found.meta.key)
        if change.before is None or change.after is None or _respecified(change):
            for session in self._store.sessions_of(found.meta.key):
                self._dirty.mark(Kind.SESSION, session.meta.key)

    def _node_changed(self, change: Change[NodeObject]) -> None:
        """A node's heartbeat is no news; a cordon, a taint, a lost node is, for pools with pods
        there."""
        if _node_news(change.before) == _node_news(change.after):
            return
        found = change.after or change.before
        if found is not None:
            for pool in _pools_on(self._store, found.meta.key.name):
                self._dirty.mark(Kind.POOL, pool)


def _respecified(change: Change[PoolObject]) -> bool:
    before, after = change.before, change.after
    assert before is not None
    assert after is not None
    return (before.meta.generation, before.meta.deleting) != (
        after.meta.generation,
        after.meta.deleting,
    )


def _node_news(node: NodeObject | None) -> object:
    return None if node is None else (node.unschedulable, node.taints, node.ready)


def _pools_on(store: Store, node: str) -> set[ObjectKey]:
    return {pod.pool for pod in _pods_on(store, node)}


def _pods_on(store: Store, node: str) -> list[PodObject]:
    return [pod for pod in store.pods.all() if pod.node == node]
