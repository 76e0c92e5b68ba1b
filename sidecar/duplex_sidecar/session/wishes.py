"""What others want of a session that runs here: that it ends, that it parks, that it lets go.

Said at any time; the session's own task looks at them between two pieces of work.
"""

import asyncio
from collections.abc import Callable

from duplex_api.resolve import ResolvedLifecycle
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.session.ending import SHUT_DOWN, Ending, parked
from duplex_sidecar.session.parking import Expire, Park, ParkReason, Standing, verdict


class Wishes:
    """Of one session, all that it has not granted yet."""

    def __init__(self, clock_s: Callable[[], float], wake: Callable[[], None]) -> None:
        """clock_s: the session's. wake: its task has to look."""
        self._clock_s = clock_s
        self._wake = wake
        self._parks: dict[ParkReason, float] = {}
        self.ending: Ending | None = None
        """How it is to end at once."""
        self.told_to_go = asyncio.Event()
        """Somebody waits for it to be gone."""

    def end(self, ending: Ending) -> None:
        """At once, and in this way, whatever was wished before."""
        self.ending = ending
        self._wake()

    def let_go(self) -> None:
        """End here, so that another replica may go on; a park that is under way is no longer waited
        for than that takes."""
        self.ending = self.ending or SHUT_DOWN
        self.told_to_go.set()
        self._wake()

    def park(self, reason: ParkReason, grace_s: float) -> None:
        """At the end of the present turn, or between two units once the grace is over. An earlier
        wish of that reason is never put off."""
        by_s = self._clock_s() + grace_s
        self._parks[reason] = min(by_s, self._parks.get(reason, by_s))
        self._wake()

    def withdraw(self, reason: ParkReason) -> None:
        """Go on after all, unless it is parking already."""
        self._parks.pop(reason, None)

    def verdict(self, life: ResolvedLifecycle, standing: Standing) -> Ending | None:
        """Whether it expires or parks now, also by its own terms."""
        match verdict(life, self._parks, standing):
            case Expire(sentence):
                return Ending(ErrorCode.SESSION_EXPIRED, sentence, for_good=True)
            case Park(reason):
                return parked(reason)
            case None:
                return None
