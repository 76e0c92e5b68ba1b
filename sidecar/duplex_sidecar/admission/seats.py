"""Seats of an engine beyond one per slot. Pure bookkeeping.

A rebuild opens a new stream beside the old one, which takes a second seat until the old one is let
go. There are few of those; who gets none closes the old stream first, which an exact rebuild can
afford, since it renders the whole prompt anyway. So seats never run out, whatever comes together.
"""


class SpareSeats:
    """Counts spare seats of one engine, for all sessions of a sidecar."""

    def __init__(self, seats: int) -> None:
        if seats < 0:
            raise ValueError("seats must not be negative")
        self._free = seats

    @property
    def free(self) -> int:
        return self._free

    def try_take(self) -> bool:
        """Take one if there is one."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def give_back(self) -> None:
        self._free += 1
