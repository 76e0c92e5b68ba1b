"""The session's own view of the ledger: the head it expects, the lease it holds, outages.

A write whose outcome is unknown is sent again with its operation id until it is known; what the
ledger refuses (lease lost, another head) ends this owner, never the session's data. While the
ledger is away, input is held for `hold_s`, then refused by name until the ledger is back. Sessions
come back from an outage a few at a time (`session.staggering`).
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from duplex_sidecar.ledger.call import Head, PendingCall
from duplex_sidecar.ledger.client_calls import Cut, Played
from duplex_sidecar.ledger.errors import HeadMismatch, LedgerUnavailable, ServerFull
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.lease import LeaseKeeper
from duplex_sidecar.ledger.media import Trim, UnitMedia
from duplex_sidecar.ledger.records import (
    AcceptDraft,
    ClosedDraft,
    CommitDraft,
    Entry,
    RedoDraft,
)
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.session.staggering import Seat, Stagger
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import LedgerCall

_T = TypeVar("_T")


class DurableSession:
    """One owner's writes, in the order of the unit's way. Not to be used from two tasks at once.

    Whatever is asked of a ledger that is away waits until it is back or the lease is lost.
    """

    def __init__(
        self,
        ledger: Ledger,
        keeper: LeaseKeeper,
        head: Head,
        *,
        hold_s: float,
        metrics: Metrics,
        clock_s: Callable[[], float],
        stagger: Stagger,
    ) -> None:
        self._ledger = ledger
        self._keeper = keeper
        self._head = head
        self._hold_s = hold_s
        self._metrics = metrics
        self._clock_s = clock_s
        self._stagger = stagger
        self._seat: Seat | None = None
        """Since a write that was held behind an outage has gone through."""
        self._away_since: float | None = None
        self._returns = 0
        """What `Stagger.returns` was when this session had no answer last."""

    @property
    def session(self) -> str:
        return self._keeper.lease.session

    @property
    def replica(self) -> str:
        return self._keeper.lease.replica

    @property
    def head(self) -> Head:
        return self._head

    @property
    def refuses_input(self) -> bool:
        """The ledger has been away longer than input is held, as far as anybody here knows."""
        away = self._away_since
        if away is None or self._stagger.returns != self._returns:
            return False
        return self._clock_s() - away > self._hold_s

    def caught_up(self) -> None:
        """What was held behind an outage is done: another session may."""
        if self._seat is not None:
            self._seat.free()
            self._seat = None

    async def accept(self, draft: AcceptDraft, media: UnitMedia, state: bytes) -> None:
        await self._chain(
            LedgerCall.ACCEPT,
            lambda: self._ledger.accept(self._keeper.lease, self._head, draft, media, state=state),
        )

    async def commit(self, draft: CommitDraft, state: bytes, trim: Trim) -> None:
        await self._chain(
            LedgerCall.COMMIT,
            lambda: self._ledger.commit(
                self._keeper.lease, self._head, draft, state=state, trim=trim
            ),
        )

    async def redo(self, seq: int, attempt: int, cause: str) -> None:
        """Recorded before the unit is submitted again."""
        await self._note(RedoDraft(seq=seq, attempt=attempt, cause=cause))

    async def respeak(self, seq: int) -> int:
        """Recorded before a committed unit is run again for its sound; how often it was, this time
        included."""
        operation = secrets.token_hex(8)
        return await self._timed(
            LedgerCall.NOTE, lambda: self._ledger.count_respeak(self._keeper.lease, seq, operation)
        )

    async def failed(self) -> int:
        """Recorded when this owner gives up without a named reason: how often owners did, this time
        included, since the last unit was committed."""
        seq, operation = self._head.committed_seq, secrets.token_hex(8)
        return await self._timed(
            LedgerCall.NOTE, lambda: self._ledger.count_failure(self._keeper.lease, seq, operation)
        )

    async def journal(self, batch: JournalBatch) -> None:
        """The events are durable when this returns; they leave only while the lease is held."""

        async def send() -> None:
            await self._ledger.journal(self._keeper.lease, batch)

        await self._until_known(LedgerCall.JOURNAL, send)
        await self._keeper.wait_held()

    async def cut(self, cut: Cut) -> None:
        """A client's command has changed what was said; its events are durable when this returns
        and leave only while the lease is held."""
        await self._chain(
            LedgerCall.CUT, lambda: self._ledger.cut(self._keeper.lease, self._head, cut)
        )
        await self._keeper.wait_held()

    async def client_said(self, client_applied: str, played: Played | None = None) -> None:
        """What a client said that is no part of the conversation; see `Ledger.client_said`."""
        await self._timed(
            LedgerCall.CLIENT,
            lambda: self._ledger.client_said(self._keeper.lease, client_applied, played),
        )

    async def entries(self) -> tuple[Entry, ...]:
        """The chain as far as it is kept, without blobs."""
        return await self._timed(LedgerCall.LOAD, lambda: self._ledger.reader.entries(self.session))

    async def load(self) -> LoadedSession:
        return await self._timed(LedgerCall.LOAD, lambda: self._ledger.load(self.session))

    async def end(self, reason: str) -> None:
        """The session is over: a last entry, then the lease is given back."""
        try:
            await self._close_chain(reason)
        except HeadMismatch as error:
            # A write whose answer this owner did not wait for has arrived; the lease is still its
            # own, or the refusal had been another one.
            self._head = error.seen
            await self._close_chain(reason)
        await self._release(reason)

    async def release(self) -> None:
        """Another replica may go on."""
        await self._release(None)

    def forget(self) -> None:
        """Nothing is written any more, and so nothing of it needs mending."""
        self._ledger.forget(self._keeper.lease)

    async def park(self, reason: str) -> None:
        """The session waits in the ledger; the lease is given back. Raises HeadMismatch when
        something is open there that this owner does not know of."""
        lease, head = self._keeper.lease, self._head
        await self._timed(LedgerCall.PARK, lambda: self._ledger.park(lease, head, reason))

    async def hand_over(self, replica: str, fence: int) -> None:
        """That replica goes on, from now: its offer under `fence` becomes the lease. Raises
        NotOffered and StaleFence (nothing has changed), HeadMismatch as `park`."""
        lease, head = self._keeper.lease, self._head
        await self._timed(
            LedgerCall.HAND_OVER,
            lambda: self._ledger.moves.hand_over(lease, head, replica=replica, fence=fence),
        )

    async def _close_chain(self, reason: str) -> None:
        if self._head.open_seq is None:
            await self._note(ClosedDraft(seq=self._head.committed_seq, reason=reason))

    async def _release(self, ended: str | None) -> None:
        lease = self._keeper.lease
        await self._while_away(lambda _: self._ledger.release(lease, ended=ended))

    async def _note(self, draft: RedoDraft | ClosedDraft) -> None:
        await self._chain(
            LedgerCall.NOTE, lambda: self._ledger.note(self._keeper.lease, self._head, draft)
        )

    async def _chain(self, call: LedgerCall, send: Callable[[], Awaitable[Head]]) -> None:
        head = await self._until_known(call, send)
        if head is not None:
            self._head = head

    async def _until_known(
        self, call: LedgerCall, send: Callable[[], Awaitable[Head | None]]
    ) -> Head | None:
        """Send until the outcome is known. An unknown one is asked for with the same operation,
        which is executed exactly once, then or now. Raises what the ledger refuses."""
        started = time.perf_counter()
        pending: PendingCall | None = None

        async def attempt(failed: LedgerUnavailable | None) -> Head | None:
            nonlocal pending
            pending = (failed.pending if failed else None) or pending
            return await (self._ledger.retry_unknown(pending) if pending else send())

        head = await self._while_away(attempt)
        self._count(call, started)
        return head

    async def _timed(self, call: LedgerCall, send: Callable[[], Awaitable[_T]]) -> _T:
        """A call that may be sent again as it is."""
        started = time.perf_counter()
        answer = await self._while_away(lambda _: send())
        self._count(call, started)
        return answer

    async def _while_away(self, attempt: Callable[[LedgerUnavailable | None], Awaitable[_T]]) -> _T:
        """Try until the ledger answers. `attempt` is told how the try before it failed."""
        failed: LedgerUnavailable | None = None
        try:
            while True:
                try:
                    answer = await attempt(failed)
                except (LedgerUnavailable, ServerFull) as error:
                    self.caught_up()
                    self._returns = self._stagger.returns
                    failed = error if isinstance(error, LedgerUnavailable) else None
                    if self._away_since is None:
                        self._away_since = self._clock_s()
                    if self._keeper.lost_because is not None:
                        raise self._keeper.lost_because from error
                    await asyncio.sleep(self._stagger.retry_s())
                    self._seat = await self._stagger.seat()
                else:
                    if self._away_since is not None:
                        self._stagger.returns += 1
                    return answer
        finally:
            # A refusal is an answer, too; and of a call that was given up nobody would learn it.
            self._away_since = None

    def _count(self, call: LedgerCall, started: float) -> None:
        self._metrics.ledger_call(call, (time.perf_counter() - started) * 1000)
