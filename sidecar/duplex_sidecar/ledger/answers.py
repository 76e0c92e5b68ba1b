"""What the scripts answer: the first word says whether they did their work, and if not, why."""

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.connection import Reply
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    JournalMismatch,
    LeaseHeld,
    LeaseLost,
    LeaseSettling,
    LedgerError,
    LedgerFull,
    NotOffered,
    ServerFull,
    SessionEnded,
    SessionErased,
    SessionExists,
    SessionUnknown,
    StaleFence,
)


def judge(session: str, reply: Reply) -> Reply:
    """The reply if the script did its work, else the refusal as an error."""
    word, rest = reply[0], [field.decode() for field in reply[1:]]
    match word, rest:
        case b"ok", _:
            return reply
        case b"lost", [fence, replica]:
            raise LeaseLost(session, f"owner is {replica or 'nobody'} with fence {fence}")
        case b"head", [index, digest, committed, opened]:
            seen = Head(int(index), digest, int(committed), int(opened) if opened else None)
            raise HeadMismatch(session, seen)
        case b"events", [last, reason]:
            raise JournalMismatch(session, reason, int(last))
        case b"full", [size]:
            raise LedgerFull(session, f"would hold {size} bytes, over the session's limit")
        case b"crowded", [percent]:
            raise ServerFull(session, f"server holds {percent} % of its memory, no new sessions")
        case b"held", [replica, remaining_ms, nonce]:
            raise LeaseHeld(session, replica, int(remaining_ms), nonce)
        case b"settling", [wait_ms]:
            raise LeaseSettling(session, int(wait_ms))
        case b"stale", [fence]:
            raise StaleFence(session, f"recorded fence is {fence}")
        case b"unoffered", [reason]:
            raise NotOffered(session, reason)
        case b"unknown", _:
            raise SessionUnknown(session, "not in the ledger")
        case b"erased", _:
            raise SessionErased(session, "erased")
        case b"ended", [reason]:
            raise SessionEnded(session, reason)
        case b"exists", _:
            raise SessionExists(session, "is in the ledger already")
        case b"token", _:
            raise LedgerError(session, "that token was not offered")
        case _:
            raise LedgerError(session, f"unexpected answer {word!r}")
