"""What a reader gets: the session's meta and the whole loaded session. Pure."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.client_record import ClientRecord, decode_client_record
from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.journal import VoiceMark
from duplex_sidecar.ledger.media import Media
from duplex_sidecar.ledger.records import (
    Accepted,
    Closed,
    Committed,
    Entry,
    Opening,
    Redo,
)


class Phase(StrEnum):
    OPEN = "open"
    PARKED = "parked"
    """Nobody runs it and nothing of it is unfinished; acquiring its lease wakes it."""
    ENDED = "ended"
    ERASED = "erased"
    """A tombstone: the session was erased and its id is refused for some days."""


class SessionMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The session's meta hash. lease_until_ms: server's clock, 0 when nobody holds the lease.
    touched_ms: server's clock, within a minute of an owner's last renewal.
    address: host:port of the owner's door, "" when there is none or it said none.

    window_floor, pcm_floor: first unit whose rows and frames (PCM) are kept. records_first: index
    of the first entry kept after the opening. voiced_seq: last unit of which nothing is left to
    journal. voice_samples: 24 kHz samples of turn `voice_turn` that are in the journal.
    played_samples: of turn `played_turn`, as the client says; None: it never said.
    client: the commands that it numbered.
    """

    phase: Phase
    reason: str
    fence: int
    nonce: str
    replica: str
    address: str
    lease_until_ms: int
    touched_ms: int
    head: Head
    opening_hash: str
    floor_hash: str
    records_first: int
    window_floor: int
    pcm_floor: int
    bytes: int
    events_first: int
    events_last: int
    voiced_seq: int
    voice_turn: int | None
    voice_samples: int
    played_turn: int | None
    played_samples: int
    client: ClientRecord
    token_sha256: str
    token_offered_sha256: str


class LoadedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a replica needs to go on; the chain and every blob have been checked.

    entries: those after the opening that are kept, oldest first.
    state: the opaque blob given with the last commit (or cut, or creation).
    accepted_state: the one given with the open unit's accept, None if none was.
    voice_state: the opaque blob given with the last journal call that had one, after `voice_unit`.
    media: blobs by unit, as far as the floors keep them. marks: what sounded of the present turn
    (at most the last 600 chunks).
    """

    session: str
    meta: SessionMeta
    opening: Opening
    opening_entry: Entry
    reference_rows: tuple[bytes, ...]
    entries: tuple[Entry, ...]
    state: bytes
    accepted_state: bytes | None
    media: Media
    marks: tuple[VoiceMark, ...]
    voice_state: bytes | None
    voice_unit: int

    @property
    def head(self) -> Head:
        return self.meta.head

    @property
    def open_unit(self) -> Accepted | None:
        """The accepted but uncommitted unit."""
        for entry in reversed(self.entries):
            if isinstance(entry.record, Accepted):
                return entry.record if entry.record.seq == self.head.open_seq else None
        return None

    @property
    def attempts(self) -> int:
        """How often the open unit was submitted, as recorded before each submission."""
        unit = self.open_unit
        if unit is None:
            return 0
        redos = (entry.record for entry in self.entries if isinstance(entry.record, Redo))
        return max((redo.attempt for redo in redos if redo.seq == unit.seq), default=unit.attempts)

    @property
    def committed(self) -> tuple[Committed, ...]:
        """Committed units that are kept, oldest first."""
        return tuple(e.record for e in self.entries if isinstance(e.record, Committed))

    @property
    def accepted(self) -> tuple[Accepted, ...]:
        """Accepted units that are kept, oldest first; the open one last."""
        return tuple(e.record for e in self.entries if isinstance(e.record, Accepted))

    @property
    def closed(self) -> Closed | None:
        last = self.entries[-1].record if self.entries else None
        return last if isinstance(last, Closed) else None


def parse_meta(session: str, stored: Mapping[bytes, bytes]) -> SessionMeta:
    """Raises `LedgerCorrupt` naming the meta key. A tombstone has a phase and nothing else."""
    try:
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        if fields.get("phase") == Phase.ERASED:
            fields = {**_EMPTY, "phase": Phase.ERASED}
        return SessionMeta(
            phase=Phase(fields["phase"]),
            reason=fields["reason"],
            fence=int(fields["fence"]),
            nonce=fields["nonce"],
            replica=fields["replica"],
            address=fields.get("address", ""),
            lease_until_ms=int(fields["until"]),
            touched_ms=int(fields.get("touched", "0")),
            head=Head(
                index=int(fields["index"]),
                hash=fields["head"],
                committed_seq=int(fields["committed"]),
                open_seq=int(fields["open"]) if fields["open"] else None,
            ),
            opening_hash=fields["opening_hash"],
            floor_hash=fields["floor_hash"],
            records_first=int(fields["records_first"]),
            window_floor=int(fields["window_floor"]),
            pcm_floor=int(fields["pcm_floor"]),
            bytes=int(fields["bytes"]),
            events_first=int(fields["events_first"]),
            events_last=int(fields["events_last"]),
            voiced_seq=int(fields["voiced"]),
            voice_turn=int(fields["voice_turn"]) if fields["voice_turn"] else None,
            voice_samples=int(fields["voice_samples"]),
            played_turn=int(fields["played_turn"]) if fields.get("played_turn") else None,
            played_samples=int(fields.get("played_samples", "0")),
            client=decode_client_record(fields.get("client_applied", "")),
            token_sha256=fields["token"],
            token_offered_sha256=fields["token_offered"],
        )
    except (KeyError, ValueError) as error:
        raise LedgerCorrupt(session, "meta", f"unreadable field: {error}") from error


_EMPTY = {
    "reason": "", "fence": "0", "nonce": "", "replica": "", "until": "0", "index": "0", "head": "",
    "committed": "0", "open": "", "opening_hash": "", "floor_hash": "", "records_first": "1",
    "window_floor": "1", "pcm_floor": "1", "bytes": "0", "events_first": "1", "events_last": "0",
    "voiced": "0", "voice_turn": "", "voice_samples": "0", "token": "", "token_offered": "",
}  # fmt: skip
