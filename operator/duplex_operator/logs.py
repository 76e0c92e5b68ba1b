"""Structured logs: one JSON object a line on stderr, with the session or pool that it is about.

`with looking_at("session", key)` marks everything logged inside, in the task it runs in. The same
keys as the sidecars' lines have. Content and tokens are never passed to a logger.
"""

import contextlib
import datetime
import json
import logging
import sys
import traceback
from collections.abc import Generator
from contextvars import ContextVar
from typing import TextIO

from duplex_operator.objects import Kind, ObjectKey

MOST_MESSAGE_CHARACTERS = 1_000
MOST_STACK_CHARACTERS = 8_000
PROCESS = "operator"

_about: ContextVar[tuple[str, str] | None] = ContextVar("duplex_about", default=None)


@contextlib.contextmanager
def looking_at(kind: Kind, key: ObjectKey) -> Generator[None]:
    """Lines logged inside say which object they are about: `"session": "namespace/name"`."""
    token = _about.set((str(kind), str(key)))
    try:
        yield
    finally:
        _about.reset(token)


class JsonFormatter(logging.Formatter):
    """time (UTC, ms), level, logger, message, replica, process, session or pool, error, stack."""

    def __init__(self, replica: str) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _bounded(record.getMessage()),
            "replica": self._replica,
            "process": PROCESS,
        }
        if (about := _about.get()) is not None:
            kind, key = about
            line[kind] = key
        if record.exc_info is not None and record.exc_info[0] is not None:
            # The exception's own text is left out: it may quote what it could not parse.
            line["error"] = record.exc_info[0].__name__
            frames = "".join(traceback.format_tb(record.exc_info[2]))
            line["stack"] = frames[-MOST_STACK_CHARACTERS:]
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def configure_logs(replica: str, level: str, stream: TextIO | None = None) -> None:
    """Makes JSON lines on stderr (or `stream`) the only output of the root logger. Libraries speak
    from warnings on."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(replica))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("kopf", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _bounded(text: str) -> str:
    if len(text) <= MOST_MESSAGE_CHARACTERS:
        return text
    return text[: MOST_MESSAGE_CHARACTERS - 1] + "…"
