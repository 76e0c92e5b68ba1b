"""What was observed of the cluster, in memory. The newest version of each object, and three
indexes over them. No I/O: watches, relists and the answers to our own writes feed it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from duplex_operator.objects import (
    AnyObject,
    Meta,
    NodeObject,
    ObjectKey,
    PodObject,
    PoolObject,
    SessionObject,
)

_Object = TypeVar("_Object", bound=AnyObject)

_REMEMBERED_DELETIONS = 10_000


@dataclass(frozen=True, slots=True)
class Change(Generic[_Object]):
    """before None: new. after None: gone."""

    before: _Object | None
    after: _Object | None


class Shelf(Generic[_Object]):
    """The objects of one kind. Every change is told to `on_change`."""

    def __init__(self, on_change: Callable[[Change[_Object]], None]) -> None:
        self._objects: dict[ObjectKey, _Object] = {}
        self._gone: OrderedDict[str, str | None] = OrderedDict()
        """uid -> as of which version it was gone; None: for good."""
        self._on_change = on_change

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, key: ObjectKey) -> _Object | None:
        return self._objects.get(key)

    def all(self) -> tuple[_Object, ...]:
        return tuple(self._objects.values())

    def put(self, found: _Object) -> bool:
        """Takes an object unless a newer version of it, or its deletion, was seen. True: taken."""
        meta = found.meta
        before = self._objects.get(meta.key)
        if before is not None and not _newer(meta, before.meta):
            return False
        if meta.uid in self._gone and not self._is_back(meta):
            return False
        self._objects[meta.key] = found
        self._on_change(Change(before, found))
        return True

    def drop(self, key: ObjectKey, uid: str, version: str | None = None) -> bool:
        """The object with this uid is gone. One of the same name and another uid stays. version: as
        of which it was not seen; a newer one of it is taken again, since it may but have left the
        selection, or have been unreadable, for a while. None: it does not exist."""
        before = self._objects.get(key)
        self._remember_gone(uid, version)
        if before is None or before.meta.uid != uid:
            return False
        del self._objects[key]
        self._on_change(Change(before, None))
        return True

    def replace_all(self, listed: Iterable[_Object], as_of: str, namespace: str = "") -> None:
        """Takes a full list (of one namespace, or of all). What it lacks is gone, unless it is
        newer than the list (`as_of`, its resourceVersion)."""
        present: set[ObjectKey] = set()
        for found in listed:
            present.add(found.meta.key)
            self.put(found)
        missing = [key for key in self._objects if key not in present]
        for key in missing:
            if namespace and key.namespace != namespace:
                continue
            meta = self._objects[key].meta
            if not _later(meta.version, as_of):
                self.drop(key, meta.uid, as_of)

    def _is_back(self, meta: Meta) -> bool:
        gone_as_of = self._gone[meta.uid]
        if gone_as_of is None or not _later(meta.version, gone_as_of):
            return False
        del self._gone[meta.uid]
        return True

    def _remember_gone(self, uid: str, version: str | None) -> None:
        if uid not in self._gone or self._gone[uid] is not None:
            self._gone[uid] = version
        while len(self._gone) > _REMEMBERED_DELETIONS:
            self._gone.popitem(last=False)


def _newer(found: Meta, known: Meta) -> bool:
    return found.uid != known.uid or _later(found.version, known.version)


def _later(version: str, other: str) -> bool:
    """Versions of one cluster are numbers that grow (KEP-5504); anything else counts as later."""
    if version.isdecimal() and other.isdecimal():
        return int(version) > int(other)
    return version != other


Listener = Callable[[Change[SessionObject]], None]


@dataclass(slots=True)
class Listeners:
    session: list[Callable[[Change[SessionObject]], None]] = field(default_factory=list)
    pool: list[Callable[[Change[PoolObject]], None]] = field(default_factory=list)
    pod: list[Callable[[Change[PodObject]], None]] = field(default_factory=list)
    node: list[Callable[[Change[NodeObject]], None]] = field(default_factory=list)


class Store:
    """All shelves. `listeners` are called in order, synchronously, after the shelf has changed."""

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.sessions: Shelf[SessionObject] = Shelf(self._session_changed)
        self.pools: Shelf[PoolObject] = Shelf(self._pool_changed)
        self.pods: Shelf[PodObject] = Shelf(self._pod_changed)
        self.nodes: Shelf[NodeObject] = Shelf(self._node_changed)
        self._session_by_uid: dict[str, ObjectKey] = {}
        self._pod_by_uid: dict[str, ObjectKey] = {}
        self._placed: dict[str, dict[str, ObjectKey]] = {}
        self._sessions_of_pool: dict[ObjectKey, set[ObjectKey]] = {}
        self._pods_of_pool: dict[ObjectKey, set[ObjectKey]] = {}

    def session_by_uid(self, uid: str) -> SessionObject | None:
        key = self._session_by_uid.get(uid)
        return None if key is None else self.sessions.get(key)

    def pod_by_uid(self, uid: str) -> PodObject | None:
        key = self._pod_by_uid.get(uid)
        return None if key is None else self.pods.get(key)

    def placed_on(self, pod_uid: str) -> tuple[SessionObject, ...]:
        """Sessions whose `status.placement` names this pod: each takes one of its slots."""
        return self._sessions(self._placed.get(pod_uid, {}).values())

    def placed_uids(self, pod_uid: str) -> Set[str]:
        """Their uids. Good until the next change."""
        return self._placed.get(pod_uid, {}).keys()

    def sessions_of(self, pool: ObjectKey) -> tuple[SessionObject, ...]:
        """Sessions whose poolRef names this pool, ended and deleted ones too."""
        return self._sessions(self._sessions_of_pool.get(pool, ()))

    def pods_of(self, pool: ObjectKey) -> tuple[PodObject, ...]:
        found = (self.pods.get(key) for key in sorted(self._pods_of_pool.get(pool, ())))
        return tuple(pod for pod in found if pod is not None)

    def _sessions(self, keys: Iterable[ObjectKey]) -> tuple[SessionObject, ...]:
        found = (self.sessions.get(key) for key in sorted(keys))
        return tuple(session for session in found if session is not None)

    def _session_changed(self, change: Change[SessionObject]) -> None:
        if (old := change.before) is not None:
            self._session_by_uid.pop(old.meta.uid, None)
            _discard(self._sessions_of_pool, old.pool_key, old.meta.key)
            if old.status.placement is not None:
                placed = self._placed[old.status.placement.pod_uid]
                del placed[old.meta.uid]
                if not placed:
                    del self._placed[old.status.placement.pod_uid]
        if (new := change.after) is not None:
            self._session_by_uid[new.meta.uid] = new.meta.key
            self._sessions_of_pool.setdefault(new.pool_key, set()).add(new.meta.key)
            if new.status.placement is not None:
                placed = self._placed.setdefault(new.status.placement.pod_uid, {})
                placed[new.meta.uid] = new.meta.key
        for listener in self.listeners.session:
            listener(change)

    def _pool_changed(self, change: Change[PoolObject]) -> None:
        for listener in self.listeners.pool:
            listener(change)

    def _pod_changed(self, change: Change[PodObject]) -> None:
        if (old := change.before) is not None:
            self._pod_by_uid.pop(old.meta.uid, None)
            _discard(self._pods_of_pool, old.pool, old.meta.key)
        if (new := change.after) is not None:
            self._pod_by_uid[new.meta.uid] = new.meta.key
            self._pods_of_pool.setdefault(new.pool, set()).add(new.meta.key)
        for listener in self.listeners.pod:
            listener(change)

    def _node_changed(self, change: Change[NodeObject]) -> None:
        for listener in self.listeners.node:
            listener(change)


def _discard(index: dict[ObjectKey, set[ObjectKey]], name: ObjectKey, key: ObjectKey) -> None:
    keys = index.get(name)
    if keys is not None:
        keys.discard(key)
        if not keys:
            del index[name]
