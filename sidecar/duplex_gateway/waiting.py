"""How long a call waits, how often it looks, and when it says so. No I/O; the clock is given."""

import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
LONGEST_PAUSE_LATER_S = 2.0
LATER_S = 10.0
"""Who has waited so long looks less often."""
SETTLED_S = 5.0
"""A connection that lasted so long was a good one; after a shorter one the next comes later."""
MOST_SHORT_CONNECTIONS = 20
FIRST_NOTICE_S = 1.0
"""A move is usually over by then, and the client need not hear of it."""
NOTICE_EVERY_S = 5.0
CHANGE_EVERY_S = 1.0
WAKE_EVERY_S = 5.0
"""A wake may get lost with an operator."""
REST_S = 2.0
"""How often a call whose session sleeps looks whether it still does."""


class Patience:
    """Of one call: since when it has no connection to its session's owner."""

    def __init__(self, wait_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._wait_s = wait_s
        self._clock_s = clock_s
        self._since_s = clock_s()
        self._greeted_s: float | None = None
        self._was_greeted = False
        self._looks = 0
        self._short_connections = 0
        self._wake_s: float | None = None
        self._woken_after = 0
        self._notice_s: float | None = None
        self._noticed: tuple[str, int | None] | None = None

    @property
    def waited_s(self) -> float:
        return self._clock_s() - self._since_s

    @property
    def moved(self) -> bool:
        """Whether there was a connection before."""
        return self._was_greeted

    @property
    def exhausted(self) -> bool:
        many = self._short_connections > MOST_SHORT_CONNECTIONS
        return many or self.waited_s > self._wait_s

    def next_pause_s(self) -> float:
        """To be slept before the next look; none before the first."""
        pause_s = FIRST_PAUSE_S * 2 ** min(self._looks - 1, 10) if self._looks else 0.0
        self._looks += 1
        return min(pause_s, LONGEST_PAUSE_S if self.waited_s < LATER_S else LONGEST_PAUSE_LATER_S)

    def greeted(self) -> None:
        self._greeted_s = self._clock_s()
        self._was_greeted = True

    def lost(self) -> None:
        """The connection is lost, or there was none."""
        now = self._clock_s()
        if self._greeted_s is None:
            return
        settled = now - self._greeted_s >= SETTLED_S
        self._short_connections = 0 if settled else self._short_connections + 1
        self._looks = 0 if settled else self._short_connections - 1
        self._greeted_s = None
        self._since_s = now
        self._wake_s = self._notice_s = self._noticed = None

    def rest(self) -> None:
        """The session sleeps, and that is nobody's waiting."""
        self._since_s = self._clock_s()
        self._looks = 0

    def wake_is_due(self, fence: int) -> bool:
        """fence: of the last owner; one that came and went since the last wake needs another."""
        now = self._clock_s()
        due = self._wake_s is None or now - self._wake_s >= WAKE_EVERY_S
        due = due or fence != self._woken_after
        if due:
            self._wake_s, self._woken_after = now, fence
        return due

    def notice_is_due(self, reason: str, position: int | None, *, at_once: bool = False) -> bool:
        """Whether the client is to be told; asked for a notice that is then sent."""
        now = self._clock_s()
        if self._notice_s is None:
            due = at_once or self.waited_s >= FIRST_NOTICE_S
        else:
            changed = self._noticed != (reason, position)
            due = now - self._notice_s >= (CHANGE_EVERY_S if changed else NOTICE_EVERY_S)
            due = due and not (at_once and not changed)
        if due:
            self._notice_s, self._noticed = now, (reason, position)
        return due
