"""Structured logs: one JSON object a line on stderr, with session and unit ids by context.

`with log_context(session=..., unit=...)` marks everything logged inside, in the task it runs in.
A log call says its message and, as `extra={"fields": {...}}`, its numbers and ids. Content (text,
audio) is never passed to a logger.
"""

import contextlib
import datetime
import json
import logging
import math
import sys
import traceback
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from typing import TextIO

MAX_VALUE_CHARACTERS = 500
MAX_STACK_CHARACTERS = 8_000

_session: ContextVar[str | None] = ContextVar("duplex_session", default=None)
_unit: ContextVar[int | None] = ContextVar("duplex_unit", default=None)


@contextlib.contextmanager
def log_context(session: str | None = None, unit: int | None = None) -> Generator[None]:
    """Lines logged inside carry these ids; None leaves the outer one. Tasks started inside keep
    them."""
    session_token = None if session is None else _session.set(session)
    unit_token = None if unit is None else _unit.set(unit)
    try:
        yield
    finally:
        if unit_token is not None:
            _unit.reset(unit_token)
        if session_token is not None:
            _session.reset(session_token)


class JsonFormatter(logging.Formatter):
    """time (UTC, ms), level, logger, message, replica, session, unit, the fields, error."""

    def __init__(self, replica: str, process: str) -> None:
        super().__init__()
        self._replica = replica
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _bounded(record.getMessage()),
            "replica": self._replica,
            "process": self._process,
        }
        if (session := _session.get()) is not None:
            line["session"] = session
        if (unit := _unit.get()) is not None:
            line["unit"] = unit
        fields: object = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line["fields"] = {str(name): _bounded(value) for name, value in fields.items()}
        if record.exc_info is not None and record.exc_info[0] is not None:
            # The exception's own text is left out: it may quote what it could not parse.
            line["error"] = record.exc_info[0].__name__
            frames = "".join(traceback.format_tb(record.exc_info[2]))
            line["stack"] = frames[-MAX_STACK_CHARACTERS:]
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def _bounded(value: object) -> object:
    """Finite numbers, truth values and None as they are; the rest as text of bounded length."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    text = str(value)
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return text[: MAX_VALUE_CHARACTERS - 1] + "…"


def configure_logs(
    replica: str, process: str, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Make JSON lines on stderr (or `stream`) the only output of the root logger."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(replica, process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
