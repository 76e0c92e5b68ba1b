"""Numbers that a client gives its commands, so that sending one again does nothing twice. Pure.

Numbers grow over all connections of a session; they may skip. The ledger keeps the last ones that
were applied, each with a fingerprint of its command, in the same write as what the command changed:
whoever runs the session next knows them. A command that was refused has changed nothing and leaves
no number behind.
"""

from enum import StrEnum

import msgspec

KEPT_COMMANDS = 32
"""A client has no more commands on their way than wait in a session's mailbox; it need not send
again what the greeting says is applied."""


class Turnout(StrEnum):
    """What becomes of a numbered command."""

    NEW = "new"
    AGAIN = "again"
    """It was applied already: the client is told so, and nothing happens."""
    BEHIND = "behind"
    """A later one was applied, and this one was not: it never will be."""
    FORGOTTEN = "forgotten"
    """Older than what is kept."""
    OTHER = "other"
    """Another command was applied under this number."""


class AppliedCommand(msgspec.Struct, frozen=True):
    number: int
    fingerprint: str


class ClientRecord(msgspec.Struct, frozen=True):
    """The last commands that were applied, oldest first."""

    applied: tuple[AppliedCommand, ...] = ()

    @property
    def last(self) -> int:
        """0: none yet."""
        return self.applied[-1].number if self.applied else 0

    def judge(self, command: AppliedCommand) -> Turnout:
        """Whether it is to be applied now."""
        if command.number > self.last:
            return Turnout.NEW
        if command.number < self.applied[0].number:
            return Turnout.FORGOTTEN
        for known in self.applied:
            if known.number == command.number:
                return Turnout.AGAIN if known == command else Turnout.OTHER
        return Turnout.BEHIND

    def then(self, command: AppliedCommand) -> "ClientRecord":
        """With one that is new, and is now applied."""
        if command.number <= self.last:
            raise ValueError(f"command {command.number} after {self.last}")
        return ClientRecord((*self.applied, command)[-KEPT_COMMANDS:])


def encode_client_record(record: ClientRecord) -> str:
    """One line of text, as the ledger's meta keeps it."""
    return " ".join(f"{one.number}:{one.fingerprint}" for one in record.applied)


def decode_client_record(stored: str) -> ClientRecord:
    """Raises ValueError."""
    pairs = (word.partition(":") for word in stored.split())
    return ClientRecord(tuple(AppliedCommand(int(number), name) for number, _, name in pairs))
