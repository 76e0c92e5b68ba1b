"""One conversation: a task, a mailbox, a phase. The only code that advances it.

One piece of work at a time (a recovery, then unit after unit) runs beside the loop, so that a
client can attach, leave or close while it is under way. Whatever ends the session goes through
`run`, which always gets to its last line: nobody waits for a session that is no more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum

from duplex_api.resolve import ResolvedLifecycle
from duplex_sidecar.ledger.lease import Lease, LeaseKeeper
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Event, Failure, InputAccepted, Sequenced, SessionOpened
from duplex_sidecar.session.client_commands import CommandDesk
from duplex_sidecar.session.clients import ClientAttachment, Clients
from duplex_sidecar.session.conversation import Conversation, Speech
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.ending import MOVED, SHUT_DOWN, Ending, ending_of, wind_up
from duplex_sidecar.session.greeting import greet
from duplex_sidecar.session.input import InputDesk
from duplex_sidecar.session.outbox import Outbox
from duplex_sidecar.session.parking import Standing
from duplex_sidecar.session.passing_on import PassingOn
from duplex_sidecar.session.quality import SessionQuality
from duplex_sidecar.session.sorting import MailSorter
from duplex_sidecar.session.unit import BadInput, UnitRunner
from duplex_sidecar.session.warming import WarmStreams
from duplex_sidecar.session.wishes import Wishes

TICK_S = 0.25


class Phase(StrEnum):
    """opening: not yet recovered. ready: no unit yet. active: units flow. ending, ended."""

    OPENING = "opening"
    READY = "ready"
    ACTIVE = "active"
    ENDING = "ending"
    ENDED = "ended"


Recover = Callable[[], Awaitable[tuple[Conversation, Speech]]]
"""Brings the streams back and runs what a lost owner left unfinished."""


class SessionActor:
    def __init__(
        self,
        *,
        session: str,
        mode: str,
        conversation: Conversation,
        speech: Speech,
        desk: InputDesk,
        commands: CommandDesk,
        runner: UnitRunner,
        durable: DurableSession,
        keeper: LeaseKeeper,
        ledger: Ledger,
        lifecycle: ResolvedLifecycle,
        recover: Recover | None,
        clock_s: Callable[[], float],
        age_s: float,
        trace_id: Callable[[], str],
    ) -> None:
        """recover: None for a new session. age_s: since the session was opened, here or
        elsewhere. trace_id: of the session's trace now."""
        self.session = session
        self.phase = Phase.READY if recover is None else Phase.OPENING
        self.quality = SessionQuality(trace_id)
        self.lifecycle = lifecycle
        self.on_change: Callable[[], None] = lambda: None
        """Called when the phase, or whether a client is connected, has changed."""
        self._mode = mode
        self._conversation = conversation
        self._speech = speech
        self._desk = desk
        self.runner = runner
        self._commands = commands
        self._durable = durable
        self._keeper = keeper
        self._ledger = ledger
        self._recover = recover
        self._is_first_owner = recover is None
        self._clock_s = clock_s
        self._wake = asyncio.Event()
        """Something waits for the loop: a command, work that is done, a wish to end."""
        self._recovered = asyncio.Event()
        self._clients = Clients(
            session, desk, clock_s, self._wake.set, on_change=lambda: self.on_change()
        )
        self.wishes = Wishes(clock_s, self._wake.set)
        self.passing_on = PassingOn(durable, keeper, clock_s, self._wake.set)
        self._mail = MailSorter(self._clients, desk, commands, durable, clock_s, self.publish)
        self._work: asyncio.Task[None] | None = None
        self._commands_went = False
        """They were let before a unit that waits."""
        self._accepted_sample = 0
        self._told_sequence = speech.last_sequence
        """Of the newest event; ahead of `_speech` while the work that gave it goes on."""
        self._opened_at = clock_s() - age_s
        self._without_ledger_at = float("-inf")
        """When it was away last: input is refused then, and nobody finds the way here."""
        self.ended = asyncio.Event()
        self.ending: Ending | None = None
        """Once it has ended: how."""
        self.left_warm: WarmStreams | None = None
        """Once it was handed over: what stands here still, as does all else of `runner`."""

    # --- for doors and the registry ---------------------------------------------------------------

    @property
    def conversation(self) -> Conversation:
        """The last committed state."""
        return self._conversation

    @property
    def attached(self) -> bool:
        """Whether a client is connected."""
        return self._clients.attached

    @property
    def speech(self) -> Speech:
        return self._speech

    @property
    def lease(self) -> Lease:
        return self._keeper.lease

    @property
    def ledger_answers(self) -> bool:
        """Whether the lease is confirmed: what happens now is durable."""
        return self._keeper.held and not self._durable.refuses_input

    @property
    def keeping_pace(self) -> bool:
        """Whether the last unit took less time than it covers, and none is under way for longer."""
        return self.quality.keeping_pace and not self.runner.lateness.late

    @property
    def holds_lease(self) -> bool:
        """Whether the ledger has confirmed it of late; without that nothing leaves, nor parks."""
        return self._keeper.held

    @property
    def leaving(self) -> bool:
        """It is over here, or about to be: nothing is taken any more."""
        return self.phase in (Phase.ENDING, Phase.ENDED)

    def attach(
        self, last_sequence: int | None, on_message: Callable[[], None] = lambda: None
    ) -> ClientAttachment:
        """A new client; the one before is told that it was replaced, and what it said and nobody
        has heard yet is dropped. Events after `last_sequence` come first (None: none of the old
        ones). on_message: as in `ClientAttachment`. Raises ClientError when the session is over."""
        before = self._told_sequence  # what comes from here on, it gets

        def greeting(outbox: Outbox, number: int) -> Coroutine[None, None, None]:
            return self._greet(outbox, number, last_sequence, before)

        return self._clients.attach(greeting, on_message)

    async def end(self, ending: Ending) -> None:
        """From outside. Returns when it is over."""
        self.wishes.end(ending)
        await self.ended.wait()

    def publish(self, event: Event) -> None:
        """To the attached client, if there is one. Sequenced events are in the journal already."""
        if isinstance(event, InputAccepted):
            self._accepted_sample = event.to_sample
        if isinstance(event, Sequenced):
            self._told_sequence = event.sequence
            if self.attached:
                self.quality.saw(event, self._clock_s())
        self._clients.publish(event)

    # --- the one task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the session is over or another owner has it. Raises nothing but a cancellation,
        after which nothing is left to do either."""
        ending = SHUT_DOWN
        try:
            ending = await self._wind_up(await self._until_over())
        except asyncio.CancelledError:
            await self._wind_up(SHUT_DOWN)
            raise
        finally:
            self._say_goodbye(ending)

    async def _until_over(self) -> Ending:
        try:
            if self._recover is not None:
                self._start(self._run_recovery(self._recover))
                self._recover = None  # it holds the whole session as it was loaded
            else:
                self._opened()
            while True:
                self._look_after_work()
                if self.runner.lateness.look():
                    self.on_change()
                if self.passing_on.granted and self._work is None:
                    return MOVED
                if self.wishes.ending is not None and not self.passing_on.granted:
                    return self.wishes.ending
                if self._keeper.lost_because is not None:
                    raise self._keeper.lost_because
                self._mail.sort()
                if self.passing_on.grant(self._standing()):
                    self._start(self.passing_on.run())
                if not self.passing_on.granted:
                    judged = self.wishes.verdict(self.lifecycle, self._standing())
                    if judged is not None:
                        return judged
                self._start_next()
                if self._work is None and self._mail.closing:
                    return Ending(ErrorCode.SESSION_ENDED, "closed by the client", for_good=True)
                self._mail.tell_of_ledger()
                await self._rest()
        except Exception as error:
            return ending_of(error)

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

    def _start_next(self) -> None:
        """Commands go first, but never twice before a unit that waits: a client that floods them
        holds up nothing."""
        if self._work is not None:
            return
        unit_waits = self._desk.has_unit
        if self._commands.waiting and not (unit_waits and self._commands_went):
            self._commands_went = unit_waits
            self._start(self._run_commands())
        elif unit_waits:
            self._commands_went = False
            self._start(self._run_unit())

    def _look_after_work(self) -> None:
        """Raises what the work under way ended with."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            self._durable.caught_up()
            work.result()

    async def _run_recovery(self, recover: Recover) -> None:
        self._conversation, self._speech = await recover()
        self._opened()

    def _opened(self) -> None:
        self._become(Phase.ACTIVE if self._conversation.seq else Phase.READY)
        self._recovered.set()

    async def _run_unit(self) -> None:
        append = self._desk.take()
        if append is None:
            return
        try:
            after = await self.runner.run(self._conversation, self._speech, append)
        except BadInput as error:
            # Nothing of the append has entered any state. Its sound is good: it goes in without the
            # frames that cannot be decoded.
            self.publish(Failure(error.code, error.detail))
            append = self._desk.without_frames(append)
            after = await self.runner.run(self._conversation, self._speech, append)
        self._conversation, self._speech = after
        if self.phase is Phase.READY:
            self._become(Phase.ACTIVE)

    async def _run_commands(self) -> None:
        self._conversation, self._speech = await self._commands.run(
            self._conversation, self._speech
        )
        self.on_change()

    # --- attachments ------------------------------------------------------------------------------

    async def _greet(
        self, outbox: Outbox, attachment: int, last_sequence: int | None, before: int
    ) -> None:
        await self._recovered.wait()
        opened = SessionOpened(
            session=self.session,
            resumed=self._conversation.seq > 0 or last_sequence is not None,
            attachment=attachment,
            next_unit=self._conversation.seq + 1,
            acknowledged_sample=max(
                self._accepted_sample, self._conversation.framing.received_samples
            ),
            received_sample=self._desk.received_samples,
            last_sequence=before if last_sequence is None else self._told_sequence,
            window_mode=self._mode,
            input_rate_hz=self._desk.rate_hz,
            client_sequence=self._commands.last_applied,
        )
        # Behind a takeover nobody knows what the owner before had said: if the ledger has lost it,
        # a client's word is all there is, and a wrong one looks like a right one.
        ever = self._told_sequence if self._is_first_owner else None
        if await greet(outbox, self._ledger, opened, last_sequence, ever):
            self.quality.ledger_rewound = True
            self.on_change()

    # --- life cycle -------------------------------------------------------------------------------

    def _become(self, phase: Phase) -> None:
        self.phase = phase
        self.on_change()

    def _standing(self) -> Standing:
        """Silence counts from when the ledger answers again."""
        now_s, detached_s = self._clock_s(), self._clients.detached_s
        if not self.ledger_answers:
            self._without_ledger_at = now_s
        back_s = self._without_ledger_at
        return Standing(
            now_s=now_s,
            opened_s=self._opened_at,
            last_input_s=max(self._mail.last_input_s, back_s),
            attached_s=self._clients.attached_s,
            detached_s=None if detached_s is None else max(detached_s, back_s),
            turn_open=self._speech.turn_open,
            between_units=self._work is None
            and self._keeper.held
            and not self._mail.closing
            and not self._commands.waiting,
        )

    async def _wind_up(self, ending: Ending) -> Ending:
        self._become(Phase.ENDING)
        try:
            if ending.moves:
                self._say_goodbye(ending)  # first: the client goes on elsewhere
                self.left_warm = await self.runner.part()
                return ending
            return await wind_up(
                ending, self._work, self._durable, self._keeper, self.runner, self.wishes.told_to_go
            )
        finally:
            await self._keeper.stop()

    def _say_goodbye(self, ending: Ending) -> None:
        """Nothing here can fail or wait: whoever waits for the end learns of it. Said once."""
        if self.ending is not None:
            return
        self.phase = Phase.ENDED
        self.ending = ending
        self._clients.finish(ending)
        self.ended.set()
