"""What observers outside of the product saw: one struct an observation, one line of JSON in a file.

All times of a file are nanoseconds of one monotonic clock. docs/history.md describes the format.
"""

from collections.abc import Iterable, Iterator

import msgspec

from duplex_sidecar.window.state import WindowState

SCHEMA = 1
"""Of the file; a reader refuses larger numbers."""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """First line. lease_ms, margin_ms: how long the replicas' leases last and how much earlier an
    owner falls silent; 0 = speech without a lease is not judged. special_ids: ids of the vocabulary
    that never count as spoken text (mode `context` is replayed with them)."""

    schema: int
    name: str
    lease_ms: int = 0
    margin_ms: int = 0
    special_ids: tuple[int, ...] = ()


# --- the ledger's connections -------------------------------------------------------------------


class EventFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A replayable event, in the journal or on the wire. kind: audio, transcript, turn_mark or
    unit_done. sha256: of its bytes there (journal and wire have different ones). pcm_sha256: of an
    audio event's samples. turn_samples: of a turn's last mark."""

    sequence: int
    kind: str
    sha256: str
    turn: int | None = None
    unit: int | None = None
    epoch: int | None = None
    stage2_sequence: int | None = None
    from_sample: int | None = None
    samples: int = 0
    pcm_sha256: str | None = None
    turn_samples: int | None = None


class JournalWrite(msgspec.Struct, frozen=True, tag_field="write", tag="journal"):
    unit: int
    first_sequence: int
    events: tuple[EventFacts, ...]


class ChainWrite(msgspec.Struct, frozen=True, tag_field="write", tag="chain"):
    """entry: the record's kind (opening, accepted, committed, redo, ...). window: of the state that
    is written with a commit or a cut, None where there is none or it cannot be read. journaled:
    the events that are written with a cut. client_sequence: newest number of a client's command
    that is applied with it, None where it says nothing of that."""

    entry: str
    seq: int
    prev_hash: str
    hash: str
    record: str
    window: WindowState | None = None
    journaled: JournalWrite | None = None
    client_sequence: int | None = None


class Playback(msgspec.Struct, frozen=True):
    """24 kHz samples of a turn that a client has played."""

    turn: int
    samples: int


class ClientWrite(msgspec.Struct, frozen=True, tag_field="write", tag="client"):
    """What a client said. client_sequence: as in ChainWrite. played, through_event: what it has
    played, and the newest event that leaves the journal for it."""

    client_sequence: int | None
    played: Playback | None
    through_event: int


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="command"):
    """One command of a replica to the ledger. name: the script's for EVALSHA, else the command's.

    seen_ns: when it was whole. executed_ns: when its reply had come from the server, None if none
    came. replied_ns: when that reply was passed on, None if it was not. sent: whether the server
    got it. reply: first words of it, errors as "-..." .
    """

    replica: str
    connection: int
    number: int
    name: str
    session: str | None
    fence: int | None
    nonce: str | None
    operation: str | None
    write: ChainWrite | JournalWrite | ClientWrite | None
    arguments: tuple[str, ...]
    seen_ns: int
    sent: bool
    executed_ns: int | None
    replied_ns: int | None
    reply: tuple[str, ...]

    @property
    def done(self) -> bool:
        """The server said that the script did its work."""
        return self.executed_ns is not None and self.reply[:1] == ("ok",)


# --- the clients' sockets -----------------------------------------------------------------------


class Acknowledged(msgspec.Struct, frozen=True):
    """What the client was told is durable. Positions in the client's own samples."""

    unit: int
    from_sample: int
    to_sample: int


class Opened(msgspec.Struct, frozen=True):
    """The first event of a connection."""

    session: str
    acknowledged_sample: int
    last_sequence: int
    client_sequence: int = 0


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frame"):
    """One message on a client's socket. client: one caller over all its connections. connection:
    counts them. down: from the server. passed_on: whether the other side got it.

    resumes_after: of a `session.resume`. oldest: of a `session.resync_required`. problem: code of
    an error, or reason of `session.closed`. played: of a `playback.acknowledged`. applied: of a
    `session.command_applied`.
    """

    client: str
    connection: int
    replica: str
    session: str
    down: bool
    at_ns: int
    passed_on: bool
    type: str
    size_bytes: int
    event: EventFacts | None = None
    acknowledged: Acknowledged | None = None
    opened: Opened | None = None
    resumes_after: int | None = None
    oldest: int | None = None
    problem: str | None = None
    played: Playback | None = None
    applied: int | None = None


# --- the rest -----------------------------------------------------------------------------------


class StageChunk(msgspec.Struct, frozen=True, tag_field="kind", tag="chunk"):
    """One chunk of codes that a vocoder was given, in its order."""

    replica: str
    session: str
    epoch: int
    sequence: int


class LedgerEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ledger"):
    """What the ledger holds at the end. lines: as `duplex ledger export` writes them. problem: why
    it cannot be read, None if it can. events_last: the journal's newest sequence. at_ns: when it
    was looked at, since an owner may have gone on; 0: after everything."""

    session: str
    lines: tuple[str, ...]
    events_last: int
    problem: str | None = None
    at_ns: int = 0


class Reference(msgspec.Struct, frozen=True, tag_field="kind", tag="reference"):
    """What the same input gives when nothing happens: token ids of each unit from 1."""

    session: str
    token_ids: tuple[tuple[int, ...], ...]


class Happening(msgspec.Struct, frozen=True, tag_field="kind", tag="happening"):
    """What was done to the parts. what: killed, declared_dead, restored (the ledger's server now
    holds an older state; everything after it was lost by its mode), ... ; whom: a replica's name or
    empty."""

    at_ns: int
    what: str
    whom: str


RESTORED = "restored"

Observation = Run | Command | Frame | StageChunk | LedgerEnd | Reference | Happening

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Observation)


class UnreadableHistory(ValueError):
    """Not a history, or of a newer schema. Names the line."""


def encode_lines(observations: Iterable[Observation]) -> Iterator[bytes]:
    for observation in observations:
        yield _encoder.encode(observation) + b"\n"


def decode_lines(lines: Iterable[bytes]) -> list[Observation]:
    """Raises UnreadableHistory."""
    found: list[Observation] = []
    for number, line in enumerate(lines, start=1):
        try:
            observation = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnreadableHistory(f"line {number}: {error}") from error
        if (number == 1) != isinstance(observation, Run):
            raise UnreadableHistory(f"line {number}: a history begins with its run, and has one")
        if isinstance(observation, Run) and observation.schema > SCHEMA:
            raise UnreadableHistory(f"line 1: schema {observation.schema}, known is {SCHEMA}")
        found.append(observation)
    if not found:
        raise UnreadableHistory("an empty file")
    return found
