"""When a session changes hands. Pure: facts in, verdict out.

At the end of a turn if one comes in time, else between two units; at once when nobody listens. The
next owner is ready by then, so nothing but the reply in progress is a reason to wait.
"""

from dataclasses import dataclass

from duplex_sidecar.session.parking import Standing


@dataclass(frozen=True)
class HandOver:
    """To which replica, and under which fence it has offered to take the session."""

    replica: str
    fence: int


def may_hand_over(by_s: float, standing: Standing) -> bool:
    """by_s: up to when the end of a turn is waited for, on the clock of `standing`."""
    if not standing.between_units:
        return False
    silent = not standing.turn_open or standing.detached_s is not None
    return silent or standing.now_s >= by_s
