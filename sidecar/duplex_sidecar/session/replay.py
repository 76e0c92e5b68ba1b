"""What a client missed: the journaled events behind the last one that it has seen."""

from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.events import ResyncRequired, Sequenced, decode_sequenced

_TRIES = 3
"""The journal may be trimmed between two reads."""


async def replay_after(
    ledger: Ledger, session: str, seen: int
) -> tuple[list[Sequenced], ResyncRequired | None]:
    """All events after `seen` that are still in the journal. Where some of them are gone, or the
    journal never had `seen`, the client is told which event follows instead. Raises LedgerError."""
    resync: ResyncRequired | None = None
    replay: list[Sequenced] = []
    last = seen
    for _ in range(_TRIES):
        found = await ledger.events_after(session, last)
        while not found.resync_required:
            replay += [decode_sequenced(event.event) for event in found.events]
            if not found.events or found.events[-1].seq >= found.last_seq:
                return replay, resync
            last = found.events[-1].seq
            found = await ledger.events_after(session, last)
        meta = await ledger.reader.meta(session)
        known = meta is not None and last <= found.last_seq
        last = meta.events_first - 1 if known and meta is not None else found.last_seq
        resync = ResyncRequired(seen, last + 1)
        replay.clear()
    return replay, resync
