"""Which pools this release serves, where another one watches the same namespace.

Whoever serves a pool has its name on the pool's admin Secret (`pool_credentials`). A pool that
bears another's is left alone, and so are its sessions: each release has a ledger of its own, and
two that write to the same objects undo each other's work for ever.
"""

from collections.abc import Callable

from duplex_operator.objects import ObjectKey, SessionObject
from duplex_operator.store import Store

LET_GO_AFTER_S = 300.0
"""A deleted session that its own release has not let go of by then has no release any more."""


class Claims:
    def __init__(self, store: Store, watches: Callable[[str], bool]) -> None:
        """watches: whether this release sees the objects of that namespace."""
        self._store = store
        self._watches = watches
        self._serves: dict[ObjectKey, bool] = {}
        self.awaited = False
        """Whether a pool is to be left alone until its Secret was read."""

    def note(self, pool: ObjectKey, *, serves: bool) -> bool:
        """True: that is news."""
        before = self.serves(pool)
        self._serves[pool] = serves
        return before is not serves

    def forget(self, pool: ObjectKey) -> None:
        self._serves.pop(pool, None)

    def serves(self, pool: ObjectKey) -> bool:
        """Of one that does not exist, or is going, too: somebody has to tell its sessions so."""
        found = self._store.pools.get(pool)
        if found is None:
            return True
        return self._serves.get(pool, not self.awaited or found.meta.deleting)

    def takes_care_of(self, session: SessionObject, now_ms: int) -> bool:
        meta, pool = session.meta, session.pool_key
        if meta.deleting and now_ms - meta.deleted_ms >= LET_GO_AFTER_S * 1000:
            return True
        # Whoever gave it a token sees its pool.
        others = session.status.token_secret is not None and not self._watches(pool.namespace)
        return not others and self.serves(pool)
