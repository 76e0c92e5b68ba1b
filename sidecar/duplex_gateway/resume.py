"""One call over any number of connections to its session: what the client has seen, which of its
input nobody has made durable yet, what the next connection gets. Pure: no I/O, no clock.

Out: numbered events pass once, in order, without a gap. In: messages are kept until the ledger has
their samples, as positions in the session's own count of client samples. A new connection says how
far it has them; the rest is sent again as it was, the message in which that position lies with its
`from_sample`, so that no sample is heard twice and none is missing.
"""

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from duplex_gateway.budget import Account
from duplex_gateway.held import HeldLimits, HeldMessage, Room
from duplex_gateway.wire import (
    GATEWAY_ID_PREFIX,
    ClientMessage,
    Facts,
    InputFormat,
    Kind,
    Message,
    ServerEvent,
    cleared,
    heartbeat_ack,
    read_server_event,
    with_client_id,
    with_error_id,
)
from duplex_sidecar.doors.openai_wire import MAX_MESSAGE_BYTES
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

KEPT_COMMANDS: Final = 64
"""Numbered commands without an answer; the oldest is let go of for a newer one."""
_ROOM_TO_NAME_BYTES: Final = 256
"""A message that is nearly as large as may be is not made larger by a name."""


class Pass(StrEnum):
    """What becomes of a server's message."""

    FORWARD = "forward"
    DROP = "drop"
    HOLD = "hold"
    """It tells why the connection is about to end; whether the client has to know depends on how it
    ends."""
    BROKEN = "broken"
    """A number is missing: this connection cannot be gone on with."""


class Verdict(msgspec.Struct, frozen=True):
    """message: for the client; event: what was read of it."""

    passing: Pass
    message: bytes
    event: ServerEvent | None = None


class ResumeState:
    """Of one client connection. Nothing here waits."""

    def __init__(self, last_sequence: int | None, limits: HeldLimits, account: Account) -> None:
        """last_sequence: newest event that the client says it has seen; None: it wants those that
        come from now on. account: the call's, of what all calls keep together."""
        self.account = account
        self._limits = limits
        self._last_sequence = last_sequence
        self._start_sequence = 0
        self._position = 0
        """Of the session before the oldest message that is kept."""
        self._sent: deque[HeldMessage] = deque()
        """The present owner has it, or is about to; not durable yet."""
        self._waiting: deque[HeldMessage] = deque()
        """To be sent to the present or the next owner."""
        self._base: HeldMessage | None = None
        """What set the format in force before the oldest message that is kept."""
        self._base_format = InputFormat()
        self._newest_format = InputFormat()
        self._formats_first: deque[HeldMessage] = deque()
        """Have to be said on this connection before anything else: the one in force, behind those
        that the client has no answer to."""
        self._unanswered: dict[Kind, deque[HeldMessage]] = {
            Kind.FORMAT: deque(),
            Kind.CLEAR: deque(),
        }
        self._commands: dict[int, HeldMessage] = {}
        """Numbered commands that an owner has, or had, and has not answered, oldest first."""
        self._commands_again: deque[HeldMessage] = deque()
        self._heartbeats: deque[str | None] = deque()
        self._held_bytes = self._held_samples = 0
        self._there_bytes = self._there_samples = 0
        """Of what is held: known to this owner since it greeted. It may be durable long since, and
        no acknowledgement need come for it alone."""
        self._fence = 0
        self._names = 0
        self._spoke_since_loss = True
        self.connected = False
        self.greeted = False
        """There was a connection before: the next one is not the client's first."""

    # --- for the client's side ------------------------------------------------------------------

    @property
    def resume_from(self) -> int | None:
        """What a connection has to resume behind; None: the client's first, which does not."""
        if self._last_sequence is None:
            return self._start_sequence if self.greeted else None
        return self._last_sequence

    @property
    def wants_owner(self) -> bool:
        """The client has said something that a session which sleeps would have to hear."""
        return self._spoke_since_loss

    @property
    def fence(self) -> int:
        """Of the newest owner that there was a connection to; 0 before the first."""
        return self._fence

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def room(self, *, sound: bool = True, memory_bytes: int = 0) -> Room:
        """Whether one more message may be taken. sound: it may carry audio, of which no more than
        so many seconds wait; of the others only bytes and messages count. memory_bytes: that it
        takes, of what all calls have together."""
        if not self.account.fits(memory_bytes):
            return Room.NONE
        limits = self._limits
        held_bytes = self._held_bytes - self._there_bytes
        audio_s = (self._held_samples - self._there_samples) / self._newest_format.rate_hz
        messages = len(self._sent) + len(self._waiting) + len(self._heartbeats)
        if held_bytes >= limits.hard_bytes or messages >= 3 * limits.messages:
            return Room.NONE
        enough = held_bytes >= limits.bytes or messages >= 2 * limits.messages
        if (audio_s < limits.audio_s or not sound) and not enough:
            return Room.FREE
        due = audio_s >= limits.due_s or not self.connected
        return Room.SOON if due else Room.FREE

    def take(self, said: ClientMessage) -> list[bytes]:
        """A client's message, to be sent in its turn. Returns what answers it at once."""
        if said.kind is Kind.HEARTBEAT and not self.connected:
            return [heartbeat_ack(said.event_id)]
        item = HeldMessage(said, self._name(said), said.memory_bytes)
        if said.kind is Kind.APPEND:
            item.samples = self._newest_format.samples(max(0, said.payload_bytes))
        elif said.format is not None:
            self._newest_format = said.format
        self._waiting.append(item)
        self._held_bytes += said.size_bytes
        self._held_samples += item.samples
        self.account.change(item.memory_bytes)
        self._spoke_since_loss = True
        return []

    # --- for the owner's side -------------------------------------------------------------------

    def connect(self, fence: int, facts: Facts) -> list[bytes]:
        """A connection to the owner of that fence stands, and has greeted with these facts. Returns
        answers that the client is still owed and nobody else will give."""
        self.connected = True
        self._commands_again = deque(self._commands.values())
        another, self._fence = fence > self._fence, max(fence, self._fence)
        if not self.greeted:
            self.greeted = True
            self._start_sequence = facts.last_sequence
            self._position = facts.received_sample
            self._base_format = InputFormat(rate_hz=facts.input_rate_hz)
            self._reckon_samples()
            return []
        for item in self._waiting:
            item.cut_from = None
        # A ledger that was rewound: what is no longer kept is lost, the rest follows what is left.
        self._position = min(self._position, facts.received_sample)
        owed = self._skip_what_is_there(facts.received_sample)
        if another:
            # What a new owner has it has from the ledger.
            self._trim(facts.acknowledged_sample)
        self._there_bytes = sum(item.said.size_bytes for item in self._sent)
        self._there_samples = sum(item.samples for item in self._sent)
        return owed

    def lose(self) -> list[bytes]:
        """The connection is gone. Returns what the client waits for and may be told without it."""
        self.connected = False
        self._spoke_since_loss = any(i.said.kind is not Kind.HEARTBEAT for i in self._waiting)
        acks = [heartbeat_ack(event_id) for event_id in self._heartbeats]
        for item in [i for i in self._waiting if i.said.kind is Kind.HEARTBEAT]:
            acks.append(heartbeat_ack(item.said.event_id))
            self._waiting.remove(item)
            self._let_go(item)
        self._waiting = deque((*self._sent, *self._waiting))
        self._sent = deque()
        self._heartbeats.clear()
        self._formats_first.clear()
        self._there_bytes = self._there_samples = 0
        for unanswered in self._unanswered.values():
            unanswered.clear()
        return acks

    def next_message(self) -> Message | None:
        """The next message for the owner, None when all are sent."""
        if not self.connected:
            return None
        if self._commands_again and self._is_in_order(self._commands_again[0]):
            return self._commands_again.popleft().message
        if self._formats_first:
            first = self._formats_first.popleft()
            self._unanswered[Kind.FORMAT].append(first)
            return first.message
        if not self._waiting:
            return None
        item = self._waiting.popleft()
        kind = item.said.kind
        if kind is Kind.COMMAND:
            self._keep_command(item)
        if kind is Kind.HEARTBEAT:
            self._heartbeats.append(item.said.event_id)
        if kind in (Kind.HEARTBEAT, Kind.OTHER, Kind.COMMAND) or (
            kind is Kind.COMMIT and not self._closes_anything()
        ):
            self._let_go(item)
            return item.message
        if kind in self._unanswered:
            self._unanswered[kind].append(item)
        self._sent.append(item)
        return item.message

    def _is_in_order(self, command: HeldMessage) -> bool:
        """Numbers only grow at the owner: none may overtake a format that was said before it and
        has not been applied."""
        number = command.said.client_sequence or 0
        return not any(
            item.said.kind is Kind.FORMAT
            and not item.applied
            and (item.said.client_sequence or number) < number
            for item in (*self._formats_first, *self._waiting)
        )

    def _keep_command(self, item: HeldMessage) -> None:
        if item.said.client_sequence is not None:
            self._commands[item.said.client_sequence] = item
            while len(self._commands) > KEPT_COMMANDS:
                self._commands.pop(next(iter(self._commands)))

    def _closes_anything(self) -> bool:
        """Whether something is kept that a commit, sent now, makes durable; if not, nobody would
        ever say that the commit can be let go."""
        return bool(self._sent) and self._sent[-1].said.kind is not Kind.COMMIT

    def hear(self, message: bytes) -> Verdict:
        """A message of the present owner."""
        try:
            event = read_server_event(message)
        except (msgspec.DecodeError, UnicodeError):
            return Verdict(Pass.BROKEN, message)
        if event.server_event_seq is not None:
            return Verdict(self._numbered(event.server_event_seq), message, event)
        passing = Pass.FORWARD
        match event.type:
            case "input_audio_buffer.committed":
                self._trim(event.duplex.to_sample)
                self._there_bytes = self._there_samples = 0
            case "session.updated":
                passing = self._answered(Kind.FORMAT)
            case "input_audio_buffer.cleared":
                passing = self._answered(Kind.CLEAR)
            case "session.command_applied":
                return self._applied(message, event)
            case "session.heartbeat_ack":
                if self._heartbeats:
                    self._heartbeats.popleft()
            case "session.resync_required":
                self._last_sequence = event.duplex.oldest - 1
            case "session.closed":
                passing = Pass.HOLD
            case "error":
                return self._refused(message, event)
            case _:
                pass
        return Verdict(passing, message, event)

    # --- inside: out ----------------------------------------------------------------------------

    def _numbered(self, sequence: int) -> Pass:
        last = self._last_sequence
        if last is not None and sequence <= last:
            return Pass.DROP
        if last is not None and sequence > last + 1:
            return Pass.BROKEN
        self._last_sequence = sequence
        return Pass.FORWARD

    def _answered(self, kind: Kind) -> Pass:
        unanswered = self._unanswered[kind]
        if not unanswered:
            return Pass.FORWARD
        item = unanswered.popleft()
        passing = Pass.DROP if item.answered else Pass.FORWARD
        item.answered = True
        self._trim(self._position)
        return passing

    def _applied(self, message: bytes, event: ServerEvent) -> Verdict:
        """A numbered command is done: under the client's own name for it. A format is said to each
        owner, so that more than one tells of it."""
        name = event.client_event_id or ""
        item = self._commands.pop(event.duplex.client_sequence, None) or self._format_named(name)
        if item is not None and item.applied:
            return Verdict(Pass.DROP, message, event)
        if item is not None:
            item.applied = True
        if name.startswith(GATEWAY_ID_PREFIX):
            message = with_client_id(message, item.said.event_id if item else None)
        return Verdict(Pass.FORWARD, message, event)

    def _format_named(self, name: str) -> HeldMessage | None:
        formats = [item for item in self._sent if item.said.kind is Kind.FORMAT]
        if self._base is not None:
            formats.append(self._base)
        return next((item for item in formats if item.name is not None and item.name == name), None)

    def _refused(self, message: bytes, event: ServerEvent) -> Verdict:
        """An error. What it refuses counts no more; what is refused only because the owner lets go
        of the session is kept for the next one, and the client need not know."""
        if is_farewell(event.error.code):
            self._spoke_since_loss = self._spoke_since_loss or event.error.event_id is not None
            return Verdict(Pass.HOLD, message, event)
        name = event.error.event_id
        if name is None or not name.startswith(GATEWAY_ID_PREFIX):
            return Verdict(Pass.FORWARD, message, event)
        item = self._forget_command(name) or self._forget(name)
        return Verdict(
            Pass.FORWARD, with_error_id(message, item.said.event_id if item else None), event
        )

    def _forget_command(self, name: str) -> HeldMessage | None:
        item = next((item for item in self._commands.values() if item.name == name), None)
        if item is not None and item.said.client_sequence is not None:
            del self._commands[item.said.client_sequence]
        return item

    def _forget(self, name: str) -> HeldMessage | None:
        """A message that was refused: the session goes on as if it had never been sent."""
        item = next((item for item in self._sent if item.name == name), None)
        if item is None:
            return None
        self._sent.remove(item)
        self._let_go(item)
        if item in self._unanswered[Kind.FORMAT]:
            self._unanswered[Kind.FORMAT].remove(item)
            self._reckon_samples()
        self._trim(self._position)
        return item

    # --- inside: in -----------------------------------------------------------------------------

    def _name(self, said: ClientMessage) -> str | None:
        """The sidecar gets input under a name, so that its refusal is told from that of others."""
        if said.kind not in (Kind.APPEND, Kind.FORMAT, Kind.COMMAND):
            return None
        if said.size_bytes > MAX_MESSAGE_BYTES - _ROOM_TO_NAME_BYTES:
            return None
        self._names += 1
        return f"{GATEWAY_ID_PREFIX}{self._names}"

    def _items(self) -> Iterable[HeldMessage]:
        yield from self._sent
        yield from self._waiting

    def _reckon_samples(self) -> None:
        """Of all that is kept, after a change of a format before it."""
        current = self._base_format
        self._held_samples = 0
        for item in self._items():
            if item.said.format is not None:
                current = item.said.format
            elif item.said.kind is Kind.APPEND:
                item.samples = current.samples(max(0, item.said.payload_bytes))
                self._held_samples += item.samples
        self._newest_format = current

    def _let_go(self, item: HeldMessage) -> None:
        self._held_bytes -= item.said.size_bytes
        self._held_samples -= item.samples
        self.account.change(-item.memory_bytes)

    def _trim(self, durable_sample: int) -> None:
        """Let go of what is durable, and of what stands before it and has been answered."""
        while self._sent and self._is_done(self._sent[0], durable_sample):
            item = self._sent.popleft()
            self._let_go(item)
            self._position = item.end(self._position) if item.has_samples else self._position
            if item.said.format is not None:
                self._base, self._base_format = item, item.said.format

    def _is_done(self, item: HeldMessage, durable_sample: int) -> bool:
        match item.said.kind:
            case Kind.APPEND:
                end = item.end(self._position)
                # Frames alone belong to the sample that comes next.
                return end <= durable_sample and self._position < durable_sample
            case Kind.COMMIT:
                return self._position <= durable_sample
            case Kind.FORMAT | Kind.CLEAR:
                return item.answered
            case _:
                return False

    def _skip_what_is_there(self, received_sample: int) -> list[bytes]:
        """Do not send again what the owner has; it may not be durable, so it is kept. What stands
        exactly at the owner's position may be there or not, and does no harm twice."""
        position = self._position
        formats = [self._base] if self._base is not None else []
        owed: list[bytes] = []
        while self._waiting:
            item = self._waiting[0]
            before = position < received_sample
            end = item.end(position) if item.has_samples else position
            match item.said.kind:
                case Kind.APPEND | Kind.COMMIT if before and end <= received_sample:
                    position = end
                case Kind.CLEAR if before:
                    if not item.answered:
                        owed.append(cleared())
                        item.answered = True
                case Kind.FORMAT if before or item.answered:
                    formats = [*(each for each in formats if not each.answered), item]
                case _:
                    break
            self._sent.append(self._waiting.popleft())
        self._formats_first = deque(formats)
        if self._waiting:
            first = self._waiting[0]
            if position < received_sample and first.said.from_sample is None:
                first.cut_from = position
        else:
            self._position += received_sample - position
        return owed


def is_farewell(code: str | None) -> bool:
    """Whether an error of that code closes the connection and the session goes on: elsewhere, or
    here for another connection."""
    try:
        entry = ERRORS[ErrorCode(code or "")]
    except ValueError:
        return False
    return entry.retryable and entry.close_code is not None
