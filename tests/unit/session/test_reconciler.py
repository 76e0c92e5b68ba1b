"""Streams that belong to no session are closed, and only those."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from duplex_sidecar.session import reconciler
from duplex_sidecar.session.reconciler import orphans
from duplex_sidecar.session.stages import StageSet

pytestmark = pytest.mark.unit


def test_a_stream_of_nobody_is_suspected_first_and_closed_then() -> None:
    held = {"a/1/1", "b/4/2", "c"}
    close, suspects = orphans(held, {"a"}, set())
    assert (close, suspects) == (set(), {"b/4/2", "c"})
    close, suspects = orphans(held, {"a"}, suspects)
    assert (close, suspects) == ({"b/4/2", "c"}, set())


def test_a_session_that_came_meanwhile_keeps_its_stream() -> None:
    _, suspects = orphans({"a/1/1"}, set(), set())
    assert orphans({"a/1/1"}, {"a"}, suspects) == (set(), set())


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = SimpleNamespace(encoder=None, thinker=None, talker=None, code2wav=None)
    watching = reconciler.Reconciler(cast("StageSet", stages), set)
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        raise ArithmeticError("nobody has thought of this")

    monkeypatch.setattr(reconciler, "PERIOD_S", 0.0)
    monkeypatch.setattr(watching, "look", look)
    task = asyncio.create_task(watching.run())
    async with asyncio.timeout(60):
        while looks < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
