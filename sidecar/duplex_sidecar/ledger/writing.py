"""What a write to the ledger is made of: checked bytes, and what all scripts are given."""

import secrets
import time

from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.call import Argument, Head
from duplex_sidecar.ledger.errors import LedgerFull
from duplex_sidecar.ledger.lease import Lease

MAX_RECORD_BYTES = 256 * 1024
MAX_STATE_BYTES = 4 * 1024 * 1024


def chained(lease: Lease, head: Head, seq: int, digest: str, stored: bytes) -> tuple[Argument, ...]:
    """The arguments that every write of the chain begins with."""
    return (lease.fence, lease.nonce, new_operation(), head.hash, seq, digest, stored)


def optional(blob: bytes | None) -> tuple[Argument, Argument]:
    """Whether there is one, and the blob."""
    return ("0", "") if blob is None else ("1", blob)


def encode_record(session: str, record: records.Record) -> bytes:
    """Raises LedgerFull when it is larger than a record may be."""
    stored = records.encode(record)
    if len(stored) > MAX_RECORD_BYTES:
        raise LedgerFull(session, f"a record of {len(stored)} bytes, {MAX_RECORD_BYTES} allowed")
    return stored


def check_state(session: str, state: bytes) -> None:
    """Raises LedgerFull when it is larger than a state may be."""
    if len(state) > MAX_STATE_BYTES:
        raise LedgerFull(session, f"a state of {len(state)} bytes, {MAX_STATE_BYTES} allowed")


def new_operation() -> str:
    return secrets.token_hex(8)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def noted(
    lease: Lease, head: Head, draft: records.NoteDraft, state: bytes | None
) -> tuple[bytes, str]:
    """The entry of a draft as it is stored, and its hash. Raises LedgerFull."""
    record = records.note(
        draft,
        state_sha256=None if state is None else records.sha256(state),
        replica=lease.replica,
        at_ms=now_ms(),
        prev_hash=head.hash,
    )
    stored = encode_record(lease.session, record)
    return stored, records.sha256(stored)
