"""One conversation: a task, a mailbox, a phase. The only code that advances it.

One piece of work at a time (a recovery, then unit after unit) runs beside the loop, so that a
client can attach, leave or close while it is under way. Whatever ends the session goes through
`run`, which always gets to its last line: nobody waits for a session that is no more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from duplex_api.resolve import ResolvedLifecycle
from duplex_sidecar.ledger.errors import (
    LeaseLost,
    LedgerError,
    LedgerFull,
    LedgerUnavailable,
)
from duplex_sidecar.ledger.lease import LeaseKeeper
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.commands import (
    AppendInput,
    ClearInput,
    Close,
    Command,
    CommitInput,
    Heartbeat,
    SetInputFormat,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import (
    Alive,
    Closed,
    Event,
    Failure,
    InputCleared,
    ResyncRequired,
    Sequenced,
    SessionOpened,
)
from duplex_sidecar.session.conversation import Conversation, Speech
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionOver
from duplex_sidecar.session.input import InputDesk
from duplex_sidecar.session.mailbox import Mailbox, joined
from duplex_sidecar.session.outbox import Outbox
from duplex_sidecar.session.replay import replay_after
from duplex_sidecar.session.unit import BadInput, UnitRunner

log = logging.getLogger(__name__)

TICK_S = 0.25
END_TIMEOUT_S = 10.0


class Phase(StrEnum):
    """opening: not yet recovered. ready: no unit yet. active: units flow. ending, ended."""

    OPENING = "opening"
    READY = "ready"
    ACTIVE = "active"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True)
class _Ending:
    """Why it is over here. for_good: the ledger is to say so, no replica goes on with it."""

    code: ErrorCode
    detail: str
    for_good: bool


_SHUT_DOWN = _Ending(ErrorCode.LEASE_LOST, "the replica is shutting down", for_good=False)

Recover = Callable[[], Awaitable[tuple[Conversation, Speech]]]
"""Brings the streams back and runs what a lost owner left unfinished."""


class ClientAttachment:
    """`session.port.Attachment` of this actor."""

    def __init__(self, actor: "SessionActor", number: int, outbox: Outbox) -> None:
        self._actor = actor
        self._number = number
        self._outbox = outbox

    @property
    def session(self) -> str:
        return self._actor.session

    async def submit(self, command: Command) -> None:
        await self._actor.submit(self._number, command)

    async def next_event(self) -> Event | None:
        return await self._outbox.next()

    async def detach(self) -> None:
        self._actor.detach(self._number)


class SessionActor:
    def __init__(
        self,
        *,
        session: str,
        mode: str,
        conversation: Conversation,
        speech: Speech,
        desk: InputDesk,
        runner: UnitRunner,
        durable: DurableSession,
        keeper: LeaseKeeper,
        ledger: Ledger,
        lifecycle: ResolvedLifecycle,
        recover: Recover | None,
        clock_s: Callable[[], float],
        age_s: float,
    ) -> None:
        """recover: None for a new session. age_s: since the session was opened, here or
        elsewhere."""
        self.session = session
        self.phase = Phase.OPENING
        self._mode = mode
        self._conversation = conversation
        self._speech = speech
        self._desk = desk
        self._runner = runner
        self._durable = durable
        self._keeper = keeper
        self._ledger = ledger
        self._lifecycle = lifecycle
        self._recover = recover
        self._clock_s = clock_s
        self._mailbox = Mailbox()
        self._wake = asyncio.Event()
        """Something waits for the loop: a command, work that is done, a wish to end."""
        self._room = asyncio.Event()
        """Those who wait for room in the mailbox may look again."""
        self._recovered = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._attachments = 0
        self._outbox: Outbox | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._closing = False
        self._asked_to_end: _Ending | None = None
        self._told_refusing = False
        now = clock_s()
        self._opened_at, self._last_input_at = now - age_s, now
        self._detached_at: float | None = now
        self.ended = asyncio.Event()
        self.ended_because: Closed | None = None

    # --- for doors and the registry ---------------------------------------------------------------

    @property
    def conversation(self) -> Conversation:
        """The last committed state."""
        return self._conversation

    @property
    def attached(self) -> bool:
        """Whether a client is connected."""
        return self._outbox is not None

    @property
    def speech(self) -> Speech:
        return self._speech

    @property
    def retained_row_bytes(self) -> int:
        """Memory of the rows that are kept for slides to come."""
        return self._runner.retained_row_bytes

    def attach(self, last_sequence: int | None) -> ClientAttachment:
        """A new client; the one before is told that it was replaced, and what it said and nobody
        has heard yet is dropped. Events after `last_sequence` come first (None: none of the old
        ones). Raises ClientError when the session is over."""
        self._require_running()
        self._attachments += 1
        if self._outbox is not None:
            self._outbox.fail(ErrorCode.SESSION_TAKEN_OVER)
        if self._greeting is not None:
            self._greeting.cancel()
        self._mailbox.clear()
        self._room.set()
        outbox = self._outbox = Outbox()
        self._detached_at = None
        self._greeting = asyncio.create_task(self._greet(outbox, self._attachments, last_sequence))
        return ClientAttachment(self, self._attachments, outbox)

    async def submit(self, attachment: int, command: Command) -> None:
        """Waits while the mailbox is full. Raises ClientError (taken over, ended)."""
        while True:
            self._require_running()
            if attachment != self._attachments:
                raise ClientError(ErrorCode.SESSION_TAKEN_OVER)
            if not self._mailbox.full:
                break
            self._room.clear()
            await self._room.wait()
        if self._mailbox.put(command, self._desk.missing_bytes):
            self._wake.set()

    def detach(self, attachment: int) -> None:
        """The client is gone. What it has submitted still counts."""
        if attachment == self._attachments and self._outbox is not None:
            self._outbox = None
            self._detached_at = self._clock_s()
            if self._greeting is not None:
                self._greeting.cancel()

    async def end(self, code: ErrorCode, detail: str) -> None:
        """End from outside (the admin API). Returns when it is over."""
        self._asked_to_end = _Ending(code, detail, for_good=True)
        self._wake.set()
        await self.ended.wait()

    def let_go(self) -> None:
        """End here, so that another replica may go on. `ended` tells when that is done."""
        self._asked_to_end = self._asked_to_end or _SHUT_DOWN
        self._wake.set()

    def publish(self, event: Event) -> None:
        """To the attached client, if there is one. Sequenced events are in the journal already."""
        if self._outbox is not None:
            self._outbox.put(event)

    def _require_running(self) -> None:
        if self.ended_because is not None:
            raise ClientError(self.ended_because.code, self.ended_because.detail)

    # --- the one task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the session is over or another owner has it. Raises nothing but a cancellation,
        after which nothing is left to do either."""
        ending = _SHUT_DOWN
        try:
            ending = await self._until_over()
            await self._wind_up(ending)
        except asyncio.CancelledError:
            await self._wind_up(_SHUT_DOWN)
            raise
        finally:
            self._say_goodbye(ending)

    async def _until_over(self) -> _Ending:
        try:
            if self._recover is not None:
                self._start(self._run_recovery(self._recover))
            else:
                self._opened()
            while True:
                self._look_after_work()
                if self._asked_to_end is not None:
                    return self._asked_to_end
                if self._keeper.lost_because is not None:
                    raise self._keeper.lost_because
                self._check_clock()
                self._take_mail()
                if self._work is None and self._desk.has_unit:
                    self._start(self._run_unit())
                if self._work is None and self._closing:
                    return _Ending(ErrorCode.SESSION_ENDED, "closed by the client", for_good=True)
                await self._rest()
        except SessionOver as over:
            return _Ending(over.code, over.detail, for_good=True)
        except LeaseLost as error:
            log.info("session dropped: %s", error.reason)
            return _Ending(ErrorCode.LEASE_LOST, "another replica runs the session", for_good=False)
        except LedgerFull as error:
            log.error("session dropped: %s", error)
            return _Ending(ErrorCode.RESOURCE_EXHAUSTED, f"ledger: {error.reason}", for_good=False)
        except LedgerError as error:
            log.error("session dropped: %s: %s", type(error).__name__, error)
            return _Ending(ErrorCode.LEDGER_CORRUPT, type(error).__name__, for_good=False)
        except Exception:
            log.exception("session failed")
            return _Ending(ErrorCode.UNIT_FAILED, "internal error", for_good=True)

    async def _rest(self) -> None:
        """Until something waits for the loop, or the clock wants to be looked at."""
        tick = asyncio.get_running_loop().call_later(TICK_S, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            tick.cancel()
        self._wake.clear()

    # --- work -------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(lambda _: self._wake.set())

    def _look_after_work(self) -> None:
        """Raises what the work under way ended with."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()

    async def _run_recovery(self, recover: Recover) -> None:
        self._conversation, self._speech = await recover()
        self._opened()

    def _opened(self) -> None:
        self.phase = Phase.ACTIVE if self._conversation.seq else Phase.READY
        self._recovered.set()

    async def _run_unit(self) -> None:
        append = self._desk.take()
        if append is None:
            return
        try:
            after = await self._runner.run(self._conversation, self._speech, append)
        except BadInput as error:
            # Nothing of the append has entered any state. Its sound is good: it goes in without the
            # frames that cannot be decoded.
            self.publish(Failure(error.code, error.detail))
            append = self._desk.without_frames(append)
            after = await self._runner.run(self._conversation, self._speech, append)
        self._conversation, self._speech = after
        self.phase = Phase.ACTIVE

    # --- commands ---------------------------------------------------------------------------------

    def _take_mail(self) -> None:
        while run := self._mailbox.take(self._desk.sample_bytes):
            try:
                self._command(joined(run))
            except ClientError:
                # Nothing has changed. One by one, so that the error names its own event.
                for command in run:
                    self._command_or_failure(command)
        self._room.set()

    def _command_or_failure(self, command: Command) -> None:
        try:
            self._command(command)
        except ClientError as error:
            self.publish(Failure(error.code, error.detail, error.param, command.event_id))

    def _command(self, command: Command) -> None:
        match command:
            case AppendInput():
                self._append(command)
            case CommitInput():
                self._desk.commit()
            case ClearInput():
                self._desk.clear()
                self.publish(InputCleared())
            case SetInputFormat():
                self.publish(self._desk.set_format(command))
            case Heartbeat():
                self.publish(Alive(command.event_id))
            case Close():
                self._closing = True

    def _append(self, command: AppendInput) -> None:
        if self._closing:
            raise ClientError(ErrorCode.OUT_OF_ORDER_EVENT, "input after session.close")
        if self._durable.refuses_input:
            raise ClientError(ErrorCode.LEDGER_UNAVAILABLE)
        self._desk.append(command)
        self._last_input_at = self._clock_s()

    # --- attachments ------------------------------------------------------------------------------

    async def _greet(self, outbox: Outbox, attachment: int, last_sequence: int | None) -> None:
        """What a client gets first: the session as it stands, then what it missed. What happens
        meanwhile waits in the outbox."""
        await self._recovered.wait()
        opened = SessionOpened(
            session=self.session,
            resumed=self._conversation.seq > 0 or last_sequence is not None,
            attachment=attachment,
            next_unit=self._conversation.seq + 1,
            acknowledged_sample=self._desk.received_samples,
            last_sequence=self._speech.last_sequence,
            window_mode=self._mode,
            input_rate_hz=self._desk.rate_hz,
        )
        replay: list[Sequenced] = []
        resync: ResyncRequired | None = None
        if last_sequence is not None:
            try:
                replay, resync = await replay_after(self._ledger, self.session, last_sequence)
            except LedgerUnavailable:
                outbox.fail(ErrorCode.LEDGER_UNAVAILABLE)
                return
            except (LedgerError, msgspec.MsgspecError) as error:
                log.error("events cannot be replayed: %s", type(error).__name__)
                outbox.fail(ErrorCode.LEDGER_CORRUPT)
                return
        outbox.release(replay, [opened] if resync is None else [opened, resync])

    # --- life cycle -------------------------------------------------------------------------------

    def _check_clock(self) -> None:
        now = self._clock_s()
        life = self._lifecycle
        if (now - self._opened_at) * 1000 > life.max_duration_ms:
            raise SessionOver(ErrorCode.SESSION_EXPIRED, "the session reached its maxDuration")
        if (now - self._last_input_at) * 1000 > life.idle_timeout_ms:
            raise SessionOver(ErrorCode.SESSION_EXPIRED, "no input within idleTimeout")
        away = self._detached_at
        if away is not None and (now - away) * 1000 > life.disconnect_grace_ms:
            raise SessionOver(ErrorCode.SESSION_EXPIRED, "no client within disconnectGrace")
        refusing = self._durable.refuses_input
        if refusing and not self._told_refusing:
            self.publish(Failure(ErrorCode.LEDGER_UNAVAILABLE, "input is refused until it is back"))
        self._told_refusing = refusing

    async def _wind_up(self, ending: _Ending) -> None:
        """Stop the work, end the streams, give the lease back; in bounded time."""
        self.phase = Phase.ENDING
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self._work is not None:
                    self._work.cancel()
                    await asyncio.gather(self._work, return_exceptions=True)
                # Side by side: neither a stage nor a ledger that is away keeps the other waiting.
                outcomes = await asyncio.gather(
                    self._durable.end(ending.code) if ending.for_good else self._durable.release(),
                    self._runner.close(),
                    return_exceptions=True,
                )
            for failure in outcomes:
                if failure is not None:
                    raise failure
        except (TimeoutError, LedgerError) as error:
            log.warning("session ended without its last ledger entry: %s", type(error).__name__)
        except Exception:
            log.exception("session ended without its last ledger entry")
        finally:
            await self._keeper.stop()

    def _say_goodbye(self, ending: _Ending) -> None:
        """Nothing here can fail or wait: whoever waits for the end learns of it."""
        self.phase = Phase.ENDED
        self.ended_because = Closed(ending.code, ending.detail)
        if self._greeting is not None:
            self._greeting.cancel()
        if self._outbox is not None:
            last: list[Event] = [self.ended_because]
            if ending.code not in (ErrorCode.SESSION_ENDED, ErrorCode.LEASE_LOST):
                last.insert(0, Failure(ending.code, ending.detail))
            self._outbox.finish(last)
        self._mailbox.clear()
        self.ended.set()
        self._room.set()
