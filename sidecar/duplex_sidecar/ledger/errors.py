"""What can go wrong with the ledger, as its callers see it. They decide by the class."""

from duplex_sidecar.ledger.call import Head, PendingCall


class LedgerError(Exception):
    """Every error of this room. `session` is "" where none is concerned."""

    def __init__(self, session: str, reason: str) -> None:
        super().__init__(f"session {session}: {reason}" if session else reason)
        self.session = session
        self.reason = reason


class LedgerUnavailable(LedgerError):
    """The server cannot be reached, answers too late, or refuses for a passing reason (loading,
    read-only replica, too few replicas).

    pending: the call whose outcome is unknown, None when nothing was sent or the server said no.
    It may be given to `Ledger.retry_unknown`: the operation id makes the repeat harmless.
    """

    def __init__(self, session: str, reason: str, pending: PendingCall | None = None) -> None:
        super().__init__(session, reason)
        self.pending = pending


class LedgerUnsuitable(LedgerError):
    """The server can never serve as a ledger: too old, set to evict keys, or not as durable as the
    installation is told to be."""


class LedgerFull(LedgerError):
    """The session's byte limit, the limit of one record or state, or the server's memory limit is
    reached. Nothing was written."""


class ServerFull(LedgerFull):
    """It is the server's memory limit, which passes; leases are renewed all the same. An owner
    waits as for a server that is away, a new session is refused."""


class LeaseLost(LedgerError):
    """Another owner (or nobody) holds the lease: drop the session quietly, write nothing more."""


class LeaseHeld(LedgerError):
    """Another lease is still valid for `remaining_ms`; nonce: of that one."""

    def __init__(self, session: str, replica: str, remaining_ms: int, nonce: str = "") -> None:
        super().__init__(session, f"lease held by {replica} for {remaining_ms} ms more")
        self.replica = replica
        self.remaining_ms = remaining_ms
        self.nonce = nonce


class LeaseSettling(LedgerError):
    """The server changed (restart or failover): only the recorded owner may go on for `wait_ms`."""

    def __init__(self, session: str, wait_ms: int) -> None:
        super().__init__(session, f"server changed, lease settles for {wait_ms} ms more")
        self.wait_ms = wait_ms


class StaleFence(LedgerError):
    """The fence asked for is not larger than the recorded one. Final."""


class NotOffered(LedgerError):
    """The session cannot change hands so: the next owner has not offered to take it, or nobody has
    it who could hand it over."""


class HeadMismatch(LedgerError):
    """The chain's head is not the expected one. The owner loads and adopts what the ledger holds;
    a ledger shorter than what was acknowledged is a rewind, never a silent start. seen: the head as
    the refusing script saw it."""

    def __init__(self, session: str, seen: Head) -> None:
        super().__init__(session, f"head is entry {seen.index} ({seen.hash[:12]})")
        self.seen = seen


class LedgerRegressed(LedgerError):
    """The ledger lost acknowledged writes of this owner, more than it can append again. What is
    left is whole: whoever takes the session up goes on from there and tells the client."""


class JournalMismatch(LedgerError):
    """The event sequence is not last + 1, or its unit is not committed: nothing may leave."""

    def __init__(self, session: str, reason: str, last_event_seq: int) -> None:
        super().__init__(session, reason)
        self.last_event_seq = last_event_seq


class SessionUnknown(LedgerError):
    """The ledger has no such session. Missing meta is never recreated as a new session."""


class SessionExists(LedgerError):
    """A ledger of this session is there already."""


class SessionEnded(LedgerError):
    """The session ended; it can be read, not run. word: why, as the ledger has it."""

    def __init__(self, session: str, word: str) -> None:
        super().__init__(session, f"ended: {word}")
        self.word = word


class SessionErased(LedgerError):
    """A tombstone stands for this session: writers and re-creation are refused."""


class LedgerCorrupt(LedgerError):
    """Stored bytes do not fit together. `record` names the entry or blob."""

    def __init__(self, session: str, record: str, reason: str) -> None:
        super().__init__(session, f"{record}: {reason}")
        self.record = record


class SchemaTooNew(LedgerError):
    """`record` was written by a newer release. Nothing is deleted."""

    def __init__(self, session: str, record: str, schema: int) -> None:
        super().__init__(session, f"{record}: schema {schema} is newer than this release")
        self.record = record
        self.schema = schema
