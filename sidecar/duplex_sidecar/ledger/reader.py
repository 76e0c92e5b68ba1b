"""Read-only access to the ledger: for the loading owner, the gateway and the command line.

Meta, entries, state and marks are read as one snapshot; blobs follow in batches, so that a long
session does not hold up the server. A blob that is gone because a commit trimmed it meanwhile means
"read again"; gone above the floor means corruption.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

from duplex_sidecar.ledger.connection import Command, Connection
from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    LedgerUnavailable,
    SessionErased,
    SessionUnknown,
)
from duplex_sidecar.ledger.journal import EventsAfter, JournaledEvent, decode_marks
from duplex_sidecar.ledger.keys import META_PATTERN, SessionKeys, session_keys, session_of
from duplex_sidecar.ledger.media import UnitMedia, check_blob, unpack_blobs
from duplex_sidecar.ledger.records import (
    GENESIS_HASH,
    Accepted,
    Cancelled,
    Committed,
    Entry,
    Opening,
    Truncated,
    check_order,
    link,
    sha256,
)
from duplex_sidecar.ledger.session_view import LoadedSession, Phase, SessionMeta, parse_meta

MEDIA_BATCH_UNITS = 32
EVENT_BATCH = 64
READ_AGAIN = 5


class _Trimmed(Exception):
    """The window slid while blobs were read."""


class LedgerReader:
    """Every method raises `LedgerUnavailable` when the server cannot be read."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, url: str) -> "LedgerReader":
        """For processes that only read; close it with `close`."""
        connection = await Connection.connect(
            url, call_timeout_ms=400, load_timeout_ms=5_000, connections=8
        )
        return cls(connection)

    async def close(self) -> None:
        await self._connection.close()

    async def meta(self, session: str) -> SessionMeta | None:
        """None for a session the ledger never had (or whose retention ran out)."""
        stored = await self._connection.read(session, ("HGETALL", session_keys(session).meta))
        return parse_meta(session, cast("dict[bytes, bytes]", stored)) if stored else None

    async def phase(self, session: str) -> Phase | None:
        meta = await self.meta(session)
        return meta.phase if meta else None

    async def exists(self, session: str) -> bool:
        """Whether the ledger holds the session; a tombstone is not a session."""
        return await self.phase(session) in (Phase.OPEN, Phase.PARKED, Phase.ENDED)

    async def server_time_ms(self) -> int:
        """The clock that leases are measured with."""
        seconds, micros = cast("tuple[int, int]", await self._connection.read("", ("TIME",)))
        return int(seconds) * 1000 + int(micros) // 1000

    async def sessions(self) -> AsyncIterator[str]:
        """Ids of all sessions, tombstones too, in no order."""
        async for name in self._connection.scan(META_PATTERN):
            session = session_of(name.decode(errors="replace"))
            if session is not None:
                yield session

    async def load(self, session: str) -> LoadedSession:
        """The whole session, chain and blobs checked.

        Raises `SessionUnknown`, `SessionErased`, `SchemaTooNew`, `LedgerCorrupt` (naming the entry,
        blob or key).
        """
        for _ in range(READ_AGAIN):
            try:
                return await self._load_once(session)
            except _Trimmed:
                await asyncio.sleep(0)
        raise LedgerUnavailable(session, "its window slides faster than it can be read")

    async def entries(self, session: str) -> tuple[Entry, ...]:
        """The entries after the opening that are kept, checked, without any blob. Raises as `load`
        does."""
        keys = session_keys(session)
        meta, stored = await self._connection.read_at_once(
            session, (("HGETALL", keys.meta), ("HGETALL", keys.entries))
        )
        if not meta:
            raise SessionUnknown(session, "not in the ledger")
        parsed = parse_meta(session, cast("dict[bytes, bytes]", meta))
        if parsed.phase is Phase.ERASED:
            raise SessionErased(session, "erased")
        return read_chain(session, parsed, cast("dict[bytes, bytes]", stored))[1]

    async def events_after(
        self, session: str, seq: int, *, limit_bytes: int = 1024 * 1024
    ) -> EventsAfter:
        """Journaled events with a larger sequence, oldest first, up to about `limit_bytes` (at
        least one if there is one): call again with the last sequence received."""
        keys = session_keys(session)
        meta = await self._require(session)
        last = meta.events_last
        if seq > last or seq + 1 < meta.events_first:
            return EventsAfter(events=(), last_seq=last, resync_required=True)
        events: list[JournaledEvent] = []
        size = 0
        while seq < last and size < limit_bytes:
            wanted = range(seq + 1, min(seq + EVENT_BATCH, last) + 1)
            found = await self._blobs(session, keys.events, wanted)
            gone = [number for number, data in zip(wanted, found, strict=True) if data is None]
            if gone:
                return EventsAfter(
                    events=(), last_seq=last, resync_required=True, missing_through=gone[-1]
                )
            for number, data in zip(wanted, cast("list[bytes]", found), strict=True):
                if size >= limit_bytes:
                    break
                events.append(JournaledEvent(number, data))
                size, seq = size + len(data), number
        return EventsAfter(events=tuple(events), last_seq=last, resync_required=False)

    # --- loading --------------------------------------------------------------------------------

    async def _require(self, session: str) -> SessionMeta:
        meta = await self.meta(session)
        if meta is None:
            raise SessionUnknown(session, "not in the ledger")
        if meta.phase is Phase.ERASED:
            raise SessionErased(session, "erased")
        return meta

    async def _load_once(self, session: str) -> LoadedSession:
        keys = session_keys(session)
        snapshot = await self._connection.read_at_once(
            session,
            (
                ("HGETALL", keys.meta),
                ("HGETALL", keys.entries),
                ("HGETALL", keys.state),
                ("LRANGE", keys.voice, 0, -1),
            ),
        )
        if not snapshot[0]:
            raise SessionUnknown(session, "not in the ledger")
        meta = parse_meta(session, cast("dict[bytes, bytes]", snapshot[0]))
        if meta.phase is Phase.ERASED:
            raise SessionErased(session, "erased")
        first, entries = read_chain(session, meta, cast("dict[bytes, bytes]", snapshot[1]))
        opening = cast(Opening, first.record)
        state = cast("dict[bytes, bytes]", snapshot[2])
        units = [entry.record for entry in entries if isinstance(entry.record, Accepted)]
        media = {
            unit.seq: found
            for start in range(0, len(units), MEDIA_BATCH_UNITS)
            for unit, found in await self._media(
                session, keys, meta, units[start : start + MEDIA_BATCH_UNITS]
            )
        }
        return LoadedSession(
            session=session,
            meta=meta,
            opening=opening,
            opening_entry=first,
            reference_rows=await self._reference_rows(session, keys, opening),
            entries=entries,
            state=_committed_state(session, opening, entries, state.get(b"committed")),
            accepted_state=_accepted_state(session, meta, entries, state.get(b"accepted")),
            media=media,
            marks=decode_marks(session, cast("list[bytes]", snapshot[3])),
            voice_state=state.get(b"voice"),
            voice_unit=_voice_unit(session, state.get(b"voice_unit", b"0")),
        )

    async def _media(
        self, session: str, keys: SessionKeys, meta: SessionMeta, units: Sequence[Accepted]
    ) -> list[tuple[Accepted, UnitMedia]]:
        fields = [str(unit.seq) for unit in units]
        answers = await self._connection.read_many(
            session,
            [("HMGET", key, *fields) for key in (keys.pcm, keys.rows, keys.frames)],
        )
        found: list[tuple[Accepted, UnitMedia]] = []
        try:
            for unit, pcm, rows, frames in zip(units, *answers, strict=True):
                found.append((unit, _unit_media(session, meta, unit, pcm, rows, frames)))
        except LedgerCorrupt:
            now = await self._require(session)
            moved = now.window_floor > meta.window_floor or now.pcm_floor > meta.pcm_floor
            if moved:
                raise _Trimmed from None
            raise
        return found

    async def _reference_rows(
        self, session: str, keys: SessionKeys, opening: Opening
    ) -> tuple[bytes, ...]:
        if not opening.rows:
            return ()
        packed = (await self._blobs(session, keys.rows, range(1)))[0]
        if packed is None:
            raise LedgerCorrupt(session, "reference rows", "blob is missing")
        return unpack_blobs(session, "reference rows", packed, opening.rows)

    async def _blobs(self, session: str, key: str, numbers: range) -> list[bytes | None]:
        command: Command = ("HMGET", key, *(str(number) for number in numbers))
        return cast("list[bytes | None]", await self._connection.read(session, command))


def read_chain(
    session: str, meta: SessionMeta, stored: dict[bytes, bytes]
) -> tuple[Entry, tuple[Entry, ...]]:
    """The opening's entry and the kept entries after it, every link checked up to the head."""

    def entry(index: int) -> bytes:
        data = stored.get(b"%d" % index)
        if data is None:
            raise LedgerCorrupt(session, f"entry {index}", "missing")
        return data

    first = link(session, 0, GENESIS_HASH, [entry(0)])[0]
    if not isinstance(first.record, Opening) or first.hash != meta.opening_hash:
        raise LedgerCorrupt(session, "entry 0 (opening)", "differs from its recorded hash")
    kept = [entry(index) for index in range(meta.records_first, meta.head.index + 1)]
    entries = link(session, meta.records_first, meta.floor_hash, kept)
    last_hash = entries[-1].hash if entries else meta.floor_hash
    if last_hash != meta.head.hash:
        raise LedgerCorrupt(session, f"entry {meta.head.index}", "differs from its recorded hash")
    check_order(session, entries)
    for name, floor in (("window", meta.window_floor), ("pcm", meta.pcm_floor)):
        if floor > meta.head.committed_seq + 1:
            raise LedgerCorrupt(session, "meta", f"{name} floor {floor} lies behind the last unit")
    return first, entries


def _unit_media(
    session: str,
    meta: SessionMeta,
    unit: Accepted,
    pcm: bytes | None,
    rows: bytes | None,
    frames: bytes | None,
) -> UnitMedia:
    in_window, has_pcm = unit.seq >= meta.window_floor, unit.seq >= meta.pcm_floor
    refs = unit.media
    name = f"of unit {unit.seq}"
    packed = b""
    if in_window and refs.frames:
        if frames is None:
            raise LedgerCorrupt(session, f"frames {name}", "blob is missing")
        packed = frames
    return UnitMedia(
        pcm=check_blob(session, f"pcm {name}", pcm, refs.pcm) if has_pcm and refs.pcm else b"",
        rows=check_blob(session, f"rows {name}", rows, refs.rows)
        if in_window and refs.rows
        else b"",
        frames=unpack_blobs(session, f"frames {name}", packed, refs.frames) if packed else (),
    )


def _committed_state(
    session: str, opening: Opening, entries: Sequence[Entry], state: bytes | None
) -> bytes:
    """The blob of the newest record that came with one."""
    expected = opening.state_sha256
    for entry in entries:
        record = entry.record
        if (
            isinstance(record, (Committed, Truncated, Cancelled))
            and record.state_sha256 is not None
        ):
            expected = record.state_sha256
    if state is None or sha256(state) != expected:
        raise LedgerCorrupt(session, "state", "missing or different from its record")
    return state


def _voice_unit(session: str, stored: bytes) -> int:
    try:
        return int(stored)
    except ValueError as error:
        raise LedgerCorrupt(session, "voice state", f"unreadable unit: {error}") from error


def _accepted_state(
    session: str, meta: SessionMeta, entries: Sequence[Entry], state: bytes | None
) -> bytes | None:
    expected: str | None = None
    for entry in entries:
        record = entry.record
        if isinstance(record, Accepted) and record.seq == meta.head.open_seq:
            expected = record.state_sha256
    if expected is None:
        return None
    if state is None or sha256(state) != expected:
        raise LedgerCorrupt(
            session, "state of the open unit", "missing or different from its record"
        )
    return state
