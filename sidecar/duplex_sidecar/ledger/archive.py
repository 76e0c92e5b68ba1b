"""A whole session as one file: chain, blobs, state and journal, to be put into a ledger again.

The file is a line that names the format, the sha256 of the body, and the body (msgpack). A session
comes back under a new id only: two owners of one id, each with a true ledger of its own, could not
be told apart. With the id the opening changes, and with it every hash of the chain. Pure.
"""

import msgspec
from msgspec import structs

from duplex_sidecar.ledger.call import Argument
from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.records import Opening, decode, encode, sha256
from duplex_sidecar.ledger.session_view import parse_meta

MAGIC = b"duplex ledger archive 1\n"
MAX_ARCHIVE_BYTES = 256 * 1024 * 1024
_HASH_CHARACTERS = 64

FRESH = {
    "fence": "0", "nonce": "", "replica": "", "address": "", "until": "0", "era": "",
    "settle_era": "", "settle_until": "0", "op": "", "create_op": "", "events_op": "",
    "released": "", "woken": "0", "respeak_op": "", "respeak_seq": "", "respeak_count": "0",
    "asked": "", "token_offered": "",
}  # fmt: skip
"""Fields of a session that nobody has run here yet."""

KEPT = frozenset({
    "phase", "reason", "token", "index", "committed", "open", "records_first", "window_floor",
    "pcm_floor", "events_first", "events_last", "events_bytes", "voiced", "voice_turn",
    "voice_samples", "played_turn", "played_samples", "client_applied", "touched", "retention",
})  # fmt: skip
"""Fields of the conversation. An import begins without any other: what a replica offered to take
over, how often its owner failed."""


class Archive(msgspec.Struct, frozen=True):
    """Hashes and lists of a session's keys, as stored. entries: index -> record, the opening among
    them; blobs: the hashes pcm, rows, frames, state and events by the name of their key."""

    session: str
    meta: dict[str, str]
    entries: dict[int, bytes]
    blobs: dict[str, dict[str, bytes]]
    events_order: tuple[bytes, ...]
    voice: tuple[bytes, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Archive)


def write_archive(archive: Archive) -> bytes:
    body = _encoder.encode(archive)
    return MAGIC + sha256(body).encode() + b"\n" + body


def read_archive(data: bytes) -> Archive:
    """Raises `LedgerCorrupt`."""
    begin = len(MAGIC) + _HASH_CHARACTERS + 1
    body = data[begin:]
    if not data.startswith(MAGIC):
        raise LedgerCorrupt("", "archive", "is no ledger archive of this release")
    if sha256(body).encode() + b"\n" != data[len(MAGIC) : begin]:
        raise LedgerCorrupt("", "archive", "differs from its hash: cut short or changed")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LedgerCorrupt("", "archive", str(error)) from error


def import_commands(
    archive: Archive, session: str, retention_ms: int
) -> list[tuple[Argument, ...]]:
    """What creates the session under the new id, all at once. Raises ValueError for the old id,
    `LedgerCorrupt` for a chain that cannot be read."""
    if session == archive.session:
        raise ValueError("a session is imported under a new id only")
    keys = session_keys(session)
    entries, order, meta = _relinked(archive, session)
    commands: list[tuple[Argument, ...]] = [
        ("HSET", keys.entries, index, data) for index, data in entries
    ]
    commands += [("RPUSH", keys.order, line) for line in order]
    hashes = {
        "pcm": keys.pcm,
        "rows": keys.rows,
        "frames": keys.frames,
        "state": keys.state,
        "events": keys.events,
    }
    for name, key in hashes.items():
        fields = archive.blobs.get(name, {})
        commands += [("HSET", key, field, blob) for field, blob in fields.items()]
    commands += [("RPUSH", keys.events_order, line) for line in archive.events_order]
    commands += [("RPUSH", keys.voice, mark) for mark in archive.voice]
    commands += [("HSET", keys.meta, name, value) for name, value in meta.items()]
    commands += [("PEXPIRE", key, retention_ms) for key in keys.all()]
    return commands


def _relinked(
    archive: Archive, session: str
) -> tuple[list[tuple[int, bytes]], list[str], dict[str, str]]:
    """The chain with the new id in its opening and every hash after it made anew; the list of
    sequences and hashes beside it; the meta that fits."""
    fields = {name.encode(): value.encode() for name, value in archive.meta.items()}
    meta = parse_meta(archive.session, fields)
    first = decode(archive.session, 0, _entry(archive, 0))
    if not isinstance(first, Opening):
        raise LedgerCorrupt(archive.session, "entry 0", "is no opening")
    opening = encode(structs.replace(first, session=session))
    opening_hash = sha256(opening)
    floor_hash = opening_hash if meta.records_first == 1 else meta.floor_hash
    entries, order, previous = [(0, opening)], list[str](), floor_hash
    for index in range(meta.records_first, meta.head.index + 1):
        record = decode(archive.session, index, _entry(archive, index))
        if isinstance(record, Opening):
            raise LedgerCorrupt(archive.session, f"entry {index}", "is a second opening")
        stored = encode(structs.replace(record, prev_hash=previous))
        previous = sha256(stored)
        entries.append((index, stored))
        order.append(f"{record.seq} {previous}")
    grown = sum(len(data) - len(_entry(archive, index)) for index, data in entries)
    changed = {
        "opening_hash": opening_hash,
        "floor_hash": floor_hash,
        "head": previous,
        "bytes": str(meta.bytes + grown),
    }
    kept = {name: value for name, value in archive.meta.items() if name in KEPT}
    return entries, order, {**kept, **FRESH, **changed}


def _entry(archive: Archive, index: int) -> bytes:
    stored = archive.entries.get(index)
    if stored is None:
        raise LedgerCorrupt(archive.session, f"entry {index}", "missing")
    return stored
