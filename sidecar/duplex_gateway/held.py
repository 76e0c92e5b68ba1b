"""What is kept of a client's input until it is durable, and how much of it. Pure."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from duplex_gateway.wire import ClientMessage, Kind, Message, with_fields


class HeldLimits(msgspec.Struct, frozen=True):
    """What is kept of input that is not durable yet. audio_s, bytes, messages: beyond them nothing
    more is read for now. due_s: with so much audio on its way an acknowledgement is sure to come,
    a unit being one second. hard_bytes: beyond them input is refused in any case."""

    audio_s: float = 10.0
    due_s: float = 2.0
    bytes: int = 16 * 1024 * 1024
    hard_bytes: int = 32 * 1024 * 1024
    messages: int = 4096


class Room(StrEnum):
    FREE = "free"
    SOON = "soon"
    """An acknowledgement is due, or the next owner's greeting; it makes room."""
    NONE = "none"


@dataclass(eq=False, slots=True)
class HeldMessage:
    """name: the event id under which the sidecar gets it. memory_bytes: as it was taken; reading a
    text can make it larger. cut_from: position of its first sample,
    where the owner has that sample already. answered: the client has the answer. applied: it was
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
    def message(self) -> Message:
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
