"""Serves the queues: one pass over a whole pool at a time, so that the order is kept.

A promise made here reserves its slot at once, in memory; the session's own reconciler then writes
the placement. No two passes run at the same time and no pass waits inside, so no slot is given
twice.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from duplex_operator.decide.placement import PodSlots, place
from duplex_operator.fleet import Fleet
from duplex_operator.objects import Kind, ObjectKey, SessionObject
from duplex_operator.placements import PlacementBoard
from duplex_operator.store import Change, Store
from duplex_operator.watch import DirtySet

log = logging.getLogger(__name__)

GATHER_S = 0.01
"""News of this long are served together."""
REST = 4
"""A pass over thousands takes a while: news are then gathered for so many times as long."""
PERIOD_S = 1.0
"""Every waiting pool is served this often, whether or not there is news: refusals run out."""


class Placer:
    """`poke` a pool when something about its slots or its queue changed; `run` once."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        board: PlacementBoard,
        dirty: DirtySet,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._board = board
        self._dirty = dirty
        self._clock = clock
        self._poked: set[ObjectKey] = set()
        self._news = asyncio.Event()
        self._next_round_s = clock() + PERIOD_S
        store.listeners.session.append(self._session_changed)
        fleet.listeners.append(self.poke)

    def poke(self, pool: ObjectKey) -> None:
        self._poked.add(pool)
        self._news.set()

    async def run(self) -> None:
        took_s = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._next_round_s - self._clock()):
                    await self._news.wait()
                await asyncio.sleep(max(GATHER_S, REST * took_s))
            began_s = self._clock()
            self.turn()
            took_s = self._clock() - began_s

    def turn(self) -> None:
        """Serves the pools that were poked, and all that wait when their round has come: a pool
        without news must not starve beside one that has some all the time."""
        self._news.clear()
        now_s = self._clock()
        if now_s >= self._next_round_s:
            self._next_round_s = now_s + PERIOD_S
            self._poked.update(self._board.pools())
        poked, self._poked = self._poked, set()
        for pool in poked:
            self.serve(pool)

    def serve(self, pool: ObjectKey) -> None:
        """One pass over the pool's queue."""
        waiting = self._board.waiting_for(pool)
        queue = [found for uid, found in waiting.items() if self._board.promised(uid) is None]
        if not queue:
            return
        served = place(str(pool), queue, self.slots_of(pool))
        for uid, assignment in served.assigned.items():
            self._board.promise(uid, assignment)
            self._mark(uid, urgent=True)
        for uid, wait in served.waits.items():
            if self._board.answer(uid, wait):
                self._mark(uid)

    def slots_of(self, pool: ObjectKey) -> list[PodSlots]:
        """The pool's pods as placement sees them. A session that is placed and promised on the
        same pod takes one slot."""
        now = self._clock()
        found: list[PodSlots] = []
        for pod in self._store.pods_of(pool):
            uid = pod.meta.uid
            feed = self._fleet.pod(uid)
            used = self._store.placed_uids(uid) | self._board.promised_on(uid)
            takes = (
                feed is not None
                and feed.takes_sessions
                and not (pod.meta.deleting or pod.disrupted)
                and not pod.mark
                and not self._board.refused(uid, now)
            )
            slots = feed.slots if feed is not None else 0
            found.append(PodSlots(uid, pod.meta.key.name, slots, len(used), takes))
        return found

    def _session_changed(self, change: Change[SessionObject]) -> None:
        before, after = change.before, change.after
        if after is None and before is not None:
            self._board.leave(before.meta.uid)
        if before is None or before.status.placement is None:
            return
        if after is None or after.status.placement != before.status.placement:
            self.poke(before.pool_key)

    def _mark(self, uid: str, *, urgent: bool = False) -> None:
        session = self._store.session_by_uid(uid)
        if session is not None:
            self._dirty.mark(Kind.SESSION, session.meta.key, urgent=urgent)
