"""Writes that a client's commands lead to, each one call: what is said is cut, or only noted that
the client was heard."""

import msgspec

from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.call import Argument, Head, PendingCall, ScriptName
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.writing import chained, check_state, noted


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """draft: its entry. state, voice_state: the session's opaque snapshots after it. events: what
    tells the client. client_applied: its number among the client's commands, with those before it
    (`client_record`); "" where it had none."""

    draft: records.CutDraft
    state: bytes
    voice_state: bytes
    events: JournalBatch
    client_applied: str


class Played(msgspec.Struct, frozen=True):
    """24 kHz samples of a turn that a client has played. through_event: newest event that nobody
    needs again for it (0: none)."""

    turn: int
    samples: int
    through_event: int


def cut_call(lease: Lease, head: Head, cut: Cut) -> PendingCall:
    """The chain grows by it. Raises LedgerFull, ValueError."""
    check_state(lease.session, cut.state)
    cut.events.check()
    stored, digest = noted(lease, head, cut.draft, cut.state)
    keys = session_keys(lease.session)
    return PendingCall(
        lease.session,
        ScriptName.CUT,
        (keys.meta, keys.entries, keys.order, keys.state, keys.events, keys.events_order),
        (
            *chained(lease, head, cut.draft.seq, digest, stored),
            cut.state,
            cut.voice_state,
            cut.client_applied,
            cut.events.first_seq,
            *cut.events.events,
        ),
        Head(head.index + 1, digest, head.committed_seq, None),
        events=(cut.events.first_seq, cut.events.last_seq),
    )


def client_call(lease: Lease, client_applied: str, played: Played | None) -> PendingCall:
    keys = session_keys(lease.session)
    heard: tuple[Argument, ...] = ("", "", "")
    if played is not None:
        heard = (played.turn, played.samples, played.through_event)
    return PendingCall(
        lease.session,
        ScriptName.CLIENT,
        (keys.meta, keys.events, keys.events_order),
        (lease.fence, lease.nonce, client_applied, *heard),
    )
