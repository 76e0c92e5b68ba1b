"""Watches that break, end, and lose their place, without an API server."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from duplex_operator import api_watch
from duplex_operator.api_watch import ApiWatch, Watched
from duplex_operator.kube.api import KubernetesApi, WatchEvent
from duplex_operator.kube.errors import ApiError, MissingError, UnavailableError
from duplex_operator.kube.resources import PODS, SESSIONS, Resource
from duplex_operator.objects import Kind, RawObject

pytestmark = pytest.mark.unit

TALKS = Watched(Kind.SESSION, SESSIONS, "", "")
GONE = MissingError(410, "Expired", "too old resource version")
BROKEN = UnavailableError(0, "Unreachable", "ServerDisconnectedError")
Step = WatchEvent | ApiError


def event(kind: str, version: int) -> WatchEvent:
    return WatchEvent(kind, {"metadata": {"name": "talk", "resourceVersion": str(version)}})


@dataclass
class Server:
    """Each watch says what its script says, then ends; the last one stands for ever."""

    scripts: list[list[Step]]
    began_at: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    last: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(
        self, resource: Resource, _: str, version: str, *, selector: str
    ) -> AsyncGenerator[WatchEvent | None]:
        self.began_at.append((resource.plural, version, selector))
        script = self.scripts.pop(0) if self.scripts else []
        if script and script[0] is GONE:
            raise GONE
        yield None
        for step in script:
            if isinstance(step, ApiError):
                raise step
            yield step
        if not self.scripts:
            self.last.set()
            await asyncio.Event().wait()


@dataclass
class Seen:
    told: list[tuple[Kind, str, str]] = field(default_factory=list[tuple[Kind, str, str]])
    lists: list[str] = field(default_factory=list[str])

    def sink(self, kind: Kind, event_type: str, raw: RawObject) -> None:
        if raw["metadata"]["name"] == "odd":
            raise ValueError("unforeseen")
        self.told.append((kind, event_type, raw["metadata"]["resourceVersion"]))

    async def again(self, _: Watched) -> str:
        answer = self.lists.pop(0)
        if not answer:
            raise BROKEN
        return answer


async def run(server: Server, seen: Seen) -> ApiWatch:
    watch = ApiWatch(cast("KubernetesApi", cast("Any", server)), seen.sink, seen.again)
    assert not watch.stands
    work = asyncio.create_task(watch.run({TALKS: "5"}))
    async with asyncio.timeout(60):
        await server.last.wait()
    stood = watch.stands
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert stood
    return watch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_watch, "FIRST_RETRY_S", 0.001)


async def test_a_watch_goes_on_from_what_it_saw_last() -> None:
    """Ended by the server, broken off, and ended after a bookmark, which is no news."""
    server, seen = Server([]), Seen()
    server.scripts = [
        [event("ADDED", 6), event("MODIFIED", 7)],
        [event("DELETED", 8), BROKEN],
        [event("BOOKMARK", 30)],
        [],
    ]
    await run(server, seen)
    assert [version for _, version, _ in server.began_at] == ["5", "7", "8", "30"]
    assert seen.told == [
        (Kind.SESSION, "ADDED", "6"),
        (Kind.SESSION, "MODIFIED", "7"),
        (Kind.SESSION, "DELETED", "8"),
    ]


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "in-the-stream"])
async def test_a_forgotten_place_is_listed_anew(late: bool) -> None:
    """Again and again, until it can be listed."""
    forgotten: list[Step] = (
        [event("ADDED", 6), MissingError(410, "Expired", "x")] if late else [GONE]
    )
    server, seen = Server([forgotten, [GONE], []]), Seen(lists=["", "40"])
    await run(server, seen)
    assert [version for _, version, _ in server.began_at] == ["5", "6" if late else "5", "40"]
    assert seen.lists == []


async def test_an_object_that_nobody_foresaw_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = WatchEvent("ADDED", {"metadata": {"name": "odd", "resourceVersion": "6"}})
    server, seen = Server([[odd, event("ADDED", 7)], []]), Seen()
    await run(server, seen)
    assert seen.told == [(Kind.SESSION, "ADDED", "7")]
    assert "could not be taken" in caplog.text


async def test_every_watch_has_to_stand() -> None:
    pods = Watched(Kind.POD, PODS, "default", "a=b")
    server, seen = Server([[], [BROKEN], []]), Seen()
    watch = ApiWatch(cast("KubernetesApi", cast("Any", server)), seen.sink, seen.again)
    work = asyncio.create_task(watch.run({TALKS: "5", pods: "9"}))
    async with asyncio.timeout(60):
        await server.last.wait()
    assert watch.stands
    assert ("pods", "9", "a=b") in server.began_at
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
