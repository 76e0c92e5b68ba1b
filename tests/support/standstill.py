"""How long the machine, or this process on it, stood still: what a measured time may be longer by
through no fault of what is measured."""

import threading
import time
from types import TracebackType
from typing import Self

_TICK_S = 0.01
_IN_TIME_S = 0.02
"""So late a tick may be without counting: threads of one process take turns."""


class Standstill:
    """Ticks in a thread of its own, beside whatever is measured; use with `with`. What keeps one
    event loop, or one other process, from going on is not counted."""

    def __init__(self) -> None:
        self._missed: list[tuple[float, float]] = []
        """When a late tick came, and by how much."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            late = now - last - _TICK_S
            if late > _IN_TIME_S:
                self._missed.append((now, late))
            last = now

    def between_s(self, first_s: float, last_s: float) -> float:
        """Seconds of standstill that fell in between, on the monotonic clock."""
        return sum(
            max(0.0, min(end, last_s) - max(end - late, first_s))
            for end, late in list(self._missed)
        )

    def moved_s(self) -> float:
        """Seconds since `with`, without those of standstill."""
        now = time.monotonic()
        return now - self._began_s - self.between_s(self._began_s, now)
