"""Lines that machines read, and who they are about."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from duplex_operator.logs import configure_logs, looking_at
from duplex_operator.objects import Kind, ObjectKey
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit

ADDRESS = "redis://:password@ledger"
KEY = ObjectKey("default", "talk")
log = logging.getLogger("duplex_operator.test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logs("operator-1", "INFO", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_who_it_is_about(lines: io.StringIO) -> None:
    log.info("alone")
    with looking_at(Kind.SESSION, KEY):
        log.warning("%s", "x" * 5_000)
    alone, about = read(lines)
    assert set(alone) == {"time", "level", "logger", "message", "replica", "process"}
    assert (alone["replica"], alone["process"]) == ("operator-1", "operator")
    assert (about["session"], about["level"]) == ("default/talk", "warning")
    assert len(about["message"]) == 1_000


def test_an_exceptions_text_stays_out(lines: io.StringIO) -> None:
    try:
        raise ValueError(ADDRESS)
    except ValueError:
        log.exception("it failed")
    (line,) = read(lines)
    assert line["error"] == "ValueError"
    assert "test_operator_logs" in line["stack"]
    assert ADDRESS not in lines.getvalue()


async def test_what_a_look_says_and_why_it_failed_carry_its_object(lines: io.StringIO) -> None:
    looked = asyncio.Event()

    async def look(_: ObjectKey) -> float | None:
        log.info("inside")
        looked.set()
        raise RuntimeError("no")

    dirty = DirtySet()
    dirty.mark(Kind.POOL, KEY)
    task = asyncio.create_task(dirty.run({Kind.POOL: look}, 1))
    async with asyncio.timeout(60):
        await looked.wait()
        await dirty.drained()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [line["pool"] for line in read(lines)] == ["default/talk", "default/talk"]
