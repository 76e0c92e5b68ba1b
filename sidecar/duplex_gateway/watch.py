"""Whether the owners of the calls' sessions are still their owners, asked of the ledger for all
calls together: a replica that hangs, or is cut off, says nothing itself."""

import asyncio
import contextlib
import logging
from collections.abc import Generator
from dataclasses import dataclass, field

from duplex_gateway.decide import LeaseView
from duplex_gateway.routing import Directory
from duplex_sidecar.ledger.errors import LedgerError

log = logging.getLogger(__name__)

PERIOD_S = 1.0
BATCH_SESSIONS = 256
EXPIRED_LOOKS = 2
"""An owner that was late once may still renew."""


@dataclass(eq=False)
class Watched:
    """moved: the session has another owner now, or none."""

    session: str
    fence: int
    expired_looks: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self, lease: LeaseView | None) -> None:
        expired = lease is None or lease.remaining_ms <= 0
        self.expired_looks = self.expired_looks + 1 if expired else 0
        later = lease is not None and lease.fence > self.fence
        if later or self.expired_looks >= EXPIRED_LOOKS:
            self.moved.set()


class LeaseWatch:
    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._watched: set[Watched] = set()

    @contextlib.contextmanager
    def watching(self, session: str, fence: int) -> Generator[Watched]:
        watched = Watched(session, fence)
        self._watched.add(watched)
        try:
            yield watched
        finally:
            self._watched.discard(watched)

    async def run(self, directory: Directory) -> None:
        """Until it is cancelled. A ledger that cannot be read says nothing about owners."""
        while True:
            await asyncio.sleep(self._period_s)
            watched = list(self._watched)
            try:
                for start in range(0, len(watched), BATCH_SESSIONS):
                    await _look(directory, watched[start : start + BATCH_SESSIONS])
            except LedgerError:
                continue
            except Exception:
                # Of all calls together: one that it cannot cope with must not blind the others.
                log.exception("leases cannot be looked at")


async def _look(directory: Directory, watched: list[Watched]) -> None:
    leases = await directory.leases([each.session for each in watched])
    for each, lease in zip(watched, leases, strict=True):
        each.look(lease)
