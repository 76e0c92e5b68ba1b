"""The label `occupied`: there before a sidecar hears of a session, written once for many."""

import asyncio
from typing import Any, cast

import pytest

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ConflictError
from duplex_operator.kube.resources import Resource
from duplex_operator.names import ANNOTATION_IDLE_SINCE, LABEL_OCCUPIED, LABEL_POOL
from duplex_operator.objects import ObjectKey, RawObject, read_pod
from duplex_operator.occupancy import Occupancy
from duplex_operator.store import Store

pytestmark = pytest.mark.unit

POD = "pod-uid"
NOW_MS = 1_700_000_000_000


class Pods:
    """The API server's one pod. gate: what a write waits for. other: another one has its name."""

    def __init__(self, occupied: str = "false", *, deleting: bool = False) -> None:
        self.version = 1
        self.writes: list[dict[str, Any]] = []
        self.gate: asyncio.Event | None = None
        self.other = False
        self.metadata: dict[str, Any] = {
            "name": "talk-0",
            "namespace": "models",
            "uid": POD,
            "labels": {LABEL_POOL: "talk", LABEL_OCCUPIED: occupied},
            "annotations": {},
        }
        if deleting:
            self.metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.store = Store()
        pod = read_pod(self.raw())
        assert pod is not None
        self.store.pods.put(pod)
        self.occupancy = Occupancy(self.store, cast("KubernetesApi", self))

    def raw(self) -> RawObject:
        return {"metadata": {**self.metadata, "resourceVersion": str(self.version)}}

    async def patch(
        self, resource: Resource, key: ObjectKey, body: dict[str, Any], *, version: str | None
    ) -> RawObject:
        assert (resource.plural, key.name, version) == ("pods", "talk-0", None)
        self.writes.append(body["metadata"])
        if self.gate is not None:
            await self.gate.wait()
        if self.other or body["metadata"]["uid"] != POD:
            raise ConflictError(409, "Conflict", "another uid")
        for part in ("labels", "annotations"):
            self.metadata[part] = {**self.metadata[part], **body["metadata"].get(part, {})}
        self.version += 1
        return self.raw()

    @property
    def label(self) -> str:
        return self.metadata["labels"][LABEL_OCCUPIED]


async def test_a_pod_is_marked_once_for_all_its_sessions() -> None:
    pods = Pods()
    await asyncio.gather(*(pods.occupancy.occupy(POD) for _ in range(32)))
    assert pods.label == "true"
    assert len(pods.writes) == 1


async def test_it_is_marked_when_the_call_returns() -> None:
    pods = Pods()
    pods.gate = asyncio.Event()
    call = asyncio.create_task(pods.occupancy.occupy(POD))
    second = asyncio.create_task(pods.occupancy.occupy(POD))
    await asyncio.sleep(0)
    assert not call.done()
    assert not second.done()
    pods.gate.set()
    await asyncio.gather(call, second)
    assert pods.label == "true"


async def test_a_session_that_comes_while_the_label_is_taken_off_has_it_back() -> None:
    pods = Pods("true")
    pods.gate = asyncio.Event()
    emptied = asyncio.create_task(pods.occupancy.settle(POD, lambda: False, NOW_MS))
    await asyncio.sleep(0)
    opened = asyncio.create_task(pods.occupancy.occupy(POD))
    await asyncio.sleep(0)
    pods.gate.set()
    await asyncio.gather(emptied, opened)
    assert [write["labels"][LABEL_OCCUPIED] for write in pods.writes] == ["false", "true"]
    assert pods.label == "true"


async def test_whether_it_is_empty_is_asked_in_its_turn() -> None:
    """A session was placed there while the pool's look waited for another's write."""
    pods = Pods("false")
    pods.gate = asyncio.Event()
    sessions: set[str] = set()
    opened = asyncio.create_task(pods.occupancy.occupy(POD))
    await asyncio.sleep(0)
    emptied = asyncio.create_task(pods.occupancy.settle(POD, lambda: bool(sessions), NOW_MS))
    await asyncio.sleep(0)
    sessions.add("talk")
    pods.gate.set()
    await asyncio.gather(opened, emptied)
    assert pods.label == "true"
    assert len(pods.writes) == 1


async def test_an_emptied_pod_is_idle_since_then() -> None:
    pods = Pods("true")
    await pods.occupancy.settle(POD, lambda: False, NOW_MS)
    assert pods.label == "false"
    assert pods.metadata["annotations"][ANNOTATION_IDLE_SINCE] == "2023-11-14T22:13:20Z"


async def test_a_pod_that_is_gone_stops_nobody() -> None:
    pods = Pods()
    pods.other = True
    await pods.occupancy.occupy(POD)
    assert pods.label == "false"
    await pods.occupancy.occupy("unknown")
    ending = Pods(deleting=True)
    await ending.occupancy.occupy(POD)
    assert ending.writes == []
