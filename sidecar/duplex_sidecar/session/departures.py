"""How sessions leave this replica: parked, ended, erased, or all of them because it is emptied."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from duplex_sidecar.ledger.errors import (
    LeaseHeld,
    LedgerUnavailable,
    SessionEnded,
    SessionErased,
)
from duplex_sidecar.ledger.records import ClosedDraft
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.ending import END_TIMEOUT_S, ERASED, SHUT_DOWN, Ending
from duplex_sidecar.session.handing_over import HandOver
from duplex_sidecar.session.owners import Owners
from duplex_sidecar.session.parking import ParkReason
from duplex_sidecar.session.refusals import (
    PlacementRefused,
    Refusal,
    session_over,
    typed_refusals,
)
from duplex_sidecar.session.roster import Live, Roster
from duplex_sidecar.session.turnstile import Turnstile
from duplex_sidecar.telemetry.names import LedgerCall

log = logging.getLogger(__name__)

PARK_GRACE_S = 2.0
"""How long a park call waits for the end of the present turn."""
HAND_OVER_GRACE_S = 5.0
"""The same for a hand-over: the next owner is ready, so the turn may as well end here."""
PARK_UNIT_S = 3.0
"""How long it waits for the present unit after that, before the session counts as busy."""
DRAIN_LOOK_S = 0.25


class Departures:
    def __init__(
        self,
        roster: Roster,
        ledger: Ledger,
        owners: Owners,
        turnstile: Turnstile,
        keep_erasure: Callable[[str], None],
    ) -> None:
        """keep_erasure: notes an erasure that is not possible now, for later."""
        self._keep_erasure = keep_erasure
        self._roster = roster
        self._ledger = ledger
        self._owners = owners
        self._turnstile = turnstile
        self._empty_by_s: float | None = None
        """On the loop's clock: when the grace of a drain is over."""
        self.closed = False
        """All were let go of: none starts here any more."""

    @property
    def draining(self) -> bool:
        return self._empty_by_s is not None

    def require_open(self) -> None:
        """Raises ClientError once none starts here any more."""
        if self.closed:
            raise ClientError(ErrorCode.NOT_READY, "the replica is shutting down")

    # --- one session ------------------------------------------------------------------------------

    async def park(
        self, session: str, *, grace_s: float = PARK_GRACE_S, unit_s: float = PARK_UNIT_S
    ) -> None:
        """Returns when the session waits in the ledger; also when it did before.

        Raises PlacementRefused SESSION_BUSY when a unit does not end in time (the wish is taken
        back), ClientError when the session runs elsewhere, is over or unknown.
        """
        async with self._turnstile.only_caller(session):
            await self._park(session, grace_s, unit_s)

    async def _park(self, session: str, grace_s: float, unit_s: float) -> None:
        entry = self._roster.live.get(session)
        if entry is None:
            await self._require_parked(session)
            return
        for patience_s, wait_s in ((grace_s, grace_s), (0.0, unit_s)):
            entry.actor.wishes.park(ParkReason.REQUESTED, patience_s)
            await asyncio.wait({entry.task}, timeout=wait_s)
        if not entry.actor.leaving:
            entry.actor.wishes.withdraw(ParkReason.REQUESTED)
            raise PlacementRefused(Refusal.SESSION_BUSY, "a unit is under way for too long")
        await asyncio.wait({entry.task})
        ending = entry.actor.ending
        assert ending is not None  # its task is over
        if ending.parks is None:
            raise ClientError(ending.code, ending.detail)

    async def hand_over(
        self,
        session: str,
        order: HandOver,
        *,
        grace_s: float = HAND_OVER_GRACE_S,
        unit_s: float = PARK_UNIT_S,
    ) -> None:
        """Returns when the lease is the other replica's; also when it was before. The other one has
        to be prepared.

        Raises PlacementRefused NOT_PREPARED, STALE_FENCE, and SESSION_BUSY when a unit does not end
        in time or the session is about to go elsewhere (it goes on here in all of these),
        ClientError when it does not run here, parks or ends meanwhile.
        """
        entry = self._roster.live.get(session)
        if entry is None or entry.actor.leaving:
            await self._require_handed_over(session, order)
            return
        outcome: asyncio.Future[None] | None = None
        for patience_s, wait_s in ((grace_s, grace_s), (0.0, unit_s)):
            outcome = entry.actor.passing_on.wish(order, patience_s)
            await asyncio.wait(
                {outcome, entry.task}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            if outcome.done() or entry.task.done():
                break
        assert outcome is not None
        if not (outcome.done() or entry.actor.leaving):
            entry.actor.passing_on.withdraw(order)  # the outcome says so
        await asyncio.wait({outcome, entry.task}, return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            ending = entry.actor.ending or SHUT_DOWN
            raise ClientError(ending.code, ending.detail)
        outcome.result()

    async def _require_handed_over(self, session: str, order: HandOver) -> None:
        with typed_refusals():
            meta = await self._ledger.reader.meta(session)
        if meta is None or (meta.replica, meta.fence) != (order.replica, order.fence):
            raise ClientError(ErrorCode.SESSION_NOT_FOUND, "the session does not run here")

    async def _require_parked(self, session: str) -> None:
        with typed_refusals():
            meta = await self._ledger.reader.meta(session)
        if meta is None or meta.phase is Phase.ERASED:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND)
        if meta.phase is Phase.ENDED:
            raise session_over(meta.reason)
        if meta.phase is not Phase.PARKED:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND, "the session does not run here")

    async def end(self, session: str, reason: str = "") -> bool:
        """End a session for good that runs here, or that nobody runs. False: there is none such.
        reason: a short word for the ledger. Raises ClientError while the ledger is away."""
        async with self._turnstile.only_caller(session):
            entry = self._roster.live.get(session)
            if entry is not None:
                detail = f"ended: {reason}" if reason else "ended by the admin API"
                ending = Ending(ErrorCode.SESSION_ENDED, detail, for_good=True, reason=reason)
                await entry.actor.end(ending)
                await asyncio.wait({entry.task})  # then its slot is free, too
            # It may have been about to park or to be let go of, or could not write its last entry:
            # what counts is what the ledger says.
            with typed_refusals():
                ended = await self._end_unattended(session, reason or ErrorCode.SESSION_ENDED.value)
                return ended or (entry is not None and await self._is_over(session))

    async def _end_unattended(self, session: str, reason: str) -> bool:
        meta = await self._ledger.reader.meta(session)
        if meta is None or meta.phase not in (Phase.OPEN, Phase.PARKED):
            return False
        try:
            acquire = partial(self._owners.acquire_if_free, session)
            async with self._owners.held(session, acquire) as lease:
                head = (await self._ledger.load(session)).head
                if head.open_seq is None:
                    draft = ClosedDraft(seq=head.committed_seq, reason=reason)
                    await self._ledger.note(lease, head, draft)
                await self._ledger.release(lease, ended=reason)
        except (LeaseHeld, SessionEnded, SessionErased):
            return False
        return True

    async def _is_over(self, session: str) -> bool:
        return await self._ledger.phase(session) in (Phase.ENDED, Phase.ERASED)

    async def erase(self, session: str) -> None:
        """Tombstone first, then whoever runs it here is told. May be repeated. Raises ClientError
        while the ledger is away: then it is done as soon as that is back, whoever runs by then."""
        async with self._turnstile.only_caller(session):
            with typed_refusals(), self._owners.metrics.timed_ledger_call(LedgerCall.ERASE):
                try:
                    await self._ledger.erase(session)
                except LedgerUnavailable:
                    self._note_erasure(session)
                    raise
            entry = self._roster.live.get(session)
            if entry is not None:
                await entry.actor.end(ERASED)
                await asyncio.wait({entry.task})

    def _note_erasure(self, session: str) -> None:
        """The caller is told that it is not done either way, and may ask again."""
        try:
            self._keep_erasure(session)
        except OSError as error:
            log.error("an erasure cannot be noted for later: %s", error.strerror)

    # --- all of them ------------------------------------------------------------------------------

    def drain(self, grace_s: float) -> None:
        """Take no new session, park each at its next turn end or at the grace's end. A repeat only
        ever shortens the grace."""
        by_s = asyncio.get_running_loop().time() + grace_s
        self._empty_by_s = min(by_s, self._empty_by_s or by_s)
        for entry in self._roster.live.values():
            self.told(entry)
        self._roster.changed()

    def told(self, entry: Live) -> None:
        """A session of a replica that may be draining, or closed."""
        if self.closed:
            entry.actor.wishes.let_go()
        if self._empty_by_s is not None:
            left_s = self._empty_by_s - asyncio.get_running_loop().time()
            entry.actor.wishes.park(ParkReason.DRAIN, max(0.0, left_s))

    async def drained(self) -> bool:
        """Returns when no session is left, or none will go any more; whether it is empty. Once the
        grace is over nobody waits for those whose ledger is away: they cannot park."""
        while staying := self._waited_for():
            await asyncio.wait(staying, timeout=DRAIN_LOOK_S)
        return not self._roster.live

    def _waited_for(self) -> set[asyncio.Task[None]]:
        """The tasks of sessions that may still go."""
        if self._empty_by_s is None:
            return set()
        over_s = asyncio.get_running_loop().time() - self._empty_by_s
        if over_s >= PARK_UNIT_S + END_TIMEOUT_S:
            return set()
        entries = self._roster.live.values()
        return {entry.task for entry in entries if over_s < 0 or entry.actor.holds_lease}

    async def let_go_of_all(self) -> None:
        """Their ledgers stay open for another replica, and none starts here any more. With the
        ledger away this takes some seconds; what could not be told there runs out by itself."""
        self.closed = True
        for entry in self._roster.live.values():
            entry.actor.wishes.let_go()
        await asyncio.gather(*(entry.task for entry in self._roster.live.values()))
