"""A history by session: what each rule reads."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from duplex_sidecar.history.observations import (
    RESTORED,
    ChainWrite,
    ClientWrite,
    Command,
    Frame,
    Happening,
    JournalWrite,
    LedgerEnd,
    Observation,
    Reference,
    Run,
    StageChunk,
)
from duplex_sidecar.ledger.export import Line


@dataclass(frozen=True)
class Chained:
    """A write of the chain that the server confirmed; its first confirmation."""

    command: Command
    write: ChainWrite
    executed_ns: int


@dataclass(frozen=True)
class Journaled:
    command: Command
    write: JournalWrite
    executed_ns: int


@dataclass
class SessionHistory:
    """restored_ns: when the server went back to an older state; what was confirmed before belongs
    to another era than what comes after."""

    session: str
    run: Run
    restored_ns: Sequence[int]
    commands: list[Command] = field(default_factory=list[Command])
    frames: list[Frame] = field(default_factory=list[Frame])
    chunks: list[StageChunk] = field(default_factory=list[StageChunk])
    ledger: LedgerEnd | None = None
    reference: Reference | None = None

    def era(self, at_ns: int) -> int:
        return bisect_right(self.restored_ns, at_ns)

    @cached_property
    def last_era(self) -> int:
        return len(self.restored_ns)

    def precedes_the_look(self, at_ns: int) -> bool:
        """Whether what was done by then has to be in the ledger that was looked at."""
        return self.ledger is not None and not 0 < self.ledger.at_ns < at_ns

    @cached_property
    def lines(self) -> list[Line]:
        """The exported ledger. Raises msgspec.MsgspecError."""
        lines = self.ledger.lines if self.ledger else ()
        return [msgspec.json.decode(line, type=Line) for line in lines]

    @cached_property
    def chained(self) -> list[Chained]:
        """Each confirmed write of the chain once, by the time of its first confirmation."""
        found: dict[tuple[int, str], Chained] = {}
        for command in self.executed:
            write, at_ns = command.write, command.executed_ns
            if command.done and isinstance(write, ChainWrite) and at_ns is not None:
                key = (self.era(at_ns), write.hash)
                found.setdefault(key, Chained(command, write, at_ns))
        return list(found.values())

    @cached_property
    def journaled(self) -> list[Journaled]:
        found: dict[tuple[int, str | None, int], Journaled] = {}
        for command in self.executed:
            write, at_ns = command.write, command.executed_ns
            if isinstance(write, ChainWrite):
                write = write.journaled
            if command.done and isinstance(write, JournalWrite) and at_ns is not None:
                key = (self.era(at_ns), command.operation, write.first_sequence)
                found.setdefault(key, Journaled(command, write, at_ns))
        return list(found.values())

    @cached_property
    def client_writes(self) -> list[Command]:
        """Confirmed writes that say what a client's commands did, by the time of confirmation."""
        return [
            command
            for command in self.executed
            if command.done
            and (
                isinstance(command.write, ClientWrite)
                or (isinstance(command.write, ChainWrite) and command.write.journaled is not None)
            )
        ]

    @cached_property
    def executed(self) -> list[Command]:
        """Commands with an answer, by the time of the answer."""
        answered = [command for command in self.commands if command.executed_ns is not None]
        return sorted(answered, key=lambda command: command.executed_ns or 0)

    @cached_property
    def down(self) -> list[Frame]:
        """What servers said, in order of time."""
        return sorted((f for f in self.frames if f.down), key=lambda frame: frame.at_ns)

    @cached_property
    def connections(self) -> dict[tuple[str, int], list[Frame]]:
        """Frames by client and connection, in order of time."""
        found: dict[tuple[str, int], list[Frame]] = {}
        for frame in sorted(self.frames, key=lambda frame: frame.at_ns):
            found.setdefault((frame.client, frame.connection), []).append(frame)
        return found


def by_session(observations: Iterable[Observation]) -> list[SessionHistory]:
    """In order of first appearance. The first observation is the run."""
    seen = list(observations)
    run = next(one for one in seen if isinstance(one, Run))
    restored = [one.at_ns for one in seen if isinstance(one, Happening) and one.what == RESTORED]
    found: dict[str, SessionHistory] = {}
    for one in seen:
        if isinstance(one, Run | Happening) or one.session is None:
            continue
        history = found.setdefault(one.session, SessionHistory(one.session, run, sorted(restored)))
        match one:
            case Command():
                history.commands.append(one)
            case Frame():
                history.frames.append(one)
            case StageChunk():
                history.chunks.append(one)
            case LedgerEnd():
                history.ledger = one
            case Reference():
                history.reference = one
    return list(found.values())
