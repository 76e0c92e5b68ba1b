"""Log lines: JSON, with the ids of their context, bounded, and without an exception's own words."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from duplex_sidecar.telemetry.logs import configure_logs, log_context

pytestmark = pytest.mark.unit


class Lines:
    def __init__(self) -> None:
        self.stream = io.StringIO()

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    captured = Lines()
    configure_logs("r1", "sidecar", stream=captured.stream)
    yield captured
    root.handlers[:] = handlers
    root.setLevel(level)


logger = logging.getLogger("duplex.test")


def test_a_line_has_its_ids_and_fields(lines: Lines) -> None:
    with log_context(session="s1"), log_context(unit=7):
        logger.info("unit done", extra={"fields": {"wall_ms": 71.5, "late": False, "cause": None}})
    logger.debug("not shown")
    logger.warning("after")
    first, second = lines.read()
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "duplex.test",
        "message": "unit done",
        "replica": "r1",
        "process": "sidecar",
        "session": "s1",
        "unit": 7,
        "fields": {"wall_ms": 71.5, "late": False, "cause": None},
    }
    assert "session" not in second
    assert "unit" not in second


async def test_tasks_keep_their_own_ids(lines: Lines) -> None:
    async def work(session: str) -> None:
        with log_context(session=session):
            await asyncio.sleep(0)
            logger.info("from %s", session)
            await asyncio.create_task(inner(session))

    async def inner(session: str) -> None:
        logger.info("from %s", session)

    await asyncio.gather(*(work(f"s{i}") for i in range(3)))
    assert all(line["message"] == f"from {line['session']}" for line in lines.read())
    assert len(lines.read()) == 6


def test_lines_are_bounded_and_always_json(lines: Lines) -> None:
    logger.info("x" * 100_000, extra={"fields": {"big": "y" * 10_000, "odd": float("nan")}})
    logger.info("line\nbreak \x00 \ud800 ü")
    first, second = lines.read()
    assert len(first["message"]) == 500
    assert len(first["fields"]["big"]) == 500
    assert first["fields"]["odd"] == "nan"
    assert "\n" in second["message"]


def test_an_exception_is_told_by_type_and_place(lines: Lines) -> None:
    words = "what the client said"
    try:
        raise ValueError(words)
    except ValueError:
        logger.exception("a unit failed")
    (line,) = lines.read()
    assert line["error"] == "ValueError"
    assert "test_telemetry_logs.py" in line["stack"]
    assert words not in json.dumps(line)
