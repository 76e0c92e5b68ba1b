"""How kopf is run, without an API server."""

import asyncio
import threading
from typing import Any

import kopf
import pytest

from duplex_operator.kopf_watch import KopfWatch

pytestmark = pytest.mark.unit


async def test_the_watches_stand_while_kopf_runs_and_know_no_user_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A uid without an entry in passwd has no name: kopf must not ask for one."""
    given: dict[str, Any] = {}
    loop, began, end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    async def operator(**options: Any) -> None:
        given.update(options)
        loop.call_soon_threadsafe(began.set)
        await asyncio.to_thread(end.wait, 5)

    monkeypatch.setattr(kopf, "operator", operator)
    watch = KopfWatch(lambda *_: None, lambda: kopf.ConnectionInfo(server="x"), (), "me-1")
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(5):
        await began.wait()
    assert given["identity"] == "me-1"
    assert not watch.stands
    given["ready_flag"].set()
    assert watch.stands
    end.set()
    with pytest.raises(RuntimeError):
        await task
    assert not watch.stands
