"""`duplex ledger`: look at a session's ledger, check it, carry it elsewhere, erase it."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from duplex_sidecar.cli import ledger_carrying as carrying
from duplex_sidecar.cli import ledger_sweeping as sweeping
from duplex_sidecar.cli.columns import print_columns
from duplex_sidecar.cli.inputs import Count, Duration, InputFile, OutputPath, os_error_text
from duplex_sidecar.cli.ledger_access import Url, guarded
from duplex_sidecar.cli.output import written
from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    LedgerError,
    LedgerUnavailable,
    SessionUnknown,
)
from duplex_sidecar.ledger.export import export_lines, verify_lines
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.pending import PendingErasures
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.records import Committed
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.session_view import LoadedSession, SessionMeta
from duplex_sidecar.ledger.store import Ledger, LedgerOptions

RETRY_EVERY_S = 0.5
COLUMNS = (
    "committed (UTC)",
    "unit",
    "epoch",
    "turn",
    "decision",
    "tokens",
    "plan",
    "cause",
    "prompt",
    "replica",
)
UNKNOWN = "not in the ledger, nothing erased (--even-unknown refuses the id all the same)"

app = App(name="ledger", help="Look at a session's ledger, check it, carry it, erase it.")
app.command(carrying.archive)
app.command(carrying.import_archive, name="import")
app.command(sweeping.sweep)


@app.command
def show(session: str, *, url: Url, last: Count = 20) -> int:
    """Print where the session stands and its last committed units (no content).

    Parameters
    ----------
    session
        The session's id.
    last
        How many units to list.
    """
    return guarded(lambda: _with_reader(url, lambda reader: _look(reader, session, last)))


@app.command
def verify(
    session: str | None = None, *, url: Url | None = None, file: InputFile | None = None
) -> int:
    """Check the whole hash chain and every kept blob, of a session or of an exported file.

    Parameters
    ----------
    session
        The session's id; needs --url.
    file
        An exported ledger.jsonl, checked without a server.
    """
    if file is not None:
        return _verify_file(file)
    if session is None or url is None:
        print("name a session and --url, or a --file", file=sys.stderr)
        return 2
    return guarded(lambda: _with_loaded(url, session, _verified))


@app.command
def erase(
    session: str,
    *,
    url: Url,
    yes: Annotated[bool, Parameter(negative="")] = False,
    patience_s: Duration = 60.0,
    durability: Durability = Durability.MEMORY,
    even_unknown: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Erase everything of a session. Its id is refused for a week; what a server's append-only
    file and its backups hold is rewritten or runs out by their own rules. While the server is away
    it is tried again; ended on the way, it may be called again.

    Parameters
    ----------
    session
        The session's id.
    yes
        Really do it.
    patience_s
        How long to wait for a server that is away.
    durability
        With `replicated`, a replica has confirmed the erasure, too.
    even_unknown
        Refuse the id for a week although the ledger has no such session.
    """
    if not yes:
        print("nothing erased: say --yes", file=sys.stderr)
        return 2
    return guarded(lambda: _erase(url, session, patience_s, durability, even_unknown))


@app.command
def export(session: str, *, url: Url, output: OutputPath | None = None) -> int:
    """Write the ledger as JSON lines, one a unit. It holds token ids: treat it as content.

    Parameters
    ----------
    session
        The session's id.
    output
        The file to write; standard output when left out.
    """
    return guarded(lambda: _with_loaded(url, session, lambda loaded: _export(loaded, output)))


async def _with_reader(url: str, use: Callable[[LedgerReader], Awaitable[int]]) -> int:
    reader = await LedgerReader.connect(url)
    try:
        return await use(reader)
    finally:
        await reader.close()


async def _with_loaded(url: str, session: str, use: Callable[[LoadedSession], int]) -> int:
    async def load(reader: LedgerReader) -> int:
        return use(await reader.load(session))

    return await _with_reader(url, load)


async def _look(reader: LedgerReader, session: str, last: int) -> int:
    loaded = await reader.load(session)
    return _show(loaded, last, await reader.server_time_ms())


def owner_of(meta: SessionMeta, now_ms: int) -> str:
    """now_ms: by the server's clock. What of a crashed owner's lease is left is no owner."""
    if not meta.replica:
        return "nobody"
    owner = f"{meta.replica} (fence {meta.fence})"
    ago_s = (now_ms - meta.lease_until_ms) / 1000
    return owner if ago_s < 0 else f"nobody: the lease of {owner} ran out {ago_s:.0f} s ago"


def _show(loaded: LoadedSession, last: int, now_ms: int) -> int:
    meta = loaded.meta
    console = Console()
    owner = owner_of(meta, now_ms)
    opened = "" if meta.head.open_seq is None else f", unit {meta.head.open_seq} accepted"
    console.print(f"session {loaded.session}: {meta.phase} {meta.reason}".rstrip())
    console.print(f"owner {owner}, voice {loaded.opening.voice}")
    console.print(f"head: unit {meta.head.committed_seq} committed{opened}, {meta.head.hash[:12]}")
    console.print(
        f"kept: rows from unit {meta.window_floor}, PCM from unit {meta.pcm_floor}, "
        f"{meta.bytes:,} bytes; journal {meta.events_first}..{meta.events_last}, "
        f"voiced through unit {meta.voiced_seq}"
    )
    units = loaded.committed[-last:] if last > 0 else ()
    print_columns(console, COLUMNS, [_row(unit) for unit in units])
    return 0


async def _erase(
    url: str, session: str, patience_s: float, durability: Durability, even_unknown: bool
) -> int:
    session_keys(session)  # a wrong name is told before any waiting
    options = LedgerOptions(durability=durability)
    pending = PendingErasures(default_cache_dir(), url)
    even_unknown = even_unknown or session in pending.sessions()
    pending.add(session)
    until = time.monotonic() + patience_s
    while True:
        try:
            ledger = await Ledger.connect(url, options)
            try:
                if not even_unknown and await ledger.phase(session) is None:
                    # A slip of the pen must not block a name for a week.
                    pending.done(session)
                    raise SessionUnknown(session, UNKNOWN)
                keys = await ledger.erase(session)
            finally:
                await ledger.close()
        except LedgerCorrupt:
            pending.done(session)  # something else has that name, and will have it later
            raise
        except LedgerUnavailable as error:
            if time.monotonic() > until:
                text = f"session {session} may be there still: {error.reason}"
                later = "a sidecar here, or `duplex ledger sweep`, erases it when it can"
                print(f"{text}; {later}", file=sys.stderr)
                return 2
            await asyncio.sleep(RETRY_EVERY_S)
        else:
            pending.done(session)
            print(f"erased {keys} keys of session {session}")
            return 0


def _row(unit: Committed) -> tuple[str, ...]:
    plan = unit.plan
    at = datetime.fromtimestamp(unit.at_ms / 1000, UTC)
    return (
        at.strftime("%Y-%m-%d %H:%M:%S"),
        str(unit.seq),
        str(unit.epoch),
        str(unit.turn),
        unit.decision + (" (end)" if unit.turn_end else ""),
        str(len(unit.token_ids)),
        plan.action,
        plan.cause or "",
        str(plan.prompt_tokens),
        unit.replica,
    )


def _verified(loaded: LoadedSession) -> int:
    entries = len(loaded.entries) + 1
    print(f"ok: {entries} entries, {len(loaded.committed)} units, {len(loaded.media)} with blobs")
    return 0


def _verify_file(path: Path) -> int:
    try:
        with path.open("rb") as lines:
            units = verify_lines(lines)
    except LedgerCorrupt as error:
        print(f"corrupt: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(os_error_text(error), file=sys.stderr)
        return 2
    except LedgerError as error:
        print(str(error), file=sys.stderr)
        return 2
    print(f"ok: {units} units")
    return 0


def _export(loaded: LoadedSession, output: Path | None) -> int:
    lines = b"".join(export_lines(loaded))
    if output is None:
        sys.stdout.buffer.write(lines)
        sys.stdout.flush()
    else:
        with written(output) as path:
            path.write_bytes(lines)
    return 0
