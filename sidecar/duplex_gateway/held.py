"""What is kept of a client's input until it is durable, and how much of it. Pure.

Messages are kept until the ledger has their samples, as positions in the session's own count of
client samples. An owner says how far it has them; the rest is sent again as it was, the message in
which that position lies with its `from_sample`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from duplex_gateway.budget import Account
from duplex_gateway.wire import (
    ClientMessage,
    Facts,
    InputFormat,
    Kind,
    cleared,
    with_fields,
)


class HeldLimits(msgspec.Struct, frozen=True):
    """What is kept of input that is not durable yet. audio_s, bytes, messages: beyond them nothing
    more is read for now. due_s: with so much audio on its way an acknowledgement is sure to come,
    a unit being one second. hard_bytes: beyond them input is refused in any case. heartbeats:
    without an answer; one more is refused."""

    audio_s: float = 10.0
    due_s: float = 2.0
    bytes: int = 16 * 1024 * 1024
    hard_bytes: int = 32 * 1024 * 1024
    messages: int = 4096
    heartbeats: int = 256


class Room(StrEnum):
    FREE = "free"
    SOON = "soon"
    """An acknowledgement is due, or the next owner's greeting; it makes room."""
    NONE = "none"


@dataclass(eq=False, slots=True)
class HeldMessage:
    """name: the event id under which the sidecar gets it. memory_bytes: as it was taken; writing
    its id can make that larger. cut_from: position of its first sample, where the owner has that
    sample already. answered: the client has the answer. applied: it was
    told, too, that the message's number is."""

    said: ClientMessage
    name: str | None
    memory_bytes: int
    samples: int = 0
    cut_from: int | None = None
    answered: bool = False
    applied: bool = False

    @property
    def has_samples(self) -> bool:
        return self.said.kind is Kind.APPEND

    @property
    def message(self) -> bytes:
        fields: dict[str, object] = {}
        if self.name is not None:
            fields["event_id"] = self.name
        if self.cut_from is not None:
            fields["from_sample"] = self.cut_from
        return with_fields(self.said.message, **fields) if fields else self.said.message

    def end(self, position: int) -> int:
        """Position behind this message if the session stands at `position` before it."""
        start = self.said.from_sample
        if start is None:
            return position + self.samples
        if start > position:
            return position  # a gap: the session refuses it
        return max(position, start + self.samples)


class HeldInput:
    """Of one call, over any number of owners."""

    def __init__(self, limits: HeldLimits, account: Account) -> None:
        self.account = account
        self._limits = limits
        self._position = 0
        """Of the session before the oldest message that is kept."""
        self._sent: deque[HeldMessage] = deque()
        """The present owner has it, or is about to; not durable yet."""
        self._waiting: deque[HeldMessage] = deque()
        """To be sent to the present or the next owner."""
        self._base: HeldMessage | None = None
        """What set the format in force before the oldest message that is kept. Kept, too, and the
        account has it; it stands for none of the input that is not durable."""
        self._base_format = InputFormat()
        self._newest_format = InputFormat()
        self._formats_first: deque[HeldMessage] = deque()
        """Have to be said on this connection before anything else: the one in force, behind those
        that the client has no answer to."""
        self._unanswered: dict[Kind, deque[HeldMessage]] = {
            Kind.FORMAT: deque(),
            Kind.CLEAR: deque(),
        }
        self._held_bytes = self._held_samples = 0
        self._heartbeats = 0
        """Of those that wait."""
        self._there_bytes = self._there_samples = 0
        """Of what is held: known to this owner since it greeted. It may be durable long since, and
        no acknowledgement need come for it alone."""

    # --- from the client ------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def heartbeats(self) -> int:
        """That have not been sent."""
        return self._heartbeats

    def room(self, *, sound: bool, memory_bytes: int, connected: bool) -> Room:
        """Whether one more message may be taken. As for `ResumeState.room`."""
        if not self.account.fits(memory_bytes):
            return Room.NONE
        limits = self._limits
        held_bytes = self._held_bytes - self._there_bytes
        audio_s = (self._held_samples - self._there_samples) / self._newest_format.rate_hz
        messages = len(self._sent) + len(self._waiting)
        if held_bytes >= limits.hard_bytes or messages >= 3 * limits.messages:
            return Room.NONE
        enough = held_bytes >= limits.bytes or messages >= 2 * limits.messages
        if (audio_s < limits.audio_s or not sound) and not enough:
            return Room.FREE
        due = audio_s >= limits.due_s or not connected
        return Room.SOON if due else Room.FREE

    def take(self, said: ClientMessage, name: str | None) -> None:
        """A message, to be sent in its turn under that name."""
        item = HeldMessage(said, name, said.memory_bytes)
        if said.kind is Kind.APPEND:
            item.samples = self._newest_format.samples(max(0, said.payload_bytes))
        elif said.format is not None:
            self._newest_format = said.format
        self._waiting.append(item)
        self._held_bytes += said.size_bytes
        self._held_samples += item.samples
        self._heartbeats += said.kind is Kind.HEARTBEAT
        self.account.change(item.memory_bytes)

    # --- to the owner ---------------------------------------------------------------------------

    @property
    def says_anything(self) -> bool:
        """Whether something waits that is no heartbeat."""
        return any(item.said.kind is not Kind.HEARTBEAT for item in self._waiting)

    def start(self, facts: Facts) -> None:
        """The first owner has greeted with these facts."""
        self._position = facts.received_sample
        self._base_format = InputFormat(rate_hz=facts.input_rate_hz)
        self._reckon_samples()

    def go_on(self, facts: Facts, *, another: bool) -> list[bytes]:
        """An owner has greeted again. another: than the one before. Returns answers that the client
        is still owed and nobody else will give."""
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

    def lose(self) -> list[HeldMessage]:
        """The owner is gone. Returns heartbeats that nobody needs to hear any more."""
        heartbeats = [item for item in self._waiting if item.said.kind is Kind.HEARTBEAT]
        for item in heartbeats:
            self._waiting.remove(item)
            self._let_go(item)
        self._waiting = deque((*self._sent, *self._waiting))
        self._sent = deque()
        self._formats_first.clear()
        self._there_bytes = self._there_samples = 0
        for unanswered in self._unanswered.values():
            unanswered.clear()
        return heartbeats

    def is_in_order(self, number: int) -> bool:
        """Whether a command of that number may be said now. Numbers only grow at the owner: none
        may overtake a format that was said before it and has not been applied."""
        return not any(
            item.said.kind is Kind.FORMAT
            and not item.applied
            and (item.said.client_sequence or number) < number
            for item in (*self._formats_first, *self._waiting)
        )

    def next(self) -> HeldMessage | None:
        """The next message in turn, None when all are sent. What is kept no longer is given back to
        the account."""
        if self._formats_first:
            first = self._formats_first.popleft()
            self._unanswered[Kind.FORMAT].append(first)
            return first
        if not self._waiting:
            return None
        item = self._waiting.popleft()
        kind = item.said.kind
        if kind in (Kind.HEARTBEAT, Kind.OTHER, Kind.COMMAND) or (
            kind is Kind.COMMIT and not self._closes_anything()
        ):
            self._let_go(item)
            return item
        if kind in self._unanswered:
            self._unanswered[kind].append(item)
        self._sent.append(item)
        return item

    def _closes_anything(self) -> bool:
        """Whether something is kept that a commit, sent now, makes durable; if not, nobody would
        ever say that the commit can be let go."""
        return bool(self._sent) and self._sent[-1].said.kind is not Kind.COMMIT

    # --- what the owner says of it --------------------------------------------------------------

    def committed(self, to_sample: int) -> None:
        """It is durable up to there."""
        self._trim(to_sample)
        self._there_bytes = self._there_samples = 0

    def answered(self, kind: Kind) -> bool:
        """The oldest format or clear without an answer has one. Returns whether the client has had
        it already."""
        unanswered = self._unanswered[kind]
        if not unanswered:
            return False
        item = unanswered.popleft()
        had, item.answered = item.answered, True
        self._trim(self._position)
        return had

    def format_named(self, name: str) -> HeldMessage | None:
        formats = [item for item in self._sent if item.said.kind is Kind.FORMAT]
        if self._base is not None:
            formats.append(self._base)
        return next((item for item in formats if item.name is not None and item.name == name), None)

    def forget(self, name: str) -> HeldMessage | None:
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

    # --- inside ---------------------------------------------------------------------------------

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
        self._heartbeats -= item.said.kind is Kind.HEARTBEAT
        self.account.change(-item.memory_bytes)

    def _trim(self, durable_sample: int) -> None:
        """Let go of what is durable, and of what stands before it and has been answered."""
        while self._sent and self._is_done(self._sent[0], durable_sample):
            item = self._sent.popleft()
            self._let_go(item)
            self._position = item.end(self._position) if item.has_samples else self._position
            if item.said.format is not None:
                self._set_base(item, item.said.format)

    def _set_base(self, item: HeldMessage, its_format: InputFormat) -> None:
        before_bytes = 0 if self._base is None else self._base.memory_bytes
        self.account.change(item.memory_bytes - before_bytes)
        self._base, self._base_format = item, its_format

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
