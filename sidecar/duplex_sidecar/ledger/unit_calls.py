"""What a session writes as it goes on, each write one call: its opening, a unit's input, answer and
events, a note beside the units.

All but the events are records of the chain: each holds the hash of the one before and of the blobs
beside it, and its call has the head after it (`PendingCall.then`). `Ledger` sends them. What a
client's commands write is in `ledger.client_calls`.
"""

import msgspec

from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.call import Argument, Head, PendingCall, ScriptName
from duplex_sidecar.ledger.journal import JournalBatch, encode_mark
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.media import Trim, UnitMedia, pack_blobs
from duplex_sidecar.ledger.writing import (
    chained,
    check_state,
    encode_record,
    new_operation,
    noted,
    now_ms,
    optional,
)

_PLACES: dict[type[records.RedoDraft | records.ClosedDraft], str] = {
    records.RedoDraft: "open",
    records.ClosedDraft: "last",
}


def opening_call(
    draft: records.OpeningDraft,
    *,
    replica: str,
    token_sha256: str,
    state: bytes,
    reference_rows: tuple[bytes, ...],
    retention_ms: int,
) -> PendingCall:
    """Entry 0, before unit 1. Raises LedgerFull."""
    check_state(draft.session, state)
    opening = records.Opening(
        **msgspec.structs.asdict(draft),
        schema=records.SCHEMA,
        rows=tuple(records.media_ref(rows) for rows in reference_rows),
        state_sha256=records.sha256(state),
        replica=replica,
        at_ms=now_ms(),
        prev_hash=records.GENESIS_HASH,
    )
    stored = encode_record(draft.session, opening)
    digest = records.sha256(stored)
    keys = session_keys(draft.session)
    rows = pack_blobs(reference_rows)
    return PendingCall(
        draft.session,
        ScriptName.CREATE,
        (keys.meta, keys.entries, keys.rows, keys.state),
        (new_operation(), digest, stored, rows, state, token_sha256, retention_ms),
        Head(index=0, hash=digest, committed_seq=0, open_seq=None),
    )


def accept_call(
    lease: Lease,
    head: Head,
    draft: records.AcceptDraft,
    media: UnitMedia,
    state: bytes | None,
    *,
    max_session_bytes: int,
) -> PendingCall:
    """A unit's input. Raises LedgerFull where a part of it is too large; the server judges the
    whole by max_session_bytes."""
    if state is not None:
        check_state(lease.session, state)
    record = records.Accepted(
        **msgspec.structs.asdict(draft),
        schema=records.SCHEMA,
        media=media.refs(),
        state_sha256=None if state is None else records.sha256(state),
        attempts=1,
        replica=lease.replica,
        at_ms=now_ms(),
        prev_hash=head.hash,
    )
    stored = encode_record(lease.session, record)
    digest = records.sha256(stored)
    keys = session_keys(lease.session)
    return PendingCall(
        lease.session,
        ScriptName.ACCEPT,
        (keys.meta, keys.entries, keys.order, keys.pcm, keys.rows, keys.frames, keys.state),
        (
            *chained(lease, head, draft.seq, digest, stored),
            *optional(state),
            media.pcm,
            media.rows,
            pack_blobs(media.frames),
            max_session_bytes,
        ),
        Head(head.index + 1, digest, head.committed_seq, draft.seq),
    )


def commit_call(
    lease: Lease, head: Head, draft: records.CommitDraft, state: bytes, trim: Trim
) -> PendingCall:
    """A unit's answer. Raises LedgerFull; ValueError when `trim` would drop what is needed."""
    check_state(lease.session, state)
    trim.check(draft.seq)
    record = records.Committed(
        **msgspec.structs.asdict(draft),
        schema=records.SCHEMA,
        state_sha256=records.sha256(state),
        replica=lease.replica,
        at_ms=now_ms(),
        prev_hash=head.hash,
    )
    stored = encode_record(lease.session, record)
    digest = records.sha256(stored)
    keys = session_keys(lease.session)
    return PendingCall(
        lease.session,
        ScriptName.COMMIT,
        (keys.meta, keys.entries, keys.order, keys.pcm, keys.rows, keys.frames, keys.state),
        (
            *chained(lease, head, draft.seq, digest, stored),
            state,
            trim.window_below,
            trim.pcm_below,
            trim.records_below,
        ),
        Head(head.index + 1, digest, draft.seq, None),
    )


def journal_call(
    lease: Lease, batch: JournalBatch, *, max_bytes: int, max_age_ms: int
) -> PendingCall:
    """Events of a unit. max_bytes, max_age_ms: what the journal is trimmed to. Raises ValueError
    for a batch that is over the limits or says nothing."""
    batch.check()
    keys = session_keys(lease.session)
    mark = batch.mark
    marked: tuple[Argument, ...] = ("", "", "", "")
    if mark is not None:
        marked = (mark.turn, mark.from_samples, mark.to_samples, encode_mark(mark))
    return PendingCall(
        lease.session,
        ScriptName.JOURNAL,
        (keys.meta, keys.events, keys.events_order, keys.voice, keys.state),
        (
            lease.fence,
            lease.nonce,
            new_operation(),
            batch.unit,
            batch.first_seq,
            max_bytes,
            max_age_ms,
            "" if batch.voiced_through is None else batch.voiced_through,
            *optional(batch.voice_state),
            *marked,
            *batch.events,
        ),
        events=(batch.first_seq, batch.last_seq),
    )


def note_call(
    lease: Lease, head: Head, draft: records.RedoDraft | records.ClosedDraft
) -> PendingCall:
    """An entry beside the units. Raises LedgerFull."""
    stored, digest = noted(lease, head, draft, None)
    keys = session_keys(lease.session)
    return PendingCall(
        lease.session,
        ScriptName.NOTE,
        (keys.meta, keys.entries, keys.order),
        (*chained(lease, head, draft.seq, digest, stored), _PLACES[type(draft)]),
        Head(head.index + 1, digest, head.committed_seq, head.open_seq),
    )
