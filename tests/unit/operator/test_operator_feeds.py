"""A feed that breaks in any way is dialled again."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest

from duplex_operator import fleet as fleet_module
from duplex_operator.feed import BeatLine, FeedLine, FeedPhase, FeedSession, HelloLine
from duplex_operator.fleet import Fleet, PodFeed
from duplex_operator.objects import Kind, ObjectKey, read_pod, read_session
from duplex_operator.sidecar_client import AdminCredentials, SidecarUnreachableError
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit

POOL = ObjectKey("default", "x")


POD = {
    "metadata": {
        "name": "pod-a",
        "namespace": "default",
        "uid": "uid-a",
        "resourceVersion": "1",
        "labels": {"duplex.dev/pool": "x"},
    },
    "status": {"podIP": "127.0.0.1"},
}
SESSION = {
    "metadata": {"name": "talk", "namespace": "default", "uid": "uid-s", "resourceVersion": "2"},
    "spec": {"poolRef": {"name": "x"}},
    "status": {"placement": {"pod": "pod-a", "podUID": "uid-a", "fence": 1}},
}


class BreakingClient:
    """The first dial breaks in a way that nobody foresaw; the second speaks."""

    dials = 0
    spoke = asyncio.Event()

    def __init__(self, *_: Any) -> None:
        pass

    async def feed(self) -> AsyncGenerator[FeedLine]:
        BreakingClient.dials += 1
        if BreakingClient.dials == 1:
            raise RuntimeError("unforeseen")
        yield HelloLine(replica="r", slots=1, ready=True)
        yield BeatLine()
        BreakingClient.spoke.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def test_what_nobody_foresaw_does_not_end_a_feed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "SidecarClient", BreakingClient)
    monkeypatch.setattr(fleet_module, "FIRST_RETRY_S", 0.001)
    store = Store()
    fleet = Fleet(store, DirtySet())
    fleet.set_credentials(POOL, AdminCredentials("token", ""))
    pod = read_pod(POD)
    assert pod is not None
    store.pods.put(pod)
    async with asyncio.timeout(60):
        await BreakingClient.spoke.wait()
    feed = fleet.pod("uid-a")
    assert feed is not None
    assert feed.takes_sessions
    assert "dialled again" in caplog.text
    await fleet.close()


class ScriptedClient:
    """Says what is in the queue; None ends a feed, and without one nobody can be dialled."""

    lines: asyncio.Queue[FeedLine | None]
    reachable = True

    def __init__(self, *_: Any) -> None:
        pass

    async def feed(self) -> AsyncGenerator[FeedLine]:
        if not ScriptedClient.reachable:
            raise SidecarUnreachableError("refused")
        while (line := await ScriptedClient.lines.get()) is not None:
            yield line
            # Heard: the next one is asked for.
            ScriptedClient.lines.task_done()
        ScriptedClient.lines.task_done()

    async def close(self) -> None:
        pass


class Rig:
    """A pod and its session, heard by a fleet whose dirty set nobody serves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fleet_module, "SidecarClient", ScriptedClient)
        monkeypatch.setattr(fleet_module, "FIRST_RETRY_S", 0.001)
        ScriptedClient.lines = asyncio.Queue()
        ScriptedClient.reachable = True
        self.now_s, self.versions = 100.0, 2
        self.store, self.dirty = Store(), DirtySet(lambda: self.now_s)
        self.fleet = Fleet(self.store, self.dirty, clock=lambda: self.now_s)
        self.fleet.set_credentials(POOL, AdminCredentials("token", ""))
        pod, session = read_pod(POD), read_session(SESSION)
        assert pod is not None
        assert session is not None
        self.store.sessions.put(session)
        self.store.pods.put(pod)

    def show(self, restarts: int, ended: str = "") -> None:
        """What the pod's object has of the sidecar's container. ended: why, if it has."""
        state = {"terminated": {"reason": ended}} if ended else {"running": {}}
        container = {"name": "duplex-sidecar", "restartCount": restarts, "state": state}
        self.versions += 1
        metadata = POD["metadata"] | {"resourceVersion": str(self.versions)}
        status = POD["status"] | {"phase": "Running", "containerStatuses": [container]}
        pod = read_pod({"metadata": metadata, "status": status})
        assert pod is not None
        self.store.pods.put(pod)

    async def speaks(self, replica: str) -> None:
        ScriptedClient.reachable = True
        await self.say(HelloLine(replica=replica, slots=1, ready=True), BeatLine())

    async def breaks(self) -> None:
        """Its feed, for good."""
        ScriptedClient.reachable = False
        await self.say(None)
        await self.until(lambda feed: not feed.connected)

    async def say(self, *lines: FeedLine | None) -> None:
        """Returns when they were heard."""
        for line in lines:
            ScriptedClient.lines.put_nowait(line)
        await ScriptedClient.lines.join()

    async def until(self, true: Callable[[PodFeed], bool]) -> None:
        """Looks whenever the fleet tells of a change."""
        told = asyncio.Event()
        self.fleet.listeners.append(lambda _: told.set())
        async with asyncio.timeout(60):
            while (feed := self.fleet.pod("uid-a")) is None or not true(feed):
                await told.wait()
                told.clear()

    async def taken(self) -> set[Kind]:
        """What is dirty now; it is not, afterwards."""
        seen: set[Kind] = set()

        async def pool(key: ObjectKey) -> None:
            if key == POOL:
                seen.add(Kind.POOL)

        async def session(_: ObjectKey) -> None:
            seen.add(Kind.SESSION)

        work = asyncio.create_task(self.dirty.run({Kind.POOL: pool, Kind.SESSION: session}, 1))
        # So that it looks at its timetable, too.
        self.dirty.mark(Kind.POOL, ObjectKey("default", "another"))
        await self.dirty.drained()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return seen


async def test_a_sidecar_says_what_it_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time anew: the container may be of another release after a restart."""
    rig = Rig(monkeypatch)
    for told in ((), ("resume", "unheard-of"), ()):
        await rig.say(HelloLine(replica="r", slots=1, ready=True, understands=told), BeatLine())
        feed = rig.fleet.pod("uid-a")
        assert feed is not None
        assert feed.understands == told
    await rig.fleet.close()


async def test_it_is_unheard_until_it_has_told_of_every_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)

    def unheard() -> bool:
        feed = rig.fleet.pod("uid-a")
        return feed is not None and feed.is_unheard

    assert unheard()
    await rig.say(HelloLine(replica="r", slots=1, ready=True))
    assert unheard()
    await rig.say(BeatLine())
    assert not unheard()
    # Other credentials: what it said is kept, and it is dialled anew.
    rig.fleet.set_credentials(POOL, AdminCredentials("another", ""))
    assert unheard()
    await rig.fleet.close()


async def test_counters_wait_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    word = FeedSession(session="uid-s", phase=FeedPhase.ACTIVE, fence=1, attached=True)
    await rig.say(HelloLine(replica="r", slots=1, ready=True), word, BeatLine())
    assert Kind.SESSION in await rig.taken()
    for units in range(1, 4):
        await rig.say(msgspec.structs.replace(word, units=units))
        assert await rig.taken() == set()
    said = rig.fleet.session("uid-a", "uid-s")
    assert said is not None
    assert said.units == 3
    rig.now_s += 59.0
    assert await rig.taken() == set()
    rig.now_s += 32.0
    assert await rig.taken() == {Kind.SESSION}
    await rig.say(msgspec.structs.replace(word, units=4, attached=False))
    assert await rig.taken() == {Kind.SESSION}
    await rig.fleet.close()


async def test_counters_do_not_wait_for_what_is_due_much_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    word = FeedSession(session="uid-s", phase=FeedPhase.ACTIVE, fence=1, attached=True)
    await rig.say(HelloLine(replica="r", slots=1, ready=True), word, BeatLine())
    await rig.taken()
    (session,) = rig.store.sessions.all()
    rig.dirty.mark_after(Kind.SESSION, session.meta.key, 86_400.0)
    await rig.say(msgspec.structs.replace(word, units=1))
    rig.now_s += 91.0
    assert await rig.taken() == {Kind.SESSION}
    await rig.fleet.close()


async def test_a_broken_feed_that_cannot_be_dialled_makes_its_pod_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    await rig.say(HelloLine(replica="r", slots=1, ready=True), BeatLine())
    await rig.taken()
    ScriptedClient.reachable = False
    await rig.say(None)
    await rig.until(lambda feed: feed.suspect and not feed.takes_sessions)
    assert await rig.taken() == {Kind.POOL, Kind.SESSION}
    ScriptedClient.reachable = True
    await rig.say(HelloLine(replica="r", slots=1, ready=True), BeatLine())
    await rig.until(lambda feed: feed.takes_sessions)
    await rig.fleet.close()


async def test_a_broken_feed_that_can_be_dialled_again_is_no_suspicion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    suspected: list[bool] = []
    await rig.say(HelloLine(replica="r", slots=1, ready=True), BeatLine())
    rig.fleet.listeners.append(lambda _: suspected.append(rig.fleet.pods()[0].suspect))
    await rig.say(None, HelloLine(replica="r", slots=1, ready=True), BeatLine())
    await rig.until(lambda feed: feed.takes_sessions)
    assert suspected
    assert not any(suspected)
    await rig.fleet.close()


async def test_another_start_of_a_sidecar_proves_the_one_before_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    assert rig.fleet.ended_replicas("uid-a") == ()
    hellos = [HelloLine(replica=f"uid-a-{boot}", slots=1, ready=True) for boot in range(12)]
    await rig.say(hellos[0], BeatLine())
    assert rig.fleet.ended_replicas("uid-a") == ()
    await rig.say(None, hellos[0], BeatLine(), None, hellos[1], BeatLine())
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-0",)
    for hello in hellos[2:]:
        await rig.say(None, hello, BeatLine())
    assert rig.fleet.ended_replicas("uid-a") == tuple(f"uid-a-{boot}" for boot in range(3, 11))
    assert rig.fleet.ended_replicas("uid-unknown") == ()
    await rig.fleet.close()


async def test_a_container_that_has_ended_proves_its_sidecar_dead_once_nothing_is_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its feed stands the pod's object is out of date: another start speaks there."""
    rig = Rig(monkeypatch)
    await rig.say(HelloLine(replica="uid-a-1", slots=1, ready=True), BeatLine())
    ended = {"name": "duplex-sidecar", "state": {"terminated": {"reason": "OOMKilled"}}}
    status = POD["status"] | {"phase": "Running", "containerStatuses": [ended]}
    pod = read_pod(POD | {"status": status, "metadata": POD["metadata"] | {"resourceVersion": "3"}})
    assert pod is not None
    assert pod.sidecar_terminated == "OOMKilled"
    rig.store.pods.put(pod)
    assert rig.fleet.ended_replicas("uid-a") == ()
    ScriptedClient.reachable = False
    await rig.say(None)
    await rig.until(lambda feed: not feed.connected)
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1",)
    ScriptedClient.reachable = True
    await rig.say(HelloLine(replica="uid-a-2", slots=1, ready=True), BeatLine())
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1",)
    await rig.fleet.close()


async def test_an_object_that_lags_behind_proves_nothing_of_the_start_that_speaks_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It tells of the end of the start before; the present one has only lost its connection."""
    rig = Rig(monkeypatch)
    rig.show(0)
    await rig.speaks("uid-a-1")
    rig.show(0, "OOMKilled")
    await rig.breaks()
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1",)
    await rig.speaks("uid-a-2")
    await rig.breaks()
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1",)
    rig.show(1)
    await rig.speaks("uid-a-2")
    await rig.breaks()
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1",)
    rig.show(1, "Error")
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1", "uid-a-2")
    await rig.fleet.close()


async def test_an_end_that_is_told_of_late_is_that_of_the_start_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    rig.show(3)
    await rig.speaks("uid-a-1")
    await rig.say(None)
    await rig.speaks("uid-a-2")
    rig.show(3, "Error")
    await rig.breaks()
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1",)
    rig.show(4, "Error")
    assert rig.fleet.ended_replicas("uid-a") == ("uid-a-1", "uid-a-2")
    await rig.fleet.close()
