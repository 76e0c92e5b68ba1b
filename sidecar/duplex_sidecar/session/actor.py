"""One conversation: a task, a mailbox, a phase. The only code that advances it.

Commands go in through the mailbox; one unit at a time runs beside the loop, so that a client can
attach, leave or close while a unit is under way. Whatever ends the session goes through `_end`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from duplex_api.resolve import ResolvedLifecycle
from duplex_sidecar.framing.errors import FramingError
from duplex_sidecar.framing.frames import read_frame
from duplex_sidecar.framing.pcm import AudioFormat, decode_audio
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.ledger.errors import LeaseLost, LedgerError, LedgerUnavailable
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
    InputFormatSet,
    ResyncRequired,
    Sequenced,
    SessionOpened,
    decode_sequenced,
)
from duplex_sidecar.session.conversation import Conversation, Speech
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionOver
from duplex_sidecar.session.framing_errors import framing_code
from duplex_sidecar.session.outbox import Outbox
from duplex_sidecar.session.unit import BadInput, UnitRunner

log = logging.getLogger(__name__)

MAILBOX_COMMANDS = 64
DEFAULT_INPUT_RATE_HZ = 24_000
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
class _FromClient:
    attachment: int
    command: Command


@dataclass(frozen=True)
class _Attach:
    attachment: int
    outbox: Outbox
    last_sequence: int | None


@dataclass(frozen=True)
class _Detach:
    attachment: int


@dataclass(frozen=True)
class _EndNow:
    code: ErrorCode
    detail: str


_Mail = _FromClient | _Attach | _Detach | _EndNow

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
        await self._actor.detach(self._number)


class SessionActor:
    def __init__(
        self,
        *,
        session: str,
        mode: str,
        conversation: Conversation,
        speech: Speech,
        framer: UnitFramer,
        runner: UnitRunner,
        durable: DurableSession,
        keeper: LeaseKeeper,
        ledger: Ledger,
        lifecycle: ResolvedLifecycle,
        frames_per_unit: int,
        recover: Recover | None,
    ) -> None:
        """frames_per_unit: 0 refuses camera frames. recover: None for a new session."""
        self.session = session
        self.phase = Phase.OPENING
        self._mode = mode
        self._conversation = conversation
        self._speech = speech
        self._framer = framer
        self._runner = runner
        self._durable = durable
        self._keeper = keeper
        self._ledger = ledger
        self._lifecycle = lifecycle
        self._frames_per_unit = frames_per_unit
        self._recover = recover
        self._mailbox: asyncio.Queue[_Mail] = asyncio.Queue(MAILBOX_COMMANDS)
        self._attachments = 0
        self._outbox: Outbox | None = None
        self._format = AudioFormat.PCM16
        self._rate_hz = conversation.framing.rate_hz or DEFAULT_INPUT_RATE_HZ
        self._unit_task: asyncio.Task[None] | None = None
        self._closing = False
        self._told_refusing = False
        now = time.monotonic()
        self._opened_at = self._last_input_at = now
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

    async def attach(self, last_sequence: int | None) -> ClientAttachment:
        """A new client; the one before is told that it was replaced. Events after `last_sequence`
        come first (None: none of the old ones)."""
        self._attachments += 1
        outbox = Outbox()
        attachment = ClientAttachment(self, self._attachments, outbox)
        await self._post(_Attach(self._attachments, outbox, last_sequence))
        return attachment

    async def submit(self, attachment: int, command: Command) -> None:
        """Waits while the mailbox is full. Raises ClientError (taken over, ended)."""
        if attachment != self._attachments:
            raise ClientError(ErrorCode.SESSION_TAKEN_OVER)
        await self._post(_FromClient(attachment, command))

    async def detach(self, attachment: int) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ClientError):
                await self._post(_Detach(attachment))

    async def end(self, code: ErrorCode, detail: str) -> None:
        """End from outside (the admin API, a shutdown). Returns when it is over."""
        with contextlib.suppress(ClientError):
            await self._post(_EndNow(code, detail))
        await self.ended.wait()

    async def _post(self, mail: _Mail) -> None:
        putting = asyncio.create_task(self._mailbox.put(mail))
        ending = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait({putting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if self.ended.is_set():
                raise ClientError(ErrorCode.SESSION_ENDED)
        finally:
            ending.cancel()
            if not putting.done():
                putting.cancel()

    # --- the one task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the session is over or another owner has it. Never raises."""
        try:
            await self._open()
            while True:
                self._start_unit()
                if self._closing and self._unit_task is None:
                    raise SessionOver(ErrorCode.SESSION_ENDED, "closed by the client")
                await self._wait()
        except SessionOver as over:
            await self._end(ErrorCode(over.code), over.detail, keep_ledger_open=False)
        except LeaseLost as error:
            log.info("session dropped: %s", error.reason)
            await self._end(ErrorCode.LEASE_LOST, "another replica runs the session", True)
        except LedgerError as error:
            log.error("session dropped: %s: %s", type(error).__name__, error)
            await self._end(ErrorCode.LEDGER_CORRUPT, f"{type(error).__name__}", True)
        except asyncio.CancelledError:
            await self._end(ErrorCode.LEASE_LOST, "the replica is shutting down", True)
            raise
        except Exception:
            log.exception("session failed")
            await self._end(ErrorCode.UNIT_FAILED, "internal error", keep_ledger_open=False)

    async def _open(self) -> None:
        if self._recover is not None:
            self._conversation, self._speech = await self._recover()
        self.phase = Phase.ACTIVE if self._conversation.seq else Phase.READY

    def _start_unit(self) -> None:
        if self._unit_task is None and self._framer.ready_units:
            self._unit_task = asyncio.create_task(self._run_unit())

    async def _run_unit(self) -> None:
        append = self._framer.take()
        if append is None:
            return
        try:
            after = await self._runner.run(self._conversation, self._speech, append)
        except BadInput as error:
            # Nothing of the append has entered any state. Its sound is good: it goes in without the
            # frames that cannot be decoded.
            self.publish(Failure(error.code, error.detail))
            append = self._framer.without_frames(append)
            after = await self._runner.run(self._conversation, self._speech, append)
        self._conversation, self._speech = after
        self.phase = Phase.ACTIVE

    async def _wait(self) -> None:
        """For mail, the unit under way, the lease, or the clock."""
        mail = asyncio.create_task(self._mailbox.get())
        lost = asyncio.create_task(self._keeper.wait_lost())
        unit = self._unit_task
        try:
            await asyncio.wait(
                [mail, lost] if unit is None else [mail, lost, unit],
                timeout=TICK_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if mail.done():
                await self._take(mail.result())
            if unit is not None and unit.done():
                self._unit_task = None
                unit.result()
            if lost.done():
                raise lost.result()
            self._check_clock()
        finally:
            mail.cancel()
            lost.cancel()

    async def _take(self, mail: _Mail) -> None:
        match mail:
            case _FromClient():
                if mail.attachment == self._attachments:
                    self._command(mail.command)
            case _Attach():
                await self._take_attach(mail)
            case _Detach():
                if mail.attachment == self._attachments and self._outbox is not None:
                    self._outbox = None
                    self._detached_at = time.monotonic()
            case _EndNow():
                raise SessionOver(mail.code, mail.detail)

    # --- commands ---------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        try:
            match command:
                case AppendInput():
                    self._append(command)
                case CommitInput():
                    self._framer.flush()
                case ClearInput():
                    self._framer.clear()
                    self.publish(InputCleared())
                case SetInputFormat():
                    self._set_format(command)
                case Heartbeat():
                    self.publish(Alive(command.event_id))
                case Close():
                    self._closing = True
        except FramingError as error:
            self._refuse(framing_code(error.code), error.reason, command)
        except ClientError as error:
            self._refuse(error.code, error.detail, command, error.param)

    def _refuse(
        self, code: ErrorCode, detail: str, command: Command, param: str | None = None
    ) -> None:
        self.publish(Failure(code, detail, param, command.event_id))

    def _append(self, command: AppendInput) -> None:
        if self._closing:
            raise ClientError(ErrorCode.OUT_OF_ORDER_EVENT, "input after session.close")
        if self._durable.refuses_input:
            raise ClientError(ErrorCode.LEDGER_UNAVAILABLE)
        if command.frames and len(command.frames) > self._frames_per_unit:
            raise ClientError(
                ErrorCode.TOO_MANY_FRAMES,
                f"this session takes {self._frames_per_unit} frames a second",
                "video_frames",
            )
        samples = decode_audio(command.audio, self._format)
        if command.from_sample is not None:
            held = self._framer.received_samples
            if command.from_sample > held:
                raise ClientError(
                    ErrorCode.OUT_OF_ORDER_EVENT,
                    f"samples {held} to {command.from_sample} are missing",
                    "from_sample",
                )
            samples = samples[held - command.from_sample :]
        frames = tuple(read_frame(frame) for frame in command.frames)
        self._framer.push(
            samples,
            self._rate_hz,
            frames,
            is_speech=command.is_speech,
            force_listen=command.force_listen,
        )
        self._last_input_at = time.monotonic()

    def _set_format(self, command: SetInputFormat) -> None:
        wanted = AudioFormat(command.encoding.value)
        if (wanted, command.rate_hz) != (self._format, self._rate_hz):
            if self._framer.received_samples and command.rate_hz != self._rate_hz:
                raise ClientError(
                    ErrorCode.IMMUTABLE_SETTING,
                    "the sample rate is fixed by the first input",
                    "session.audio.input.format.rate",
                )
            self._format, self._rate_hz = wanted, command.rate_hz
        self.publish(InputFormatSet(command.encoding, self._rate_hz))

    # --- attachments ------------------------------------------------------------------------------

    async def _take_attach(self, mail: _Attach) -> None:
        if self._outbox is not None:
            self._outbox.fail(ErrorCode.SESSION_TAKEN_OVER)
        self._outbox = mail.outbox
        self._detached_at = None
        opened = SessionOpened(
            session=self.session,
            resumed=self._conversation.seq > 0 or mail.last_sequence is not None,
            attachment=mail.attachment,
            next_unit=self._conversation.seq + 1,
            acknowledged_sample=self._acknowledged_sample(),
            last_sequence=self._speech.last_sequence,
            window_mode=self._mode,
            input_rate_hz=self._rate_hz,
        )
        replay: list[Sequenced] = []
        opening: list[Event] = [opened]
        if mail.last_sequence is not None:
            try:
                replay, resync = await self._replay(mail.last_sequence)
            except LedgerUnavailable:
                mail.outbox.fail(ErrorCode.LEDGER_UNAVAILABLE)
                return
            if resync is not None:
                opening.append(resync)
        mail.outbox.release(replay, opening)

    def _acknowledged_sample(self) -> int:
        """What has been received here is held or durable; a client on a new connection to the same
        replica goes on from there."""
        return self._framer.received_samples

    async def _replay(self, last: int) -> tuple[list[Sequenced], ResyncRequired | None]:
        replay: list[Sequenced] = []
        while True:
            found = await self._ledger.events_after(self.session, last)
            if found.resync_required:
                return replay, ResyncRequired(last, found.last_seq)
            replay += [decode_sequenced(event.event) for event in found.events]
            if not found.events or found.events[-1].seq >= found.last_seq:
                return replay, None
            last = found.events[-1].seq

    def publish(self, event: Event) -> None:
        """To the attached client, if there is one. Sequenced events are in the journal already."""
        if self._outbox is not None:
            self._outbox.put(event)

    # --- life cycle -------------------------------------------------------------------------------

    def _check_clock(self) -> None:
        now = time.monotonic()
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

    async def _end(self, code: ErrorCode, detail: str, keep_ledger_open: bool) -> None:
        self.phase = Phase.ENDING
        if self._unit_task is not None:
            self._unit_task.cancel()
            await asyncio.gather(self._unit_task, return_exceptions=True)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._runner.close()
                if keep_ledger_open:
                    await self._durable.release()
                else:
                    await self._durable.end(code)
        except (TimeoutError, LedgerError) as error:
            log.warning("session ended without its last ledger entry: %s", type(error).__name__)
        await self._keeper.stop()
        self.ended_because = Closed(code, detail)
        if code not in (ErrorCode.SESSION_ENDED, ErrorCode.LEASE_LOST):
            self.publish(Failure(code, detail))
        self.publish(self.ended_because)
        self.phase = Phase.ENDED
        self.ended.set()
        while not self._mailbox.empty():
            mail = self._mailbox.get_nowait()
            if isinstance(mail, _Attach):
                mail.outbox.fail(ErrorCode.SESSION_ENDED)
