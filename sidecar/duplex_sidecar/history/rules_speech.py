"""Rules about what each unit came to: said once, and replayed as long as the journal has it."""

from collections.abc import Iterator

from duplex_sidecar.history.observations import (
    ChainWrite,
    ClientWrite,
    Command,
    EventFacts,
    JournalWrite,
)
from duplex_sidecar.history.sessions import SessionHistory
from duplex_sidecar.history.verdict import Rule, Violation
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.journal import MAX_JOURNAL_AGE_MS, MAX_JOURNAL_BYTES

_MAX_BYTES_AT, _MAX_AGE_AT = 5, 6
"""Indices among a journal call's arguments."""
_EVENT_BYTES = 16 * 1024
"""More than an event has beside its sound."""


def each_unit_said_once(history: SessionHistory) -> Iterator[Violation]:
    """The journal goes through the units once, without a gap: their samples follow each other even
    where a unit is said again behind itself, or not at all. The last one may be on its way yet."""
    session = history.session
    said: int | None = None
    sent = _maybe_said(history)
    for event in _newest_journal(history):
        unit = event.unit
        if unit is None or event.kind not in ("audio", "unit_done"):
            continue
        if said is not None and unit <= said:
            text = f"event {event.sequence} ({event.kind}) is of unit {unit}, {said} was said"
            yield Violation(Rule.UNIT_SAID_TWICE, session, text)
        if event.kind == "unit_done":
            said = unit if said is None else max(said, unit)
    accepted = [one.write.seq for one in history.chained if one.write.entry == "accepted"]
    missing = sorted(set(range(min(sent, default=1), max(accepted, default=0))) - sent)
    if sent and missing:
        text = f"unit {missing[0]} was never said, units up to {max(accepted)} were accepted"
        yield Violation(Rule.UNIT_NOT_SAID, session, text)


def resync_is_needed(history: SessionHistory) -> Iterator[Violation]:
    """A client is told that events are gone only where they are: too old or too many for the
    journal, played, or lost with a server's newest part."""
    for frames in history.connections.values():
        after: int | None = None
        for frame in frames:
            if frame.resumes_after is not None:
                after = frame.resumes_after
            if frame.oldest is None or after is None or frame.oldest <= after + 1:
                continue
            if _kept(history, frame.oldest - 1, frame.at_ns):
                text = f"events {after + 1} to {frame.oldest - 1} were said to be gone"
                yield Violation(Rule.EVENT_MISSING, history.session, f"{text}, the last is not")


def _kept(history: SessionHistory, sequence: int, at_ns: int) -> bool:
    """Whether the journal must have had that event at that moment."""
    era = history.era(at_ns)
    behind_bytes, since_ns = 0, None
    max_bytes, max_age_ms = MAX_JOURNAL_BYTES, MAX_JOURNAL_AGE_MS
    for one in history.journaled:
        if history.era(one.executed_ns) != era or one.executed_ns > at_ns:
            continue
        if one.command.name == ScriptName.JOURNAL and len(one.command.arguments) > _MAX_AGE_AT:
            max_bytes = int(one.command.arguments[_MAX_BYTES_AT])
            max_age_ms = int(one.command.arguments[_MAX_AGE_AT])
        for event in one.write.events:
            if event.sequence == sequence:
                since_ns = one.executed_ns
            if event.sequence >= sequence:
                behind_bytes += 2 * event.samples + _EVENT_BYTES
    if since_ns is None or any(_dropped(command, sequence) for command in history.commands):
        return False
    return behind_bytes < max_bytes and at_ns - since_ns < (max_age_ms * 1_000_000) // 2


def _dropped(command: Command, sequence: int) -> bool:
    """Whether a client had played it, and said so."""
    write = command.write
    return isinstance(write, ClientWrite) and write.through_event >= sequence


def _newest_journal(history: SessionHistory) -> list[EventFacts]:
    """Of the last era, in the order of its numbers."""
    writes = [
        one.write for one in history.journaled if history.era(one.executed_ns) == history.last_era
    ]
    return [
        event
        for write in sorted(writes, key=lambda write: write.first_sequence)
        for event in write.events
    ]


def _maybe_said(history: SessionHistory) -> set[int]:
    """Units whose end was sent to the journal: an answer may have been lost, and its server."""
    found: set[int] = set()
    for command in history.commands:
        write = command.write
        write = write.journaled if isinstance(write, ChainWrite) else write
        if command.sent and isinstance(write, JournalWrite):
            found |= {one.unit for one in write.events if one.kind == "unit_done" and one.unit}
    return found
