"""What a client missed: the journaled events behind the last one that it has seen."""

from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.events import ResyncRequired, Sequenced, decode_sequenced

_TRIES = 3
"""The journal may be trimmed between two reads."""


async def replay_after(
    ledger: Ledger, session: str, seen: int, ever: int | None = None
) -> tuple[list[Sequenced], ResyncRequired | None]:
    """All events after `seen` that are still in the journal, behind its last hole if it has any.
    Where some of them are gone, or the journal never had `seen` or has lost it, the client is told
    which follows instead. ever: the newest number that was ever given, None where nobody knows: a
    client that names a larger one has lost nothing by that. Raises LedgerError."""
    given = seen if ever is None else min(seen, ever)
    resync: ResyncRequired | None = None
    replay: list[Sequenced] = []
    last, rewound = seen, False
    tries = 0
    while tries < _TRIES:
        found = await ledger.events_after(session, last)
        if not found.resync_required:
            replay += [decode_sequenced(event.event) for event in found.events]
            if not found.events or found.events[-1].seq >= found.last_seq:
                return replay, resync
            last = found.events[-1].seq
            continue
        if found.missing_through:  # never the same one again
            last = found.missing_through
        else:
            tries += 1
            meta = await ledger.reader.meta(session)
            known = meta is not None and last <= found.last_seq
            last = meta.events_first - 1 if known and meta is not None else found.last_seq
        rewound = rewound or last < given
        resync = ResyncRequired(seen, last + 1, rewound)
        replay.clear()
    return replay, resync
