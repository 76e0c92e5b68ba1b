"""Ledgers that nobody owns any more: found, and left to whoever knows which sessions exist."""

from collections.abc import AsyncIterator

import msgspec

from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.session_view import Phase, SessionMeta


class Ownerless(msgspec.Struct, frozen=True):
    """idle_ms: since the last sign of an owner, by the server's clock."""

    session: str
    phase: Phase
    idle_ms: int
    bytes: int


def ownerless(session: str, meta: SessionMeta, now_ms: int, min_idle_ms: int) -> Ownerless | None:
    """Whether no lease is held and none was for so long. A tombstone is no ledger."""
    if meta.phase is Phase.ERASED or meta.lease_until_ms > now_ms:
        return None
    idle_ms = now_ms - max(meta.touched_ms, meta.lease_until_ms)
    if idle_ms < min_idle_ms:
        return None
    return Ownerless(session, meta.phase, idle_ms, meta.bytes)


async def find_ownerless(reader: LedgerReader, min_idle_ms: int) -> AsyncIterator[Ownerless]:
    """All of them, in no order. One whose meta cannot be read is left out: see `ledger verify`.
    Raises `LedgerUnavailable`."""
    async for session in reader.sessions():
        found = await still_ownerless(reader, session, min_idle_ms)
        if found is not None:
            yield found


async def still_ownerless(reader: LedgerReader, session: str, min_idle_ms: int) -> Ownerless | None:
    """The same of one session, now: between a look and an erasure somebody may have taken it up."""
    try:
        meta = await reader.meta(session)
    except LedgerCorrupt:
        return None
    if meta is None:
        return None
    return ownerless(session, meta, await reader.server_time_ms(), min_idle_ms)
