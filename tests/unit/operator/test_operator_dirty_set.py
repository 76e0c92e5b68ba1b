"""The dirty set: once each, never two at a time, in order, bounded, and nobody stops it."""

import asyncio

import pytest

from duplex_operator.objects import Kind, ObjectKey
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit


def key(name: str) -> ObjectKey:
    return ObjectKey("default", name)


class Bench:
    """Serves one set with a reconciler that notes what it is given."""

    def __init__(self, *, at_once: int = 2) -> None:
        self.now_s = 0.0
        self.dirty = DirtySet(clock=lambda: self.now_s)
        self.seen: list[str] = []
        self.at_once = at_once
        self.failing: set[str] = set()
        self.again_s: float | None = None
        self.gate: asyncio.Event | None = None
        self.begun = asyncio.Event()

    async def reconcile(self, found: ObjectKey) -> float | None:
        self.seen.append(found.name)
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        if found.name in self.failing:
            raise ValueError("broken")
        return self.again_s

    async def __aenter__(self) -> "Bench":
        self.task = asyncio.create_task(
            self.dirty.run({Kind.SESSION: self.reconcile}, self.at_once)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_marked_twice_is_looked_at_once_in_order() -> None:
    bench = Bench(at_once=1)
    for name in ("a", "b", "a", "c"):
        bench.dirty.mark(Kind.SESSION, key(name))
    async with bench:
        await bench.dirty.drained()
    assert bench.seen == ["a", "b", "c"]


async def test_what_is_urgent_comes_first() -> None:
    bench = Bench(at_once=1)
    for name in ("a", "b", "c"):
        bench.dirty.mark(Kind.SESSION, key(name))
    bench.now_s = 2.0
    for name in ("d", "c", "d"):
        bench.dirty.mark(Kind.SESSION, key(name), urgent=True)
    bench.dirty.mark(Kind.SESSION, key("d"))
    assert (len(bench.dirty), bench.dirty.oldest_s()) == (4, 2.0)
    async with bench:
        await bench.dirty.drained()
    assert bench.seen == ["d", "c", "a", "b"]


async def test_a_pool_does_not_wait_for_thousands_of_sessions() -> None:
    bench = Bench(at_once=1)
    bench.dirty.mark(Kind.SESSION, key("a"))
    bench.dirty.mark(Kind.POOL, key("pool"))
    bench.dirty.mark(Kind.SESSION, key("b"), urgent=True)
    reconcilers = {Kind.SESSION: bench.reconcile, Kind.POOL: bench.reconcile}
    work = asyncio.create_task(bench.dirty.run(reconcilers, 1))
    await bench.dirty.drained()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert bench.seen == ["pool", "b", "a"]


async def test_urgent_news_during_a_look_stay_urgent() -> None:
    bench = Bench(at_once=1)
    bench.gate = asyncio.Event()
    for name in ("a", "b"):
        bench.dirty.mark(Kind.SESSION, key(name))
    async with bench:
        await bench.begun.wait()
        bench.dirty.mark(Kind.SESSION, key("a"), urgent=True)
        bench.dirty.mark(Kind.SESSION, key("a"))
        bench.gate.set()
        await bench.dirty.drained()
    assert bench.seen == ["a", "a", "b"]


async def test_news_during_a_look_leads_to_another() -> None:
    bench = Bench()
    bench.gate = asyncio.Event()
    bench.dirty.mark(Kind.SESSION, key("a"))
    async with bench:
        await bench.begun.wait()
        bench.dirty.mark(Kind.SESSION, key("a"))
        bench.dirty.mark(Kind.SESSION, key("a"))
        assert bench.seen == ["a"]
        bench.gate.set()
        await bench.dirty.drained()
    assert bench.seen == ["a", "a"]


async def test_news_that_the_look_still_reads_lead_to_no_other() -> None:
    bench = Bench()
    looks = 0

    async def reconcile(found: ObjectKey) -> None:
        nonlocal looks
        looks += 1
        bench.dirty.mark(Kind.SESSION, found)
        bench.dirty.seen(Kind.SESSION, found)
        if looks == 1:
            await asyncio.sleep(0)
            bench.dirty.mark(Kind.SESSION, found)

    bench.dirty.mark(Kind.SESSION, key("a"))
    bench.dirty.seen(Kind.SESSION, key("a"))
    work = asyncio.create_task(bench.dirty.run({Kind.SESSION: reconcile}, 1))
    await bench.dirty.drained()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert looks == 2


async def test_a_broken_object_stops_nobody_and_is_tried_again() -> None:
    bench = Bench(at_once=1)
    bench.failing = {"a"}
    for name in ("a", "b"):
        bench.dirty.mark(Kind.SESSION, key(name))
    async with bench:
        await bench.dirty.drained()
        assert bench.seen == ["a", "b"]
        assert bench.dirty.failed == 1
        bench.failing.clear()
        bench.now_s = 1.0
        bench.dirty.mark(Kind.SESSION, key("c"))
        await bench.dirty.drained()
    assert bench.seen == ["a", "b", "c", "a"] or bench.seen == ["a", "b", "a", "c"]


async def test_what_is_due_comes_and_the_earlier_time_wins() -> None:
    bench = Bench(at_once=1)
    bench.dirty.mark_after(Kind.SESSION, key("late"), 5.0)
    bench.dirty.mark_after(Kind.SESSION, key("late"), 9.0)
    bench.now_s = 5.0
    async with bench:
        bench.dirty.mark(Kind.SESSION, key("now"))
        await bench.dirty.drained()
    assert sorted(bench.seen) == ["late", "now"]


async def test_beyond_the_bound_marks_are_left_to_the_relist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("duplex_operator.watch.MOST_DIRTY", 2)
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.dirty.mark(Kind.SESSION, key(name))
    assert (len(bench.dirty), bench.dirty.overflowed) == (2, 1)
    bench.now_s = 3.0
    assert bench.dirty.oldest_s() == 3.0


async def test_a_cancelled_set_ends_even_while_news_come() -> None:
    bench = Bench(at_once=8)
    async with bench:
        for number in range(50):
            bench.dirty.mark(Kind.SESSION, key(str(number)))
            await asyncio.sleep(0)
        bench.task.cancel()
        bench.dirty.mark(Kind.SESSION, key("last"))
        async with asyncio.timeout(60):
            await asyncio.gather(bench.task, return_exceptions=True)
    assert bench.task.done()
