"""`duplex ledger sweep`: ledgers without an owner."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from duplex_sidecar.cli.inputs import Duration, InputFile
from duplex_sidecar.cli.ledger_access import Url, guarded
from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.ledger.pending import PendingErasures, finish_erasures
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.ledger.sweep import Ownerless, find_ownerless, still_ownerless

HOUR_MS = 3_600_000


def sweep(
    *,
    url: Url,
    idle_hours: Duration = 1.0,
    keep: InputFile | None = None,
    yes: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """List the ledgers that nobody has owned for a while, and erase those of sessions that do not
    exist any more. Erasures that were ordered and could not be finished are finished first.

    Parameters
    ----------
    idle_hours
        For how long no owner has been seen.
    keep
        File with the ids of the sessions that exist, one a line; needed to erase the others.
    yes
        Really erase.
    """
    if yes and keep is None:
        print("nothing erased: name the sessions that exist with --keep", file=sys.stderr)
        return 2
    return guarded(lambda: _sweep(url, int(idle_hours * HOUR_MS), keep, erase=yes))


async def _sweep(url: str, min_idle_ms: int, keep: Path | None, *, erase: bool) -> int:
    existing = await asyncio.to_thread(_names_in, keep)
    ledger = await Ledger.connect(url)
    try:
        await _finish(ledger, PendingErasures(default_cache_dir(), url))
        found = [
            one
            async for one in find_ownerless(ledger.reader, min_idle_ms)
            if one.session not in existing
        ]
        _show(found)
        for one in found if erase else ():
            if await still_ownerless(ledger.reader, one.session, min_idle_ms) is None:
                print(f"session {one.session} is in use again and was left alone")
                continue
            print(f"erased {await ledger.erase(one.session)} keys of session {one.session}")
    finally:
        await ledger.close()
    return 0


def _names_in(keep: Path | None) -> frozenset[str]:
    if keep is None:
        return frozenset()
    try:
        return frozenset(keep.read_text().split())
    except UnicodeDecodeError:
        raise ValueError(f"{keep}: is no text") from None


async def _finish(ledger: Ledger, pending: PendingErasures) -> None:
    finished = await finish_erasures(ledger, pending)
    begun = [session async for session in ledger.unfinished_erasures()]
    for session in begun:
        await ledger.erase(session)
    if finished or begun:
        print(f"finished {finished + len(begun)} erasures that were ordered before")


def _show(found: list[Ownerless]) -> None:
    table = Table("session", "phase", "idle hours", "bytes")
    for one in found:
        table.add_row(one.session, one.phase, f"{one.idle_ms / HOUR_MS:.1f}", f"{one.bytes:,}")
    Console().print(table)
