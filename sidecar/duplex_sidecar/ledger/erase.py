"""Erasure: a tombstone first and everything else gone in the same script.

The server unlinks large values and frees them in the background, so one script is enough. What an
append-only file and backups of it still hold is up to their rewriting and retention.
"""

from duplex_sidecar.ledger.answers import judge
from duplex_sidecar.ledger.call import PendingCall, ScriptName
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.keys import session_keys

TOMBSTONE_MS = 7 * 24 * 3600 * 1000
"""How long writers and a re-creation of the id are refused."""


async def erase_session(
    connection: Connection, session: str, tombstone_ms: int = TOMBSTONE_MS
) -> int:
    """Whoever holds the lease. Returns the number of keys dropped; 0 when there was nothing or the
    session was erased before. May be repeated. Raises `LedgerUnavailable`."""
    call = PendingCall(session, ScriptName.ERASE, session_keys(session).all(), (tombstone_ms,))
    return int(judge(session, await connection.call(call))[1])
