"""Erasure: a tombstone first and everything else gone in the same script.

The server unlinks large values and frees them in the background, so one script is enough; replicas
get the same script, and until all that are connected have confirmed it the tombstone counts as
unfinished: a failover could bring the session back. It may be repeated at any point: the tombstone
refuses writers and a new session of that id meanwhile. What an append-only file and backups of it
still hold is up to their rewriting and retention.
"""

from collections.abc import AsyncIterator
from typing import cast

from duplex_sidecar.ledger.answers import judge
from duplex_sidecar.ledger.call import PendingCall, ScriptName
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.errors import LedgerCorrupt, LedgerUnavailable
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.session_view import Phase

TOMBSTONE_MS = 7 * 24 * 3600 * 1000
"""How long writers and a re-creation of the id are refused."""


async def erase_session(
    connection: Connection, session: str, tombstone_ms: int = TOMBSTONE_MS
) -> int:
    """Whoever holds the lease. Returns the number of keys dropped; 0 when there was nothing or the
    session was erased before. Looks afterwards whether anything is left, and whether the server's
    replicas have followed. May be repeated, and has to be after `LedgerUnavailable`."""
    keys = session_keys(session).all()
    call = PendingCall(session, ScriptName.ERASE, keys, (tombstone_ms, "0"))
    dropped = int(judge(session, await connection.call(call))[1])
    if await connection.read(session, ("EXISTS", *keys[1:])):
        raise LedgerUnavailable(session, "something of it was there again after its erasure")
    await connection.repeat_for_all_replicas(call)
    confirmed = PendingCall(session, ScriptName.ERASE, keys, (tombstone_ms, "1"))
    judge(session, await connection.call(confirmed))
    return dropped


async def unfinished_erasures(connection: Connection, reader: LedgerReader) -> AsyncIterator[str]:
    """Sessions whose erasure was begun and not confirmed: whoever asked for it has ended before."""
    async for session in reader.sessions():
        command = ("HMGET", session_keys(session).meta, "phase", "confirmed")
        try:
            phase, confirmed = cast("list[bytes | None]", await connection.read(session, command))
        except LedgerCorrupt:
            continue  # something else has that name
        if phase == Phase.ERASED.encode() and confirmed == b"0":
            yield session
