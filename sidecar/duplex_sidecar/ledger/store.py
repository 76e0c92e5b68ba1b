"""The ledger as an owner writes it: one Lua script, one round trip, one typed answer each.

Every write names fence, nonce and expected head, and carries an operation id, so that a repeat
returns the first answer. The order of a unit: `accept`, the Thinker, `commit`, then `journal`
before each event leaves; `ledger.unit_calls` has what each of them writes.
"""

import secrets
from collections.abc import AsyncIterator

import msgspec

from duplex_api.resolve import LEAST_RETENTION_MS
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.archive import Archive
from duplex_sidecar.ledger.call import Argument, Head, PendingCall, ScriptName
from duplex_sidecar.ledger.carry import archive_session, import_session
from duplex_sidecar.ledger.client_calls import Cut, Played, client_call, cut_call
from duplex_sidecar.ledger.connection import Connection, Reply
from duplex_sidecar.ledger.erase import erase_session, unfinished_erasures
from duplex_sidecar.ledger.journal import (
    MAX_JOURNAL_AGE_MS,
    MAX_JOURNAL_BYTES,
    EventsAfter,
    JournalBatch,
)
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.lease import LEASE_MS, MARGIN_MS, Lease, asked_at, boottime_ms
from duplex_sidecar.ledger.media import Trim, UnitMedia
from duplex_sidecar.ledger.moving import MoveCalls
from duplex_sidecar.ledger.owners import OwnersCalls
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.session_view import LoadedSession, Phase
from duplex_sidecar.ledger.unit_calls import (
    accept_call,
    commit_call,
    journal_call,
    note_call,
    opening_call,
)


class LedgerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds. call_timeout_ms lies below the lease margin: a call that hangs cannot outlive the
    local deadline unnoticed. retention_ms: expiry of all keys, refreshed by the owner's renewals.
    durability: what an acknowledged write survives; the server is asked whether it can.
    """

    call_timeout_ms: int = 400
    load_timeout_ms: int = 5_000
    connections: int = 32
    retention_ms: int = 24 * 3600 * 1000
    max_session_bytes: int = 64 * 1024 * 1024
    max_journal_bytes: int = MAX_JOURNAL_BYTES
    max_journal_age_ms: int = MAX_JOURNAL_AGE_MS
    durability: Durability = Durability.MEMORY


class Ledger:
    """One server, shared by all sessions of a process. All methods may raise `LedgerUnavailable`;
    owner's methods `LeaseLost`, `LedgerRegressed`, `SessionUnknown` and `SessionErased` too."""

    def __init__(self, connection: Connection, options: LedgerOptions) -> None:
        self._connection = connection
        self._options = options
        self.reader = LedgerReader(connection)
        self._calls = OwnersCalls(connection, self.reader)
        self.moves = MoveCalls(self._calls)

    @classmethod
    async def connect(cls, url: str, options: LedgerOptions | None = None) -> "Ledger":
        """url: see `duplex_api.ledger_address`. Raises `LedgerUnavailable`, `LedgerUnsuitable`."""
        options = options or LedgerOptions()
        connection = await Connection.connect(
            url,
            call_timeout_ms=options.call_timeout_ms,
            load_timeout_ms=options.load_timeout_ms,
            connections=options.connections,
            durability=options.durability,
        )
        return cls(connection, options)

    async def close(self) -> None:
        await self._connection.close()

    async def ping(self) -> None:
        """Whether it answers now; see `Connection.ping`."""
        await self._connection.ping()

    # --- reading --------------------------------------------------------------------------------

    async def exists(self, session: str) -> bool:
        return await self.reader.exists(session)

    async def phase(self, session: str) -> Phase | None:
        return await self.reader.phase(session)

    async def load(self, session: str) -> LoadedSession:
        """Call it after `acquire`; see `LedgerReader.load`."""
        return await self.reader.load(session)

    async def events_after(self, session: str, seq: int) -> EventsAfter:
        return await self.reader.events_after(session, seq)

    async def mend(self, session: str) -> bool:
        """Put back what the ledger has lost of an owner of this process; see `OwnersCalls`."""
        return await self._calls.mend(session)

    # --- session and lease ----------------------------------------------------------------------

    async def create(
        self,
        draft: records.OpeningDraft,
        *,
        replica: str,
        token_sha256: str,
        state: bytes,
        reference_rows: tuple[bytes, ...] = (),
        retention_ms: int | None = None,
    ) -> Head:
        """Entry 0. state: the opaque snapshot before unit 1. retention_ms: expiry of all keys,
        refreshed by the owner's renewals, at least `LEAST_RETENTION_MS`; None = the options'.
        Raises `SessionExists`, `SessionErased`."""
        call = opening_call(
            draft,
            replica=replica,
            token_sha256=token_sha256,
            state=state,
            reference_rows=reference_rows,
            retention_ms=max(
                LEAST_RETENTION_MS,
                self._options.retention_ms if retention_ms is None else retention_ms,
            ),
        )
        return await self._append(call)

    async def acquire(
        self,
        session: str,
        replica: str,
        *,
        fence: int | None = None,
        address: str = "",
        nonce: str | None = None,
    ) -> Lease:
        """fence: the number an operator issued; None = the recorded one + 1. address: host:port of
        the owner's door, for those who look for the session. nonce: None = a new one; that of an
        offer says whether the session was handed over. Wakes a parked session.

        Raises `LeaseHeld`, `LeaseSettling`, `StaleFence`, `SessionEnded`, `SessionUnknown`,
        `SessionErased`.
        """
        nonce = nonce or secrets.token_hex(16)
        deadline_ms = self._deadline_ms()
        reply = await self._run(
            session,
            ScriptName.ACQUIRE,
            (session_keys(session).meta,),
            (nonce, replica, LEASE_MS, "" if fence is None else fence, address, asked_at()),
        )
        return Lease(
            session=session,
            replica=replica,
            fence=int(reply[1]),
            nonce=nonce,
            era=reply[2].decode(),
            deadline_ms=deadline_ms,
            woken=reply[3] == b"1",
        )

    async def renew(self, lease: Lease) -> Lease:
        """The lease with a later deadline, taken before sending. Only a confirmed one counts."""
        deadline_ms = self._deadline_ms()
        keys = session_keys(lease.session)
        await self._run(
            lease.session, ScriptName.RENEW, keys.all(), (lease.fence, lease.nonce, LEASE_MS)
        )
        return msgspec.structs.replace(lease, deadline_ms=deadline_ms)

    async def release(self, lease: Lease, *, ended: str | None = None) -> None:
        """The owner's last write. ended: reason for which the session is over (write a
        `ClosedDraft` note first); None: another replica may go on with it."""
        phase = "" if ended is None else Phase.ENDED.value
        await self._run(
            lease.session,
            ScriptName.RELEASE,
            (session_keys(lease.session).meta,),
            (lease.fence, lease.nonce, phase, ended or ""),
        )

    async def park(self, lease: Lease, head: Head, reason: str) -> None:
        """The owner's last write: the session waits for somebody to acquire it. Only when nothing
        is accepted and not committed. Raises `HeadMismatch` otherwise."""
        await self._run(
            lease.session,
            ScriptName.PARK,
            session_keys(lease.session).all(),
            (lease.fence, lease.nonce, head.hash, reason),
        )

    def forget(self, lease: Lease) -> None:
        """Its owner writes nothing any more, whether or not the ledger has heard of that."""
        self._calls.forget(lease.session, lease.nonce)

    async def break_lease(self, session: str, *, replica: str, nonce: str = "") -> bool:
        """Proof of death of `replica` (a name that one process start had): its lease ends at once.
        nonce: of the one lease that it gives up while it lives, "" for whichever it has. False when
        it does not hold this session's lease, or another one."""
        key = session_keys(session).meta
        reply = await self._run(session, ScriptName.BREAK, (key,), (replica, nonce))
        return reply[1] == b"1"

    async def offer_token(self, lease: Lease, token_sha256: str) -> None:
        """Record a new resume token beside the current one."""
        await self._token(lease, "offer", token_sha256)

    async def confirm_token(self, lease: Lease, token_sha256: str) -> None:
        """The first message under the offered token came: it becomes the current one."""
        await self._token(lease, "confirm", token_sha256)

    async def archive(self, session: str) -> Archive:
        """The whole session as it stands; see `carry.archive_session`."""
        return await archive_session(self._connection, session)

    async def import_as(self, archive: Archive, session: str) -> None:
        """Under a new id only; see `carry.import_session`."""
        await import_session(self._connection, archive, session, self._options.retention_ms)

    async def erase(self, session: str) -> int:
        """Leave a tombstone and drop everything else; see `erase.erase_session`."""
        return await erase_session(self._connection, session)

    def unfinished_erasures(self) -> AsyncIterator[str]:
        """Sessions that have to be erased again; see `erase.unfinished_erasures`."""
        return unfinished_erasures(self._connection, self.reader)

    # --- the chain ------------------------------------------------------------------------------

    async def accept(
        self,
        lease: Lease,
        head: Head,
        draft: records.AcceptDraft,
        media: UnitMedia,
        *,
        state: bytes | None = None,
    ) -> Head:
        """The unit's input becomes durable; only now may the client see it acknowledged.

        Raises `HeadMismatch`, `LedgerFull` (nothing written).
        """
        limit_bytes = self._options.max_session_bytes
        call = accept_call(lease, head, draft, media, state, max_session_bytes=limit_bytes)
        return await self._append(call)

    async def commit(
        self, lease: Lease, head: Head, draft: records.CommitDraft, *, state: bytes, trim: Trim
    ) -> Head:
        """The unit's answer becomes durable with the state after it; then what slid out goes.

        Raises `HeadMismatch`, `LedgerFull`; ValueError when `trim` would drop what is needed.
        """
        return await self._append(commit_call(lease, head, draft, state, trim))

    async def note(
        self, lease: Lease, head: Head, draft: records.RedoDraft | records.ClosedDraft
    ) -> Head:
        """An entry beside the units. Raises `HeadMismatch`, `LedgerFull`."""
        return await self._append(note_call(lease, head, draft))

    async def cut(self, lease: Lease, head: Head, cut: Cut) -> Head:
        """A client's command that changes what was said, with all that follows from it. Raises
        `HeadMismatch`, `JournalMismatch`, `LedgerFull`."""
        return await self._append(cut_call(lease, head, cut))

    async def client_said(
        self, lease: Lease, client_applied: str, played: Played | None = None
    ) -> None:
        """What a client says that is no part of the conversation: the numbers of its commands (""
        leaves them as they are) and what it has played. May be sent again as it is. Raises
        `JournalMismatch` when more would be played than has sounded."""
        await self._calls.run(client_call(lease, client_applied, played))

    async def count_respeak(self, lease: Lease, seq: int, operation: str) -> int:
        """The committed unit is about to run again for its sound: how often it then has, this time
        included. operation: the same on a repeat, which counts nothing."""
        return await self._count(lease, seq, operation, "respeak")

    async def count_failure(self, lease: Lease, seq: int, operation: str) -> int:
        """An owner failed behind committed unit `seq`, and nobody knows why: how often that now
        was there. operation: as in `count_respeak`."""
        return await self._count(lease, seq, operation, "failure")

    # --- the journal ----------------------------------------------------------------------------

    async def journal(self, lease: Lease, batch: JournalBatch) -> int:
        """Events become durable; afterwards, and only then, they may leave. Returns the last
        sequence. Raises `JournalMismatch` (sequence not last + 1, unit not committed, audio not
        contiguous), `LedgerFull`."""
        options = self._options
        call = journal_call(
            lease,
            batch,
            max_bytes=options.max_journal_bytes,
            max_age_ms=options.max_journal_age_ms,
        )
        return int((await self._calls.run(call))[1])

    # --- calls ----------------------------------------------------------------------------------

    async def retry_unknown(self, pending: PendingCall) -> Head | None:
        """Send a call again whose outcome is unknown (`LedgerUnavailable.pending`): returns when it
        is executed, now or then, exactly once; raises as the call itself would. Returns the head
        after create, accept, commit and note. (A lease is not taken this way: acquire again.)"""
        await self._calls.run(pending)
        return pending.then

    async def _append(self, call: PendingCall) -> Head:
        """The head after a call that the chain grows by."""
        await self._calls.run(call)
        assert call.then is not None
        return call.then

    async def _count(self, lease: Lease, seq: int, operation: str, what: str) -> int:
        key = session_keys(lease.session).meta
        arguments = (lease.fence, lease.nonce, operation, seq, what)
        return int((await self._run(lease.session, ScriptName.RESPEAK, (key,), arguments))[1])

    async def _token(self, lease: Lease, action: str, token_sha256: str) -> None:
        key = session_keys(lease.session).meta
        arguments = (lease.fence, lease.nonce, action, token_sha256)
        await self._run(lease.session, ScriptName.TOKEN, (key,), arguments)

    async def _run(
        self,
        session: str,
        script: ScriptName,
        keys: tuple[str, ...],
        arguments: tuple[Argument, ...],
    ) -> Reply:
        return await self._calls.run(PendingCall(session, script, keys, arguments))

    def _deadline_ms(self) -> int:
        return boottime_ms() + LEASE_MS - MARGIN_MS
