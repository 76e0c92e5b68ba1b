"""Sessions out of a ledger into an archive, and from an archive into a ledger."""

from typing import cast

from duplex_sidecar.ledger.archive import Archive, import_commands
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.errors import LedgerUnavailable, SessionErased, SessionExists
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.session_view import Phase

TRIES = 5
IMPORT_TIMEOUT_S = 60.0


async def archive_session(connection: Connection, session: str) -> Archive:
    """The whole session, checked before it is taken. Raises as `LedgerReader.load`, and
    `LedgerUnavailable` for one that is written to all the time."""
    reader = LedgerReader(connection)
    keys = session_keys(session)
    for _ in range(TRIES):
        await reader.load(session)
        before, entries, *hashes, events_order, voice, after = await connection.read_many(
            session,
            (
                ("HGETALL", keys.meta),
                ("HGETALL", keys.entries),
                *(
                    ("HGETALL", key)
                    for key in (keys.pcm, keys.rows, keys.frames, keys.state, keys.events)
                ),
                ("LRANGE", keys.events_order, 0, -1),
                ("LRANGE", keys.voice, 0, -1),
                ("HGETALL", keys.meta),
            ),
        )
        if before == after:
            names = ("pcm", "rows", "frames", "state", "events")
            return Archive(
                session=session,
                meta=_words(before),
                entries={int(index): data for index, data in _hash(entries).items()},
                blobs={
                    name: {field.decode(): blob for field, blob in _hash(found).items()}
                    for name, found in zip(names, hashes, strict=True)
                },
                events_order=tuple(cast("list[bytes]", events_order)),
                voice=tuple(cast("list[bytes]", voice)),
            )
    raise LedgerUnavailable(session, "is being written to: park or end it first")


async def import_session(
    connection: Connection, archive: Archive, session: str, retention_ms: int
) -> None:
    """Create `session` from the archive, all at once or not at all, and check it. Raises
    ValueError, `SessionExists`, `SessionErased`, `LedgerCorrupt`."""
    commands = import_commands(archive, session, retention_ms)
    meta_key = session_keys(session).meta
    if not await connection.create_keys(meta_key, commands, IMPORT_TIMEOUT_S):
        if await LedgerReader(connection).phase(session) is Phase.ERASED:
            raise SessionErased(session, "erased")
        raise SessionExists(session, "is in the ledger already")
    await LedgerReader(connection).load(session)


def _hash(answer: object) -> dict[bytes, bytes]:
    return cast("dict[bytes, bytes]", answer)


def _words(answer: object) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in _hash(answer).items()}
