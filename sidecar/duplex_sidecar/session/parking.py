"""When a session parks, and when it ends by the clock. Pure: facts in, verdict out.

Parking waits for nothing that may never come: a wish to park is granted at the end of a turn, at
its deadline, or at once when no client listens; always between two units, never inside one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from duplex_api.resolve import ResolvedLifecycle


class ParkReason(StrEnum):
    """Why a session waits in the ledger. Short words: they are in meta, feed and status."""

    REQUESTED = "requested"
    DRAIN = "drain"
    PARK_AFTER = "park_after"
    DISCONNECT_GRACE = "disconnect_grace"


PARK_SENTENCES = {
    ParkReason.REQUESTED: "parked on request",
    ParkReason.DRAIN: "the replica is being emptied",
    ParkReason.PARK_AFTER: "no input within parkAfter",
    ParkReason.DISCONNECT_GRACE: "no client within disconnectGrace",
}


@dataclass(frozen=True)
class Standing:
    """Seconds on one clock. last_input_s: when input came last, or the session was taken up.
    detached_s: since when no client is connected, None while one is; attached_s: since when the
    present or last one was. turn_open: the model is in the middle of a reply. between_units:
    nothing is under way, and the lease is held."""

    now_s: float
    opened_s: float
    last_input_s: float
    attached_s: float
    detached_s: float | None
    turn_open: bool
    between_units: bool


@dataclass(frozen=True)
class Expire:
    """The session is over for good."""

    sentence: str


@dataclass(frozen=True)
class Park:
    reason: ParkReason


def verdict(
    life: ResolvedLifecycle, wishes: Mapping[ParkReason, float], standing: Standing
) -> Expire | Park | None:
    """wishes: by reason, the time up to which the end of a turn is waited for. None: go on."""
    return _expired(life, standing) or _parks(life, wishes, standing)


def _expired(life: ResolvedLifecycle, standing: Standing) -> Expire | None:
    if (standing.now_s - standing.opened_s) * 1000 > life.max_duration_ms:
        return Expire("the session reached its maxDuration")
    if (standing.now_s - standing.last_input_s) * 1000 > life.idle_timeout_ms:
        return Expire("no input within idleTimeout")
    return None


def _parks(
    life: ResolvedLifecycle, wishes: Mapping[ParkReason, float], standing: Standing
) -> Park | None:
    if not standing.between_units:
        return None
    now_s, detached_s = standing.now_s, standing.detached_s
    if wishes:
        reason, by_s = min(wishes.items(), key=lambda wish: wish[1])
        if not standing.turn_open or detached_s is not None or now_s >= by_s:
            return Park(reason)
    if detached_s is not None:
        away = (now_s - detached_s) * 1000 > life.disconnect_grace_ms
        return Park(ParkReason.DISCONNECT_GRACE) if away else None
    silent_ms = (now_s - max(standing.last_input_s, standing.attached_s)) * 1000
    return Park(ParkReason.PARK_AFTER) if silent_ms > life.park_after_ms else None
