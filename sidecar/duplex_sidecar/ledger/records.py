"""The chain: what is stored of a session's opening and of each unit, and how entries are linked.

An entry is the JSON bytes of one record. The stored bytes are what is hashed (sha256); each record
holds the hash of the entry before it, so a loader finds any change by hashing alone. Units count
from 1; the opening is seq 0. Each unit is two entries, accepted and committed, with notes (redo,
truncated, cancelled, closed) between. Pure.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from duplex_sidecar.ledger.errors import LedgerCorrupt, SchemaTooNew

SCHEMA = 1
"""Written into each record; a reader refuses larger numbers."""

GENESIS_HASH = "0" * 64
"""prev_hash of the opening."""


class MediaRef(msgspec.Struct, frozen=True):
    """A stored blob: its length and the sha256 of its bytes. Its key follows from kind and seq."""

    length_bytes: int
    sha256: str


# --- opening ------------------------------------------------------------------------------------


class PromptIds(msgspec.Struct, frozen=True, tag="ids"):
    """Token ids of a part of the prompt."""

    ids: tuple[int, ...]


class PromptRows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows of a part of the prompt (a voice reference): blob `blob` of the opening's rows."""

    blob: int
    rows: int


PromptPart = PromptIds | PromptRows


class OpeningDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller says when it opens a session. The four Raw fields are JSON objects of the
    rooms that own them (window policy resolved, sampling, output, limits); opaque here.

    checkpoint: fingerprint of the checkpoint; a session never moves to another one.
    """

    session: str
    checkpoint: str
    parts: tuple[PromptPart, ...]
    voice: str
    window: msgspec.Raw
    sampling: msgspec.Raw
    output: msgspec.Raw
    limits: msgspec.Raw
    seed: int
    traceparent: str


class Opening(OpeningDraft, frozen=True, kw_only=True, tag_field="kind", tag="opening"):
    schema: int
    rows: tuple[MediaRef, ...]
    state_sha256: str
    replica: str
    at_ms: int
    prev_hash: str


# --- units --------------------------------------------------------------------------------------


class PlanAction(StrEnum):
    OPEN = "open"
    EXTEND = "extend"
    REBUILD = "rebuild"


class PlanFacts(msgspec.Struct, frozen=True):
    """What the window planner decided. mode: off, basic, context; cause: slide, truncation,
    eviction, engine_restart, replica_restart, move (None where nothing was rebuilt). Plain words,
    so that records of another release stay readable."""

    action: PlanAction
    mode: str
    cause: str | None
    dropped_units: int
    dropped_tokens: int
    replacement_tokens: int
    prompt_tokens: int


class UnitInput(msgspec.Struct, frozen=True):
    """What came in. client_from/to_samples are positions in the client's own samples; `to` is the
    acknowledged position. is_speech None = the client did not say."""

    new_samples: int
    chunks: int
    client_from_samples: int
    client_to_samples: int
    is_speech: bool | None
    force_listen: bool
    final: bool


class MediaRefs(msgspec.Struct, frozen=True):
    """Blobs of a unit: PCM s16le as encoded, the encoder's audio rows, frames as received."""

    pcm: MediaRef | None
    rows: MediaRef | None
    frames: tuple[MediaRef, ...]


class AcceptDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a unit and the plan that admits it."""

    seq: int
    epoch: int
    turn: int
    input: UnitInput
    plan: PlanFacts
    directive: str
    strategy: str
    seed: int
    traceparent: str


class Accepted(AcceptDraft, frozen=True, kw_only=True, tag_field="kind", tag="accepted"):
    schema: int
    media: MediaRefs
    state_sha256: str | None
    attempts: int
    replica: str
    at_ms: int
    prev_hash: str


class CommitDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The Thinker's answer. token_ids: as emitted (fed back), terminator last; sampled_ids: before
    replacement rules, same length. decision: listen or speak."""

    seq: int
    epoch: int
    turn: int
    token_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    terminator: str | None
    decision: str
    turn_end: bool
    plan: PlanFacts


class Committed(CommitDraft, frozen=True, kw_only=True, tag_field="kind", tag="committed"):
    schema: int
    state_sha256: str
    replica: str
    at_ms: int
    prev_hash: str


# --- notes --------------------------------------------------------------------------------------


class RedoDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The open unit is about to be submitted again; written before the submission. The first
    submission is attempt 1."""

    seq: int
    attempt: int
    cause: str


class Redo(RedoDraft, frozen=True, kw_only=True, tag_field="kind", tag="redo"):
    schema: int
    state_sha256: str | None
    replica: str
    at_ms: int
    prev_hash: str


class TruncatedDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The client heard only `played_ms` of reply `turn`: from content id `token_index` of unit
    `unit` on, what the model said up to unit `through` is taken back. seq = last committed unit.
    ends_turn: the reply was under way and is over with it. Forces a rebuild."""

    seq: int
    turn: int
    unit: int
    token_index: int
    through: int
    played_ms: int
    ends_turn: bool


class Truncated(TruncatedDraft, frozen=True, kw_only=True, tag_field="kind", tag="truncated"):
    schema: int
    state_sha256: str | None
    replica: str
    at_ms: int
    prev_hash: str


class CancelledDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The client stopped reply `turn` behind unit `seq`; nothing that was said is taken back."""

    seq: int
    turn: int


class Cancelled(CancelledDraft, frozen=True, kw_only=True, tag_field="kind", tag="cancelled"):
    schema: int
    state_sha256: str | None
    replica: str
    at_ms: int
    prev_hash: str


class ClosedDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The session ends after unit `seq`, for a reason of the protocol's table."""

    seq: int
    reason: str


class Closed(ClosedDraft, frozen=True, kw_only=True, tag_field="kind", tag="closed"):
    schema: int
    state_sha256: str | None
    replica: str
    at_ms: int
    prev_hash: str


CutDraft = TruncatedDraft | CancelledDraft
"""They change what the session remembers: a state comes with them."""
NoteDraft = RedoDraft | CutDraft | ClosedDraft
Note = Redo | Truncated | Cancelled | Closed
Record = Opening | Accepted | Committed | Note


def note(
    draft: NoteDraft, *, state_sha256: str | None, replica: str, at_ms: int, prev_hash: str
) -> Note:
    """The record of a draft."""
    kinds: dict[type[NoteDraft], type[Note]] = {
        RedoDraft: Redo,
        TruncatedDraft: Truncated,
        CancelledDraft: Cancelled,
        ClosedDraft: Closed,
    }
    return kinds[type(draft)](
        **msgspec.structs.asdict(draft),
        schema=SCHEMA,
        state_sha256=state_sha256,
        replica=replica,
        at_ms=at_ms,
        prev_hash=prev_hash,
    )


# --- bytes --------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True):
    """A record with its place in the chain and its stored bytes."""

    index: int
    hash: str
    record: Record
    stored: bytes


class _Header(msgspec.Struct, frozen=True):
    schema: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_header_decoder = msgspec.json.Decoder(_Header)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(record: Record) -> bytes:
    """The bytes that are stored and hashed."""
    return _encoder.encode(record)


def decode(session: str, index: int, stored: bytes) -> Record:
    """Raises `SchemaTooNew` or `LedgerCorrupt`, both naming the entry."""
    name = f"entry {index}"
    try:
        schema = _header_decoder.decode(stored).schema
        if schema > SCHEMA:
            raise SchemaTooNew(session, name, schema)
        return _decoder.decode(stored)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LedgerCorrupt(session, name, str(error)) from error


def media_ref(data: bytes) -> MediaRef:
    return MediaRef(length_bytes=len(data), sha256=sha256(data))


def describe(record: Record) -> str:
    """A record's name for people: its kind and unit."""
    kind = type(record).__name__.lower()
    return kind if isinstance(record, Opening) else f"{kind} {record.seq}"


# --- the chain ----------------------------------------------------------------------------------


def link(
    session: str, first_index: int, floor_hash: str, stored: Sequence[bytes]
) -> tuple[Entry, ...]:
    """Decode consecutive entries and check that each names the hash of the one before.

    floor_hash: hash of the entry before `first_index` (`GENESIS_HASH` for the opening).
    Raises `LedgerCorrupt` naming the first entry that does not fit.
    """
    entries: list[Entry] = []
    previous = floor_hash
    for index, data in enumerate(stored, start=first_index):
        record = decode(session, index, data)
        if record.prev_hash != previous:
            name = f"entry {index} ({describe(record)})"
            raise LedgerCorrupt(session, name, f"does not follow entry {index - 1}")
        previous = sha256(data)
        entries.append(Entry(index, previous, record, data))
    return tuple(entries)


def check_order(session: str, entries: Sequence[Entry]) -> None:
    """Units are contiguous, committed only after accepted, notes in their place. `entries` are the
    ones after the opening that are kept; trimming drops whole units, so the first one is an
    accepted unit, or a note before any unit."""
    first = entries[0].record if entries else None
    committed = first.seq - 1 if isinstance(first, Accepted) else 0
    opened: int | None = None
    for entry in entries:
        record = entry.record
        match record:
            case Opening():
                fits = False
            case Accepted():
                fits = opened is None and record.seq == committed + 1
                opened = record.seq
            case Committed():
                fits = record.seq == opened
                committed, opened = record.seq, None
            case Redo():
                fits = record.seq == opened
            case Truncated() | Cancelled():
                fits = opened is None and record.seq == committed
            case Closed():
                fits = record.seq == committed
        if not fits:
            name = f"entry {entry.index} ({describe(record)})"
            raise LedgerCorrupt(session, name, f"out of place after unit {committed}")


def kept_tokens(entries: Sequence[Entry]) -> dict[int, int]:
    """How many content ids are left of each unit of which a truncation took some back."""
    kept: dict[int, int] = {}
    for entry in entries:
        record = entry.record
        if isinstance(record, Truncated):
            for seq in range(record.unit, record.through + 1):
                here = record.token_index if seq == record.unit else 0
                kept[seq] = min(kept.get(seq, here), here)
    return kept


def stopped_units(entries: Sequence[Entry]) -> set[int]:
    """Units behind which a reply was stopped."""
    return {
        entry.record.seq
        for entry in entries
        if isinstance(entry.record, Cancelled)
        or (isinstance(entry.record, Truncated) and entry.record.ends_turn)
    }
