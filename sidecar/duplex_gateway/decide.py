"""From route record and lease to what the gateway does with a call. Pure."""

from enum import StrEnum

import msgspec

from duplex_api.routes import RouteRecord
from duplex_api.session import SessionPhase
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode


class LeaseView(msgspec.Struct, frozen=True):
    """What the ledger says of its owner. remaining_ms: <= 0 when nobody holds the lease. address:
    host:port of the owner's door, "" where it did not say. phase: as the ledger has it.
    token_sha256: of the client's token that lets in, until a message has come under another one."""

    fence: int
    remaining_ms: int
    address: str
    phase: str
    reason: str
    token_sha256: str = ""


class WaitReason(StrEnum):
    """Why a call waits; `duplex.reason` of `session.queued`."""

    STARTING = "starting"
    """The session has not been placed yet."""
    QUEUED = "queued"
    """It waits for a free slot."""
    PARKED = "parked"
    """It sleeps, and is woken."""
    MOVING = "moving"
    """Its owner is gone, or hands it over."""


class Dial(msgspec.Struct, frozen=True):
    address: str
    fence: int


class Wait(msgspec.Struct, frozen=True):
    """wake: the operator has to be told that a client waits. fence: of the last owner, 0 when there
    was none."""

    reason: WaitReason
    position: int | None
    wake: bool
    fence: int = 0


class Over(msgspec.Struct, frozen=True):
    code: ErrorCode
    detail: str


_REASONS = {
    SessionPhase.PENDING: WaitReason.STARTING,
    SessionPhase.QUEUED: WaitReason.QUEUED,
    SessionPhase.PARKED: WaitReason.PARKED,
}


def decide(route: RouteRecord | None, lease: LeaseView | None) -> Dial | Wait | Over:
    """What to do with a call whose token has proved right. The lease is the truth about who runs a
    session; the operator's phase only tells why nobody does. route: None when it is gone since."""
    if route is None and lease is None:
        return Over(ErrorCode.SESSION_ENDED, "the session is gone")
    if lease is not None and lease.phase in (Phase.ENDED, Phase.ERASED):
        return Over(_code_of(lease.reason), "the session has ended")
    if lease is not None and lease.remaining_ms > 0:
        if lease.address:
            return Dial(lease.address, lease.fence)
        return Wait(WaitReason.MOVING, None, wake=False)
    if route is None:
        return Wait(WaitReason.MOVING, None, wake=False)
    if route.phase in (SessionPhase.ENDING, SessionPhase.ENDED):
        return Over(ErrorCode.SESSION_ENDED, "the session has ended")
    reason = _REASONS.get(route.phase, WaitReason.MOVING)
    asleep = lease is not None and lease.phase == Phase.PARKED
    if asleep and route.phase in (SessionPhase.READY, SessionPhase.ACTIVE):
        reason = WaitReason.PARKED  # the operator has not seen it yet
    return Wait(reason, route.queue_position, wake=True, fence=lease.fence if lease else 0)


def _code_of(reason: str) -> ErrorCode:
    """The ledger's reason, where it is one that ends a session for a client."""
    try:
        code = ErrorCode(reason)
    except ValueError:
        return ErrorCode.SESSION_ENDED
    return code if ERRORS[code].ends_session else ErrorCode.SESSION_ENDED


class Finish(msgspec.Struct, frozen=True):
    """The client's connection ends with that code and reason."""

    close_code: int
    reason: str


_FINAL_CLOSE_CODES = frozenset({1000, 1009, 4001, 4002, 4010, 4011})


def after_close(close_code: int, last_error: str | None) -> Finish | None:
    """What the end of a connection to the owner means: None where the call goes on over another
    one. last_error: code of the newest error event or end that the owner sent over it."""
    if close_code in _FINAL_CLOSE_CODES:
        return Finish(close_code, last_error or "")
    if close_code == 1008 and not _retryable(last_error):
        return Finish(close_code, last_error or "")
    return None


def _retryable(code: str | None) -> bool:
    try:
        return ERRORS[ErrorCode(code or "")].retryable
    except ValueError:
        return False
