"""Runs the calls of this process's owners, and mends a ledger that lost the newest of them.

See `ledger.repair` for what is sent again and why that is safe.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from duplex_sidecar.ledger.answers import judge
from duplex_sidecar.ledger.call import PendingCall, ScriptName
from duplex_sidecar.ledger.connection import Connection, Reply
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    JournalMismatch,
    LeaseLost,
    LedgerError,
    LedgerRegressed,
    LedgerUnavailable,
    SessionEnded,
    SessionErased,
    SessionUnknown,
)
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.repair import RecentWrites, Standing

log = logging.getLogger(__name__)

_NONCE = 1
"""Index among the arguments of every owner's call."""
_NO_SESSION = (SessionUnknown, SessionErased, SessionEnded)
_OVER = frozenset({ScriptName.RELEASE, ScriptName.PARK, ScriptName.HAND_OVER})


@dataclass
class _Owner:
    nonce: str
    recent: RecentWrites = field(default_factory=RecentWrites)
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)
    mends: int = 0
    """How often the ledger was given back what it had lost."""


class OwnersCalls:
    """All owners of a process; an owner begins with its acquisition and ends with its release, with
    the loss of its lease, or when it says so."""

    def __init__(self, connection: Connection, reader: LedgerReader) -> None:
        self._connection = connection
        self._reader = reader
        self._owners: dict[str, _Owner] = {}

    async def run(self, call: PendingCall) -> Reply:
        """The answer of a script that did its work. Raises what it refuses; `LedgerRegressed` where
        the ledger lost more than is remembered here."""
        owner = self._owners.get(call.session)
        mends = 0 if owner is None else owner.mends
        try:
            reply = await self._judged(call)
        except (HeadMismatch, JournalMismatch) as refusal:
            if owner is None:
                raise
            async with owner.mending:
                if owner.mends == mends:  # else a reader has had it mended meanwhile
                    await self._mend(owner, call, refusal)
            reply = await self._judged(call)
        except _NO_SESSION:
            self._owners.pop(call.session, None)
            raise
        except LeaseLost:
            self.forget(call.session, str(call.arguments[_NONCE]))
            raise
        self._remember(call, reply)
        return reply

    def forget(self, session: str, nonce: str) -> None:
        """Of that owner, which writes nothing any more, whatever the ledger has heard of it. A
        later one of the session stays."""
        owner = self._owners.get(session)
        if owner is not None and owner.nonce == nonce:
            del self._owners[session]

    def _remember(self, call: PendingCall, reply: Reply) -> None:
        broken = call.script is ScriptName.BREAK and reply[1] == b"1"
        if call.script is ScriptName.ACQUIRE:
            self._owners[call.session] = _Owner(str(call.arguments[0]))
        elif call.script in _OVER:
            self.forget(call.session, str(call.arguments[_NONCE]))
        elif broken:
            self._owners.pop(call.session, None)
        elif (owner := self._owners.get(call.session)) is not None:
            owner.recent.note(call, time.monotonic_ns() // 1_000_000)

    async def mend(self, session: str) -> bool:
        """Before somebody reads: append what the ledger has lost of an owner of this process, as
        its next write would. Whether it did. Raises `LedgerUnavailable`."""
        owner = self._owners.get(session)
        if owner is None:
            return False
        async with owner.mending:
            # What is acknowledged from here on is not lost: it may only be missing in `meta`.
            known = owner.recent.copy()
            meta = await self._reader.meta(session)
            suffix = known.after(meta) if meta is not None else None
            if suffix is None or suffix.standing is not Standing.SHORT:
                return False
            try:
                await self._append(session, suffix.calls)
            except LedgerUnavailable:
                raise
            except LedgerError:
                return False  # its next write finds out why
            owner.mends += 1
        return True

    async def _mend(self, owner: _Owner, call: PendingCall, refusal: LedgerError) -> None:
        meta = await self._reader.meta(call.session)
        if meta is None or meta.nonce != call.arguments[_NONCE]:
            raise refusal
        suffix = owner.recent.after(meta)
        if suffix.standing is Standing.AHEAD:
            raise refusal
        try:
            if suffix.standing is Standing.REGRESSED:
                raise refusal
            await self._append(call.session, suffix.calls)
        except LedgerUnavailable as error:
            # Not `error.pending`: what is unknown is another call, and the next try looks again.
            raise LedgerUnavailable(call.session, error.reason) from error
        except (HeadMismatch, JournalMismatch) as error:
            raise LedgerRegressed(call.session, f"ends at entry {meta.head.index}") from error

    async def _append(self, session: str, calls: tuple[PendingCall, ...]) -> None:
        for lost in calls:
            await self._judged(lost)
        log.warning(
            "ledger had lost writes of this session; they are in it again",
            extra={"fields": {"session": session, "writes": len(calls)}},
        )

    async def _judged(self, call: PendingCall) -> Reply:
        return judge(call.session, await self._connection.call(call))
