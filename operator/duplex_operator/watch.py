"""From watches to the dirty set: which objects have to be looked at again.

`api_watch` does one thing with what it hears: it puts the object on its shelf (`intake`). Shelves
mark what is concerned as dirty. An object that is dirty twice is looked at once; one object is
never looked at by two tasks.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from duplex_operator.cancelling import raise_if_cancelled
from duplex_operator.logs import looking_at
from duplex_operator.objects import Kind, ObjectKey

log = logging.getLogger(__name__)

MOST_DIRTY = 100_000
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Item:
    """kind: SESSION or POOL."""

    kind: Kind
    key: ObjectKey


Reconcile = Callable[[ObjectKey], Awaitable[float | None]]
"""Looks at one object; returns after how many seconds to look again, None for no reason to."""


class DirtySet:
    """A bounded set of objects to look at, in order of first marking, and a timetable beside it.
    Urgent ones come before all others: what was begun is brought on before something new is begun.
    Pools always are: they are few, rest between two looks, and thousands of sessions wait for them.

    `run` serves it with `at_once` tasks until cancelled. A reconciler that raises is tried again
    with backoff; it stops nobody else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._urgent: dict[Item, float] = {}
        self._dirty: dict[Item, float] = {}
        self._busy: set[Item] = set()
        self._again: dict[Item, bool] = {}
        self._due: list[tuple[float, int, Item]] = []
        self._due_at: dict[Item, float] = {}
        self._numbers = count()
        self._failures: dict[Item, int] = {}
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.overflowed = 0
        self.served = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._dirty) + len(self._urgent)

    def mark(self, kind: Kind, key: ObjectKey, *, urgent: bool = False) -> None:
        """Look at it soon. Beyond the bound it is left to the next full relist."""
        item, urgent = Item(kind, key), urgent or kind is Kind.POOL
        if item in self._busy:
            self._again[item] = urgent or self._again.get(item, False)
        elif item in self._urgent:
            return
        elif urgent:
            self._urgent[item] = self._dirty.pop(item, self._clock())
            self._told()
        elif item not in self._dirty:
            if len(self._dirty) >= MOST_DIRTY:
                self.overflowed += 1
                return
            self._dirty[item] = self._clock()
            self._told()

    def _told(self) -> None:
        self._news.set()
        self._idle.clear()

    def mark_after(self, kind: Kind, key: ObjectKey, delay_s: float) -> None:
        """Look at it in `delay_s`, or earlier if asked so before."""
        item, at = Item(kind, key), self._clock() + delay_s
        if self._due_at.get(item, float("inf")) <= at:
            return
        self._due_at[item] = at
        heapq.heappush(self._due, (at, next(self._numbers), item))
        self._news.set()

    def seen(self, kind: Kind, key: ObjectKey) -> None:
        """Said by who looks at it right now, before anything of it is read: all news until here,
        those of the looker's own writes too, will be in what is read."""
        self._again.pop(Item(kind, key), None)

    def awaits(self, kind: Kind, key: ObjectKey, within_s: float) -> bool:
        """Whether the timetable has it for then or earlier."""
        return self._due_at.get(Item(kind, key), float("inf")) <= self._clock() + within_s

    def oldest_s(self) -> float:
        """How long the first in the set has been waiting."""
        waiting = (self._urgent, self._dirty)
        first = [next(iter(items.values())) for items in waiting if items]
        return self._clock() - min(first) if first else 0.0

    async def drained(self) -> None:
        """Returns when nothing is dirty and nobody is busy (what is due later does not count)."""
        await self._idle.wait()

    async def run(self, reconcilers: dict[Kind, Reconcile], at_once: int) -> None:
        """Serves the set until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._serve(reconcilers))

    async def _serve(self, reconcilers: dict[Kind, Reconcile]) -> None:
        while True:
            raise_if_cancelled()
            item = await self._take()
            try:
                await self._look_at(item, reconcilers[item.kind])
            finally:
                self._busy.discard(item)
                again = self._again.pop(item, None)
                if again is not None:
                    self.mark(item.kind, item.key, urgent=again)
                if not len(self) and not self._busy:
                    self._idle.set()

    async def _look_at(self, item: Item, reconcile: Reconcile) -> None:
        try:
            with looking_at(item.kind, item.key):
                after_s = await reconcile(item.key)
        except Exception as error:
            self.failed += 1
            failures = self._failures[item] = self._failures.get(item, 0) + 1
            delay_s = min(FIRST_RETRY_S * 2 ** min(failures, 10), LONGEST_RETRY_S)
            with looking_at(item.kind, item.key):
                log.warning("%s %s: %s; again in %.1f s", item.kind, item.key, error, delay_s)
                log.debug("why", exc_info=error)
            self.mark_after(item.kind, item.key, delay_s)
            return
        self.served += 1
        self._failures.pop(item, None)
        if after_s is not None:
            self.mark_after(item.kind, item.key, after_s)

    async def _take(self) -> Item:
        while True:
            self._promote_due()
            items = self._urgent or self._dirty
            if items:
                item = next(iter(items))
                del items[item]
                self._busy.add(item)
                if len(self):
                    self._news.set()
                return item
            self._news.clear()
            wait_s = self._due[0][0] - self._clock() if self._due else None
            # Not wait_for: that may swallow a cancellation which comes with the news.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    def _promote_due(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            at, _, item = heapq.heappop(self._due)
            if self._due_at.get(item) == at:
                del self._due_at[item]
                self.mark(item.kind, item.key)
