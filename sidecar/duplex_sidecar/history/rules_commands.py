"""Rules about a client's commands: each number once, told when it is durable, and nothing counts as
played that was not committed and journaled."""

from collections.abc import Iterator

from duplex_sidecar.history.observations import ChainWrite, ClientWrite, EventFacts, Playback
from duplex_sidecar.history.sessions import SessionHistory
from duplex_sidecar.history.verdict import Rule, Violation


def commands_once(history: SessionHistory) -> Iterator[Violation]:
    """The numbers of applied commands grow with each write that says any; the same write may come
    again, as its answer may have been lost."""
    newest: dict[int, int] = {}
    before: ChainWrite | ClientWrite | None = None
    for command in history.client_writes:
        write = command.write
        if not isinstance(write, ChainWrite | ClientWrite) or write.client_sequence is None:
            continue
        era = history.era(command.executed_ns or 0)
        number, known = write.client_sequence, newest.get(era, 0)
        if number <= known and write != before:
            text = f"command {number} was applied when {known} was"
            yield Violation(Rule.COMMAND_APPLIED_TWICE, history.session, text)
        newest[era], before = max(number, known), write


def commands_are_durable(history: SessionHistory) -> Iterator[Violation]:
    """What a client is told is applied was so in the ledger by then."""
    known = [
        (command.executed_ns or 0, command.write.client_sequence)
        for command in history.client_writes
        if isinstance(command.write, ChainWrite | ClientWrite)
        and command.write.client_sequence is not None
    ]
    for frame in history.down:
        told = frame.applied
        if told is None and frame.opened is not None:
            told = frame.opened.client_sequence
        newest = max((number for at_ns, number in known if at_ns <= frame.at_ns), default=0)
        if told is not None and told > newest:
            text = f"command {told} was said to be applied, the ledger has {newest}"
            yield Violation(Rule.COMMAND_BEFORE_DURABLE, history.session, text)


def played(history: SessionHistory) -> Iterator[Violation]:
    """What counts as played has sounded: its samples were journaled, and their unit committed, when
    the ledger took it so and when the client was told so. What leaves the journal for it was played
    whole."""
    session = history.session
    sound = _sound(history)
    for command in history.client_writes:
        write, at_ns = command.write, command.executed_ns or 0
        if not isinstance(write, ClientWrite) or write.played is None:
            continue
        yield from _beyond(session, sound, write.played, at_ns)
        position = (write.played.turn, write.played.samples)
        for _, event in sound:
            end = (event.turn or 0, (event.from_sample or 0) + event.samples)
            if event.sequence <= write.through_event and end > position:
                text = f"event {event.sequence} left the journal and was not played whole"
                yield Violation(Rule.TRIMMED_UNPLAYED, session, text)
    for frame in history.down:
        if frame.played is not None:
            yield from _beyond(session, sound, frame.played, frame.at_ns)


def _beyond(
    session: str, sound: list[tuple[int, EventFacts]], told: Playback, at_ns: int
) -> Iterator[Violation]:
    ends = [
        (event.from_sample or 0) + event.samples
        for known_ns, event in sound
        if known_ns <= at_ns and event.turn == told.turn
    ]
    if told.samples > max(ends, default=0):
        text = f"turn {told.turn}: {told.samples} samples count as played of {max(ends, default=0)}"
        yield Violation(Rule.PLAYED_BEYOND_COMMITTED, session, text)


def _sound(history: SessionHistory) -> list[tuple[int, EventFacts]]:
    """Journaled sound of committed units, with the time from which it was both."""
    commits: dict[int, int] = {}
    for one in history.chained:
        if one.write.entry == "committed":
            commits.setdefault(one.write.seq, one.executed_ns)
    return [
        (max(one.executed_ns, commits[event.unit or 0]), event)
        for one in history.journaled
        for event in one.write.events
        if event.kind == "audio" and (event.unit or 0) in commits
    ]
