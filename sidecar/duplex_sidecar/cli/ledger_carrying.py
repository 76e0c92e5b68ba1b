"""`duplex ledger archive` and `import`: a whole session as a file, and back under a new id."""

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from duplex_sidecar.cli.inputs import InputFile, OutputPath
from duplex_sidecar.cli.ledger_access import Url, guarded
from duplex_sidecar.cli.output import written
from duplex_sidecar.ledger.archive import MAX_ARCHIVE_BYTES, read_archive, write_archive
from duplex_sidecar.ledger.store import Ledger, LedgerOptions

IMPORT_CALL_MS = 5_000


def archive(session: str, *, url: Url, output: OutputPath) -> int:
    """Write the whole session to a file: chain, sound, rows, state and journal. It is content.

    Parameters
    ----------
    session
        The session's id.
    output
        The file to write.
    """
    return guarded(lambda: _archive(url, session, output))


def import_archive(
    file: InputFile, *, url: Url, as_: Annotated[str, Parameter(name="--as")]
) -> int:
    """Put an archived session into a ledger, under a new id only. Its resume token stays the same.

    Parameters
    ----------
    file
        What `duplex ledger archive` wrote.
    as_
        The id that it is to have.
    """
    return guarded(lambda: _import(url, file, as_))


async def _archive(url: str, session: str, output: Path) -> int:
    ledger = await Ledger.connect(url)
    try:
        data = write_archive(await ledger.archive(session))
    finally:
        await ledger.close()
    with written(output) as path:
        await asyncio.to_thread(path.write_bytes, data)
    print(f"wrote {len(data):,} bytes of session {session}")
    return 0


async def _import(url: str, file: Path, session: str) -> int:
    archived = read_archive(await asyncio.to_thread(_read, file))
    ledger = await Ledger.connect(url, LedgerOptions(call_timeout_ms=IMPORT_CALL_MS))
    try:
        await ledger.import_as(archived, session)
    finally:
        await ledger.close()
    print(f"session {archived.session} is in the ledger as {session}")
    return 0


def _read(file: Path) -> bytes:
    if file.stat().st_size > MAX_ARCHIVE_BYTES:
        raise ValueError(f"an archive has at most {MAX_ARCHIVE_BYTES:,} bytes")
    return file.read_bytes()
