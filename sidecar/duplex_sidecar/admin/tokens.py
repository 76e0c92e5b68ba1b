"""The admin token: given once, or in a file that is read again when it changes.

A token that was replaced stays valid for a while: whoever still holds it, and the file's other
readers, change over in their own time.
"""

import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

OLD_TOKEN_VALID_S = 300.0
LOOK_EVERY_S = 1.0
MAX_TOKEN_BYTES = 4096


class AdminToken(Protocol):
    def matches(self, given: str) -> bool:
        """Compared in constant time. An empty token matches nothing."""
        ...


class FixedToken:
    def __init__(self, token: str) -> None:
        self._token = token

    def matches(self, given: str) -> bool:
        return _same(given, self._token)


class TokenFile:
    """Raises OSError and ValueError when there is no token in the file at the start; later it goes
    on with the one that it knows. read: of a file's text, None while it is as it was."""

    def __init__(
        self, read: Callable[[], str | None], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock_s = clock_s
        self._current = (read() or "").strip()
        if not self._current:
            raise ValueError("the file of the admin token is empty")
        self._previous = ""
        self._previous_until_s = 0.0
        self._looked_s = clock_s()

    def matches(self, given: str) -> bool:
        now_s = self._clock_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look(now_s)
        old = _same(given, self._previous) and now_s < self._previous_until_s
        return _same(given, self._current) or old

    def _look(self, now_s: float) -> None:
        try:
            token = (self._read() or "").strip()
        except OSError as error:
            log.warning("admin token cannot be read again: %s", error.strerror)
            return
        if token and token != self._current:
            self._previous, self._previous_until_s = self._current, now_s + OLD_TOKEN_VALID_S
            self._current = token
            log.info("the admin token has changed")


def file_reader(path: Path) -> Callable[[], str | None]:
    """The file's text when it is another file, or was written, since the last call."""
    seen: tuple[int, int, int] | None = None

    def read() -> str | None:
        nonlocal seen
        found = os.stat(path)
        state = (found.st_ino, found.st_mtime_ns, found.st_size)
        if state == seen:
            return None
        with path.open("rb") as file:
            text = file.read(MAX_TOKEN_BYTES).decode(errors="replace")
        seen = state
        return text

    return read


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode()) and bool(token)
