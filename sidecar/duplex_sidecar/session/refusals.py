"""Why a replica does not take a session, or does not let it go: final answers, each with a name.

The admin API says the name; a client at a door sees the code of the protocol's table.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    JournalMismatch,
    LeaseHeld,
    LeaseLost,
    LeaseSettling,
    LedgerError,
    LedgerFull,
    LedgerRegressed,
    LedgerUnavailable,
    NotOffered,
    SessionEnded,
    SessionErased,
    SessionUnknown,
    StaleFence,
)
from duplex_sidecar.protocol.errors import ERRORS, ClientError, ErrorCode

log = logging.getLogger(__name__)


class Refusal(StrEnum):
    NO_SLOT = "no_slot"
    STALE_FENCE = "stale_fence"
    MANIFEST_CONFLICT = "manifest_conflict"
    DRAINING = "draining"
    SESSION_BUSY = "session_busy"
    NOT_PREPARED = "not_prepared"
    LEDGER_LOST = "ledger_lost"


_CLIENT_CODES = {
    Refusal.NO_SLOT: ErrorCode.RESOURCE_EXHAUSTED,
    Refusal.STALE_FENCE: ErrorCode.LEASE_LOST,
    Refusal.MANIFEST_CONFLICT: ErrorCode.IMMUTABLE_SETTING,
    Refusal.DRAINING: ErrorCode.NOT_READY,
    Refusal.SESSION_BUSY: ErrorCode.NOT_READY,
    Refusal.NOT_PREPARED: ErrorCode.NOT_READY,
    Refusal.LEDGER_LOST: ErrorCode.SESSION_NOT_FOUND,
}


class PlacementRefused(ClientError):
    """refusal: what an operator goes by."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(_CLIENT_CODES[refusal], detail)
        self.refusal = refusal


def session_over(reason: str) -> ClientError:
    """reason: the word that the ledger has for it, "" for none."""
    sentence = ERRORS[ErrorCode.SESSION_ENDED].sentence
    known = reason not in ("", ErrorCode.SESSION_ENDED)
    return ClientError(
        ErrorCode.SESSION_ENDED, f"{sentence[:-1]}: {reason}." if known else sentence
    )


@contextmanager
def typed_refusals() -> Generator[None]:
    """What the ledger says, in the words of the protocol."""
    try:
        yield
    except SessionUnknown:
        raise ClientError(ErrorCode.SESSION_NOT_FOUND) from None
    except SessionErased:
        raise ClientError(ErrorCode.SESSION_ENDED, "the session was erased") from None
    except SessionEnded as error:
        raise session_over(error.word) from None
    except StaleFence as error:
        raise PlacementRefused(Refusal.STALE_FENCE, error.reason) from None
    except NotOffered as error:
        raise PlacementRefused(Refusal.NOT_PREPARED, error.reason) from None
    except (LeaseHeld, LeaseSettling) as error:
        raise ClientError(ErrorCode.NOT_READY, error.reason) from None
    except (LeaseLost, HeadMismatch, JournalMismatch, LedgerRegressed) as error:
        # Somebody else has it by now, or the ledger fell back: who asks again finds out.
        raise ClientError(ErrorCode.LEASE_LOST, error.reason) from None
    except LedgerUnavailable as error:
        raise ClientError(ErrorCode.LEDGER_UNAVAILABLE, error.reason) from error
    except LedgerFull as error:
        raise ClientError(ErrorCode.RESOURCE_EXHAUSTED, error.reason) from error
    except (LedgerError, msgspec.MsgspecError) as error:
        log.error("session cannot be opened or taken up: %s", error)
        raise ClientError(ErrorCode.LEDGER_CORRUPT, str(error)) from error
