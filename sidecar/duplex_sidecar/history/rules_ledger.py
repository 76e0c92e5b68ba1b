"""Rules about writes: one owner at a time, one chain, nothing after the lease is lost."""

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from duplex_sidecar.history.commands import OWNERS_SCRIPTS
from duplex_sidecar.history.observations import ChainWrite, Command
from duplex_sidecar.history.sessions import SessionHistory
from duplex_sidecar.history.verdict import Rule, Violation
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.errors import LedgerCorrupt, SchemaTooNew
from duplex_sidecar.ledger.export import Line, verify_lines
from duplex_sidecar.ledger.records import Opening, sha256

MAX_SENDS_IN_A_BURST = 2
BURST_NS = 150_000_000
"""A script is sent at most twice at once; after that its caller waits for 200 ms."""

_CLEAR, _CLEARED = "input_audio_buffer.clear", "input_audio_buffer.cleared"
_decode_opening = msgspec.json.Decoder(Opening).decode


class _Clear(NamedTuple):
    asked_ns: int
    done_ns: int


_WRITES = frozenset(
    {
        *OWNERS_SCRIPTS,
        ScriptName.CREATE,
        ScriptName.OFFER,
        ScriptName.ACQUIRE,
        ScriptName.BREAK,
        ScriptName.ERASE,
    }
)
_GIVES_UP = frozenset({ScriptName.RELEASE, ScriptName.PARK, ScriptName.HAND_OVER})
_WAITS = frozenset({"WAIT", "WAITAOF"})


def final_ledger(history: SessionHistory) -> Iterator[Violation]:
    """It can be read, it is this session's, its chain holds, its units are contiguous: input is
    missing between two of them only where the client had it cleared."""
    session, ledger = history.session, history.ledger
    if ledger is None:
        if history.chained:
            yield Violation(Rule.LEDGER_UNREADABLE, session, "the history has no ledger's end")
        return
    if ledger.problem is not None:
        yield Violation(Rule.LEDGER_UNREADABLE, session, ledger.problem)
        return
    try:
        verify_lines(line.encode() for line in ledger.lines)
        units = [line for line in history.lines if line.kind == "unit"]
    except (LedgerCorrupt, SchemaTooNew, msgspec.MsgspecError) as error:
        yield Violation(Rule.LEDGER_UNREADABLE, session, str(error))
        return
    for name in sorted({_opened_as(line) for line in history.lines[:1]} - {session}):
        text = f"the ledger was opened as {name}"
        yield Violation(Rule.SESSION_OF_ANOTHER, session, text)
    clears = _clears(history)
    for before, line in itertools.pairwise(units):
        if line.seq != before.seq + 1 or not _joined(history, before, line, clears):
            text = f"unit {line.seq} does not follow unit {before.seq}"
            yield Violation(Rule.UNITS_NOT_CONTIGUOUS, session, text)


def _opened_as(line: Line) -> str:
    return _decode_opening(line.records[0]).session


def _joined(history: SessionHistory, before: Line, line: Line, clears: list[_Clear]) -> bool:
    """A clear that left a gap is used up by it."""
    left, right = before.input, line.input
    if left is None or right is None or left.client_to_samples > right.client_from_samples:
        return False
    if left.client_to_samples == right.client_from_samples:
        return True
    # What is before the gap had been taken for its unit by then, so the unit before that one was
    # accepted; what is behind the gap was not.
    since_ns = _accepts_ns(history, before.seq - 1, first=True)
    until_ns = _accepts_ns(history, line.seq, first=False)
    for clear in clears:
        if clear.done_ns >= since_ns and (until_ns == 0 or clear.asked_ns <= until_ns):
            clears.remove(clear)
            return True
    return False


def _accepts_ns(history: SessionHistory, seq: int, *, first: bool) -> int:
    """When an accept of that unit was seen, first or last; 0 where none was."""
    seen = [
        one.command.seen_ns
        for one in history.chained
        if one.write.entry == "accepted" and one.write.seq == seq
    ]
    return (min if first else max)(seen, default=0)


def _clears(history: SessionHistory) -> list[_Clear]:
    """What clients said that may forget input, by the time they said it."""
    found: list[_Clear] = []
    for frames in history.connections.values():
        done = [frame.at_ns for frame in frames if frame.down and frame.type == _CLEARED]
        asked = [frame.at_ns for frame in frames if not frame.down and frame.type == _CLEAR]
        # Of one that was not answered nobody knows when it was done.
        answers = itertools.chain(done, itertools.repeat(sys.maxsize))
        found += itertools.starmap(_Clear, zip(asked, answers, strict=False))
    return sorted(found)


def nothing_confirmed_is_gone(history: SessionHistory) -> Iterator[Violation]:
    """What the server has confirmed since it was last restored, and before it was looked at, is in
    the ledger at the end: the entries that are not trimmed, and the journal up to its newest
    number."""
    session, ledger = history.session, history.ledger
    if ledger is None or ledger.problem is not None:
        return
    kept = {sha256(record.encode()) for line in history.lines for record in line.records}
    first = min((line.seq for line in history.lines if line.kind == "unit"), default=0)
    for one in history.chained:
        if not _counts_at_the_end(history, one.executed_ns):
            continue
        if one.write.seq >= first and one.write.hash not in kept:
            text = f"{one.write.entry} {one.write.seq} was confirmed and is not in the ledger"
            yield Violation(Rule.CONFIRMED_WRITE_GONE, session, text)
    events = [
        event.sequence
        for one in history.journaled
        if _counts_at_the_end(history, one.executed_ns)
        for event in one.write.events
    ]
    if max(events, default=0) > ledger.events_last:
        text = f"event {max(events)} was confirmed, the journal ends with {ledger.events_last}"
        yield Violation(Rule.CONFIRMED_WRITE_GONE, session, text)


def _counts_at_the_end(history: SessionHistory, confirmed_ns: int) -> bool:
    newest = history.era(confirmed_ns) == history.last_era
    return newest and history.precedes_the_look(confirmed_ns)


def one_chain(history: SessionHistory) -> Iterator[Violation]:
    """Each confirmed write extends one that was confirmed or sent before, and no two the same."""
    session = history.session
    sent = {write.hash for command in history.commands if (write := _chain_write(command))}
    follower: dict[tuple[int, str], str] = {}
    for one in history.chained:
        write, era = one.write, history.era(one.executed_ns)
        if write.entry == "opening":
            continue
        if write.prev_hash not in sent:
            text = f"{write.entry} {write.seq} extends an entry that nobody wrote"
            yield Violation(Rule.CHAIN_FORKED, session, text)
        other = follower.setdefault((era, write.prev_hash), write.hash)
        if other != write.hash:
            text = f"{write.entry} {write.seq} extends an entry that was extended already"
            yield Violation(Rule.CHAIN_FORKED, session, text)


def executed_once(history: SessionHistory) -> Iterator[Violation]:
    """A repeat of an operation gets the first answer: another one shows that it was done again."""
    answers: dict[tuple[int, str, str], tuple[str, ...]] = {}
    for command in history.executed:
        if not command.done or command.operation is None:
            continue
        key = (history.era(command.executed_ns or 0), command.name, command.operation)
        if answers.setdefault(key, command.reply) != command.reply:
            text = f"{command.name} of {command.replica} was done twice under one operation id"
            yield Violation(Rule.EXECUTED_TWICE, history.session, text)


def one_owner(history: SessionHistory) -> Iterator[Violation]:
    """A fence belongs to one replica for ever, and only grows with acquisitions."""
    session = history.session
    owners: dict[int, str] = {}
    newest: tuple[int, int, int] | None = None
    for command in history.executed:
        if command.name != ScriptName.ACQUIRE or not command.done:
            continue
        fence, era = int(command.reply[1]), history.era(command.executed_ns or 0)
        owner = owners.setdefault(fence, command.replica)
        if owner != command.replica:
            text = f"fence {fence} went to {owner} and to {command.replica}"
            yield Violation(Rule.FENCE_OF_TWO_REPLICAS, session, text)
        if newest and newest[0] == era and fence < newest[1] and newest[2] < command.seen_ns:
            text = f"fence {fence} was given after fence {newest[1]}"
            yield Violation(Rule.FENCE_OF_TWO_REPLICAS, session, text)
        newest = (era, fence, command.executed_ns or 0)


def nothing_after_loss(history: SessionHistory) -> Iterator[Violation]:
    """No owner's script does its work once the lease was broken, given up or given to another. What
    was under way at that moment may have been first: only what began later counts."""
    lost_ns: dict[tuple[int, str | None], int] = {}
    holder: str | None = None
    for command in history.executed:
        if not command.done:
            continue
        at_ns = command.executed_ns or 0
        era, nonce = history.era(at_ns), command.nonce
        since_ns = lost_ns.get((era, nonce))
        writes = command.name in OWNERS_SCRIPTS - _GIVES_UP  # giving up may be said again
        if writes and since_ns is not None and command.seen_ns > since_ns:
            text = f"{command.name} of {command.replica} with fence {command.fence}"
            text = f"{text} after its lease was lost"
            yield Violation(Rule.WRITE_AFTER_LOSS, history.session, text)
        if command.name == ScriptName.ACQUIRE:
            if holder is not None and holder != nonce:
                lost_ns.setdefault((era, holder), at_ns)
            lost_ns.pop((era, nonce), None)
            holder = nonce
        elif command.name == ScriptName.BREAK and command.reply[1:2] == ("1",):
            lost_ns.setdefault((era, holder), at_ns)
        elif command.name in _GIVES_UP:
            lost_ns.setdefault((era, nonce), at_ns)


def no_hidden_retry(history: SessionHistory) -> Iterator[Violation]:
    """An operation is sent at most twice at once, so that no call outlives its deadline unseen."""
    sends: dict[tuple[str, str], list[int]] = {}
    for command in sorted(history.commands, key=lambda command: command.seen_ns):
        if command.operation is None or command.reply[:1] == ("-NOSCRIPT",):
            continue
        times = sends.setdefault((command.name, command.operation), [])
        times.append(command.seen_ns)
        burst = [at for at in times if command.seen_ns - at <= BURST_NS]
        if len(burst) == MAX_SENDS_IN_A_BURST + 1:
            text = f"{command.name} was sent {len(burst)} times within {BURST_NS // 1_000_000} ms"
            yield Violation(Rule.HIDDEN_RETRY, history.session, text)


def waits_where_it_wrote(commands: list[Command]) -> Iterator[Violation]:
    """WAIT and WAITAOF speak of the writes of their own connection: on one that wrote nothing they
    succeed at once. All commands of a history, of every session."""
    last: dict[tuple[str, int], Command] = {}
    for command in sorted(commands, key=lambda one: (one.seen_ns, one.number)):
        place = (command.replica, command.connection)
        if command.name in _WAITS:
            before = last.get(place)
            if before is None or before.name not in _WRITES:
                text = f"{command.name} of {command.replica} on a connection that wrote nothing"
                yield Violation(Rule.WAIT_ELSEWHERE, command.session or "", text)
        else:
            last[place] = command


def _chain_write(command: Command) -> ChainWrite | None:
    return command.write if command.sent and isinstance(command.write, ChainWrite) else None
