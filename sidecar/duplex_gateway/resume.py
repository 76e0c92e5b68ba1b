"""One call over any number of connections to its session: what the client has seen, what an owner
says of its input, what the next connection gets. Pure: no I/O, no clock.

Out: numbered events pass once, in order, without a gap. In: what is not durable yet is in `held`,
numbered commands are said to each owner until one has answered them; no sample is heard twice, and
none is missing.
"""

import sys
from collections import deque
from enum import StrEnum
from typing import Final

import msgspec

from duplex_gateway.budget import Account
from duplex_gateway.held import HeldInput, HeldLimits, HeldMessage, Room
from duplex_gateway.wire import (
    GATEWAY_ID_PREFIX,
    ClientMessage,
    Facts,
    Kind,
    ServerEvent,
    heartbeat_ack,
    read_server_event,
    with_client_id,
    with_error_id,
)
from duplex_sidecar.doors.openai_wire import MAX_MESSAGE_BYTES
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

KEPT_COMMANDS: Final = 64
"""Numbered commands without an answer; the oldest is let go of for a newer one."""
_SLOT_BYTES: Final = 16
"""About what it takes to keep a heartbeat, besides its id."""
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
        self._input = HeldInput(limits, account)
        self._last_sequence = last_sequence
        self._start_sequence = 0
        self._commands: dict[int, HeldMessage] = {}
        """Numbered commands that an owner has, or had, and has not answered, oldest first."""
        self._commands_again: deque[HeldMessage] = deque()
        self._heartbeats: deque[bytes | None] = deque()
        """Ids of those that the present owner has and has not answered, as UTF-8."""
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
        return self._input.held_bytes

    def room(self, *, sound: bool = True, memory_bytes: int = 0) -> Room:
        """Whether one more message may be taken. sound: it may carry audio, of which no more than
        so many seconds wait; of the others only bytes and messages count. memory_bytes: that it
        takes, of what all calls have together."""
        return self._input.room(
            sound=sound,
            memory_bytes=memory_bytes,
            connected=self.connected,
        )

    def takes_heartbeat(self, memory_bytes: int) -> bool:
        """Whether one more may be taken. It never waits for room; without an owner it is answered
        here, and not kept."""
        unanswered = len(self._heartbeats) + self._input.heartbeats
        return not self.connected or (
            unanswered < self._limits.heartbeats
            and self.room(sound=False, memory_bytes=memory_bytes) is not Room.NONE
        )

    def take(self, said: ClientMessage) -> list[bytes]:
        """A client's message, to be sent in its turn. Returns what answers it at once."""
        if said.kind is Kind.HEARTBEAT and not self.connected:
            return [heartbeat_ack(said.event_id)]
        self._input.take(said, self._name(said))
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
            self._input.start(facts)
            return []
        return self._input.go_on(facts, another=another)

    def lose(self) -> list[bytes]:
        """The connection is gone. Returns what the client waits for and may be told without it."""
        self.connected = False
        self._spoke_since_loss = self._input.says_anything
        acks: list[bytes] = []
        while self._heartbeats:
            event_id = self._heartbeat_over()
            acks.append(heartbeat_ack(None if event_id is None else event_id.decode()))
        for unsent in self._input.lose():
            acks.append(heartbeat_ack(unsent.said.event_id))
        return acks

    def next_message(self) -> bytes | None:
        """The next message for the owner, None when all are sent."""
        if not self.connected:
            return None
        if self._commands_again:
            number = self._commands_again[0].said.client_sequence or 0
            if self._input.is_in_order(number):
                return self._commands_again.popleft().message
        item = self._input.next()
        if item is None:
            return None
        if item.said.kind is Kind.COMMAND:
            self._keep_command(item)
        if item.said.kind is Kind.HEARTBEAT:
            self._keep_heartbeat(item.said.event_id)
        return item.message

    def _keep_command(self, item: HeldMessage) -> None:
        number = item.said.client_sequence
        if number is not None:
            self._command_over(number)
            self.account.change(item.memory_bytes)
            self._commands[number] = item
            while len(self._commands) > KEPT_COMMANDS:
                self._command_over(next(iter(self._commands)))

    def _keep_heartbeat(self, event_id: str | None) -> None:
        kept = None if event_id is None else event_id.encode()
        self._heartbeats.append(kept)
        self.account.change(_heartbeat_bytes(kept))

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
                self._input.committed(event.duplex.to_sample)
            case "session.updated":
                passing = self._answered(Kind.FORMAT)
            case "input_audio_buffer.cleared":
                passing = self._answered(Kind.CLEAR)
            case "session.command_applied":
                return self._applied(message, event)
            case "session.heartbeat_ack":
                if self._heartbeats:
                    self._heartbeat_over()
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
        return Pass.DROP if self._input.answered(kind) else Pass.FORWARD

    def _applied(self, message: bytes, event: ServerEvent) -> Verdict:
        """A numbered command is done: under the client's own name for it. A format is said to each
        owner, so that more than one tells of it."""
        name = event.client_event_id or ""
        item = self._command_over(event.duplex.client_sequence) or self._input.format_named(name)
        if item is not None and item.applied:
            return Verdict(Pass.DROP, message, event)
        if item is not None:
            item.applied = True
        if name.startswith(GATEWAY_ID_PREFIX):
            message = with_client_id(message, item.said.event_id if item else None)
        return Verdict(Pass.FORWARD, message, event)

    def _refused(self, message: bytes, event: ServerEvent) -> Verdict:
        """An error. What it refuses counts no more; what is refused only because the owner lets go
        of the session is kept for the next one, and the client need not know."""
        if is_farewell(event.error.code):
            self._spoke_since_loss = self._spoke_since_loss or event.error.event_id is not None
            return Verdict(Pass.HOLD, message, event)
        name = event.error.event_id
        if name is None or not name.startswith(GATEWAY_ID_PREFIX):
            return Verdict(Pass.FORWARD, message, event)
        item = self._forget_command(name) or self._input.forget(name)
        return Verdict(
            Pass.FORWARD, with_error_id(message, item.said.event_id if item else None), event
        )

    def _forget_command(self, name: str) -> HeldMessage | None:
        item = next((item for item in self._commands.values() if item.name == name), None)
        if item is not None and item.said.client_sequence is not None:
            self._command_over(item.said.client_sequence)
        return item

    # --- inside: what is kept aside -------------------------------------------------------------

    def _command_over(self, number: int) -> HeldMessage | None:
        """It is not kept any more, nor said again."""
        item = self._commands.pop(number, None)
        if item is not None:
            self.account.change(-item.memory_bytes)
            if item in self._commands_again:
                self._commands_again.remove(item)
        return item

    def _heartbeat_over(self) -> bytes | None:
        """The oldest one. Returns its id."""
        event_id = self._heartbeats.popleft()
        self.account.change(-_heartbeat_bytes(event_id))
        return event_id

    # --- inside: in -----------------------------------------------------------------------------

    def _name(self, said: ClientMessage) -> str | None:
        """The sidecar gets input under a name, so that its refusal is told from that of others."""
        if said.kind not in (Kind.APPEND, Kind.FORMAT, Kind.COMMAND):
            return None
        if said.size_bytes > MAX_MESSAGE_BYTES - _ROOM_TO_NAME_BYTES:
            return None
        self._names += 1
        return f"{GATEWAY_ID_PREFIX}{self._names}"


def _heartbeat_bytes(event_id: bytes | None) -> int:
    return sys.getsizeof(event_id) + _SLOT_BYTES


def is_farewell(code: str | None) -> bool:
    """Whether an error of that code closes the connection and the session goes on: elsewhere, or
    here for another connection."""
    try:
        entry = ERRORS[ErrorCode(code or "")]
    except ValueError:
        return False
    return entry.retryable and entry.close_code is not None
