"""A feed that breaks in any way is dialled again."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from duplex_operator import fleet as fleet_module
from duplex_operator.feed import BeatLine, FeedLine, HelloLine
from duplex_operator.fleet import Fleet
from duplex_operator.objects import ObjectKey, read_pod
from duplex_operator.sidecar_client import AdminCredentials
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit

POOL = ObjectKey("default", "x")


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
    pod = read_pod(
        {
            "metadata": {
                "name": "pod-a",
                "namespace": "default",
                "uid": "uid-a",
                "resourceVersion": "1",
                "labels": {"duplex.dev/pool": "x"},
            },
            "status": {"podIP": "127.0.0.1"},
        }
    )
    assert pod is not None
    store.pods.put(pod)
    async with asyncio.timeout(5):
        await BreakingClient.spoke.wait()
    feed = fleet.pod("uid-a")
    assert feed is not None
    assert feed.takes_sessions
    assert "dialled again" in caplog.text
    await fleet.close()
