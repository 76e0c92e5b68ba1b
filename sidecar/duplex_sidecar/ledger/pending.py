"""Erasures that were ordered while the ledger was away: kept in files until they are done.

One empty file a session, below a folder of that ledger's address, so that they outlive whoever took
the order. Any process on this machine may finish them; twice is the same as once.
"""

import asyncio
import hashlib
import logging
from pathlib import Path

from duplex_api.ledger_address import without_login
from duplex_sidecar.ledger.errors import LedgerCorrupt, LedgerError, LedgerUnavailable
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.store import Ledger

log = logging.getLogger(__name__)

FOLDER = "pending-erasures"
PERIOD_S = 30.0
_PREFIX = "s-"


class PendingErasures:
    """cache_dir: what survives a restart. url: of the ledger that they are in."""

    def __init__(self, cache_dir: Path, url: str) -> None:
        name = hashlib.sha256(without_login(url).encode()).hexdigest()[:16]
        self._folder = cache_dir / FOLDER / name

    def add(self, session: str) -> None:
        """Raises OSError, and ValueError for what is no session's name."""
        session_keys(session)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / f"{_PREFIX}{session}").touch(mode=0o600)

    def done(self, session: str) -> None:
        (self._folder / f"{_PREFIX}{session}").unlink(missing_ok=True)

    def sessions(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        names = (file.name for file in self._folder.iterdir())
        return sorted(n.removeprefix(_PREFIX) for n in names if n.startswith(_PREFIX))


async def finish_erasures(ledger: Ledger, pending: PendingErasures) -> int:
    """Those that are possible now; how many were. Those that never will be are told and dropped."""
    finished = 0
    for session in pending.sessions():
        try:
            await ledger.erase(session)
        except LedgerUnavailable:
            continue  # it may be this one's server or replica alone that is away
        except LedgerCorrupt as error:
            # Something else has the session's name: no repeat changes that.
            log.error("a pending erasure is refused and given up: %s", error)
            pending.done(session)
            continue
        except (LedgerError, ValueError) as error:
            log.error("a pending erasure is refused: %s", error)
            continue
        pending.done(session)
        finished += 1
    return finished


async def keep_finishing_erasures(ledger: Ledger, pending: PendingErasures) -> None:
    """Until cancelled."""
    while True:
        try:
            if finished := await finish_erasures(ledger, pending):
                log.info("%d erasures that had to wait are done", finished)
        except OSError as error:
            log.error("pending erasures cannot be read: %s", error)
        await asyncio.sleep(PERIOD_S)
