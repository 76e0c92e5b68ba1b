"""Streams that stand here for sessions which another replica runs, each with its slot.

Before a hand-over the replica that is to take the session keeps them up with the ledger and looks
whether the lease has become its own. After one the replica that gave it away keeps its own until
the new owner has committed a unit. Both are bounded in time; whoever takes the session up here
meanwhile, by whichever way, goes on with them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from duplex_api.resolve import ResolvedLifecycle
from duplex_api.session import SessionSpec
from duplex_sidecar.ledger.errors import LedgerError
from duplex_sidecar.ledger.moving import OFFER_MS, Offer
from duplex_sidecar.ledger.session_view import LoadedSession, Phase, SessionMeta
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.session.conversation import Conversation, decode_conversation
from duplex_sidecar.session.ending import END_TIMEOUT_S, LAST_WRITE_S
from duplex_sidecar.session.roster import Roster
from duplex_sidecar.session.rows import RowsMissing
from duplex_sidecar.session.unit import UnitRunner
from duplex_sidecar.session.warming import Warmer, WarmStreams
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.window.render import RenderError

log = logging.getLogger(__name__)

STAND_BY_S = OFFER_MS / 1000 + 2
"""After the last order: a little longer than the ledger keeps the offer."""
KEEP_S = 10.0
"""How long streams are kept for a session that was given away: longer than its lease lasts, if the
new owner never renews it."""
LOOK_S = 0.05
KEPT_LOOK_S = 0.2

_NOT_WARM = (StageError, RenderError, RowsMissing)


@dataclass(eq=False)
class Prepared:
    """A session that is to come. token_sha256: of its client's token. until_s: on the loop's
    clock."""

    offer: Offer
    token_sha256: str
    spec: SessionSpec
    lifecycle: ResolvedLifecycle
    warmer: Warmer
    until_s: float = 0.0
    complaint: str = ""
    """What the log says of it already: it is looked at too often to say the same each time."""
    look: asyncio.Event = field(default_factory=asyncio.Event)

    async def warm(self, loaded: LoadedSession) -> WarmStreams | None:
        try:
            await self.warmer.follow(loaded)
        except _NOT_WARM as error:
            log.warning("streams do not follow: %s", type(error).__name__)
            return None
        return self.warmer.streams()

    async def close(self) -> None:
        await self.warmer.close()

    def complains(self, complaint: str) -> bool:
        """Whether it is a new one."""
        before, self.complaint = self.complaint, complaint
        return complaint not in ("", before)


@dataclass(eq=False)
class Kept:
    """A session that has gone. conversation: as it was here last."""

    conversation: Conversation
    runner: UnitRunner
    streams: WarmStreams
    until_s: float

    async def warm(self, loaded: LoadedSession) -> WarmStreams | None:
        """Only as long as nobody has gone on: what was said elsewhere is not in these streams."""
        if decode_conversation(loaded.state) != self.conversation:
            return None
        async with asyncio.timeout(END_TIMEOUT_S):
            await self.runner.close_voice()  # its epoch and its stream have the names of the next
        return self.streams

    async def close(self) -> None:
        await self.runner.close()


class StandingBy:
    """take_over: of a session whose lease was handed to this replica."""

    def __init__(
        self, ledger: Ledger, roster: Roster, take_over: Callable[[str], Awaitable[None]]
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._take_over = take_over
        self._sessions: dict[str, Prepared | Kept] = {}
        self._ending: dict[str, asyncio.Future[None]] = {}
        """Of sessions whose streams are just being closed: the newest ones, by session."""
        self._tasks: set[asyncio.Future[None]] = set()

    def prepared(self, session: str) -> Prepared | None:
        found = self._sessions.get(session)
        return found if isinstance(found, Prepared) else None

    @property
    def expected(self) -> tuple[SessionSpec, ...]:
        """Of the sessions that are to come. May be asked for by another thread."""
        found = list(self._sessions.values())
        return tuple(each.spec for each in found if isinstance(each, Prepared))

    def expect(self, session: str, prepared: Prepared) -> None:
        """From now on it is looked for; also said again, which prolongs it."""
        prepared.until_s = asyncio.get_running_loop().time() + STAND_BY_S
        if self._sessions.get(session) is not prepared:
            self._enter(session, prepared, self._look_for(session, prepared))

    def keep(
        self, session: str, conversation: Conversation, runner: UnitRunner, streams: WarmStreams
    ) -> None:
        """It was given away. conversation: as it was here last."""
        kept = Kept(conversation, runner, streams, asyncio.get_running_loop().time() + KEEP_S)
        self._enter(session, kept, self._look_after(session, kept))

    async def take(self, session: str, loaded: LoadedSession) -> WarmStreams | None:
        """What a session that this replica has taken up goes on with; afterwards nothing of it
        stands by any more. Never raises for what cannot be used."""
        await self._ended(session)
        found = self._sessions.get(session)
        if found is None:
            return None
        self._leave(session)
        try:
            streams = await found.warm(loaded)
        except TimeoutError:
            streams = None
        except BaseException:
            self._close_soon(session, _close(found))
            raise
        if streams is None:
            self._close_soon(session, _close(found))
            await self._ended(session)
        return streams

    async def drop(self, session: str) -> None:
        """It is not waited for, or kept, any more; nothing of it is left when this returns."""
        found = self._sessions.get(session)
        if found is not None:
            self._leave(session)
            self._close_soon(session, self._end(found))
        await self._ended(session)

    def give_up(self, prepared: Prepared) -> None:
        """One that was never expected: its offer and its streams go, a moment later."""
        self._close_soon(prepared.offer.session, self._end(prepared))

    async def close(self) -> None:
        for session in list(self._sessions):
            await self.drop(session)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # --- inside -----------------------------------------------------------------------------------

    def _enter(self, session: str, what: Prepared | Kept, watch: "Awaitable[None]") -> None:
        self._sessions[session] = what
        self._roster.hold(session)
        self._spawn(watch)

    def _leave(self, session: str) -> None:
        found = self._sessions.pop(session)
        if isinstance(found, Prepared):
            found.look.set()
        self._roster.let_go(session)

    def _spawn(self, work: Awaitable[None]) -> "asyncio.Future[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _close_soon(self, session: str, work: Awaitable[None]) -> None:
        """Encoder and vocoder know a session by its name alone: what is opened of it before this is
        over would be closed with it. So whoever opens waits for it."""
        before = self._ending.get(session)

        async def in_turn() -> None:
            if before is not None:
                await asyncio.wait({before})
            await work

        def forget(done: "asyncio.Future[None]") -> None:
            if self._ending.get(session) is done:
                del self._ending[session]

        self._ending[session] = self._spawn(in_turn())
        self._ending[session].add_done_callback(forget)

    async def _ended(self, session: str) -> None:
        while (ending := self._ending.get(session)) is not None:
            await asyncio.wait({ending})

    async def _end(self, what: Prepared | Kept) -> None:
        if isinstance(what, Prepared):
            with contextlib.suppress(LedgerError, TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):  # an offer runs out by itself
                    await self._ledger.moves.withdraw(what.offer)
        await _close(what)

    async def _meta(self, session: str) -> SessionMeta | None:
        try:
            return await self._ledger.reader.meta(session)
        except LedgerError:
            return None

    async def _look_for(self, session: str, prepared: Prepared) -> None:
        clock_s, offer = asyncio.get_running_loop().time, prepared.offer
        try:
            while self._sessions.get(session) is prepared and clock_s() < prepared.until_s:
                meta = await self._meta(session)
                if meta is not None and meta.nonce == offer.nonce:
                    await self._take_over(session)
                elif meta is not None and (
                    meta.phase is not Phase.OPEN or meta.fence >= offer.fence
                ):
                    break
                elif meta is not None and prepared.warmer.behind(meta.head):
                    await self._follow(session, prepared)
                prepared.look.clear()
                if self._sessions.get(session) is prepared:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(prepared.look.wait(), LOOK_S)
        except Exception:
            log.exception("session is not waited for any more")
        if self._sessions.get(session) is prepared:
            await self.drop(session)

    async def _follow(self, session: str, prepared: Prepared) -> None:
        complaint = ""
        try:
            await prepared.warmer.follow(await self._ledger.load(session))
        except (LedgerError, *_NOT_WARM) as error:
            complaint = type(error).__name__
        if prepared.complains(complaint):
            log.info("streams do not follow yet: %s", complaint)

    async def _look_after(self, session: str, kept: Kept) -> None:
        clock_s = asyncio.get_running_loop().time
        while self._sessions.get(session) is kept and clock_s() < kept.until_s:
            meta = await self._meta(session)
            over = meta is not None and meta.phase is not Phase.OPEN
            if over or (meta is not None and meta.head.committed_seq > kept.conversation.seq):
                break
            await asyncio.sleep(KEPT_LOOK_S)
        if self._sessions.get(session) is kept:
            await self.drop(session)


async def _close(what: Prepared | Kept) -> None:
    """In bounded time; what a stage holds on to, `session.reconciler` ends."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await what.close()
    except TimeoutError:
        log.warning("streams that stood by are not closed in time")
