"""Rules about what a client was told: durable first, each event once, each sample once."""

from collections.abc import Iterator

import msgspec

from duplex_sidecar.history.observations import Command, EventFacts, Frame
from duplex_sidecar.history.sessions import Journaled, SessionHistory
from duplex_sidecar.history.verdict import Rule, Violation
from duplex_sidecar.ledger.call import ScriptName
from duplex_sidecar.ledger.records import Accepted

_decode_accepted = msgspec.json.Decoder(Accepted).decode

LEASE_TOLERANCE_NS = 250_000_000
"""From the owner's look at its lease to the observer's look at the socket, on a busy machine."""

_AGREE = ("kind", "unit", "turn", "epoch", "stage2_sequence", "from_sample", "samples")
"""Facts of an event that its journal entry and its message share, where both have them."""


def acknowledged_input(history: SessionHistory) -> Iterator[Violation]:
    """What a client was told is durable was so then, and is in the ledger at the end."""
    session = history.session
    accepts: dict[int, int] = {}
    for one in history.chained:
        if one.write.entry == "accepted":
            accepts.setdefault(one.write.seq, one.executed_ns)
    units = {line.seq: line.input for line in history.lines if line.kind == "unit"}
    first_kept = min(units, default=0)
    for frame in history.down:
        told = frame.acknowledged
        if told is None:
            continue
        if accepts.get(told.unit, frame.at_ns + 1) > frame.at_ns:
            text = f"unit {told.unit} was acknowledged before its accept was confirmed"
            yield Violation(Rule.ACKNOWLEDGED_BEFORE_DURABLE, session, text)
        kept = units.get(told.unit)
        if not history.precedes_the_look(frame.at_ns) or (kept is None and told.unit < first_kept):
            continue
        place = (told.from_sample, told.to_sample)
        if kept is None or (kept.client_from_samples, kept.client_to_samples) != place:
            text = f"unit {told.unit} was acknowledged and is not in the ledger"
            yield Violation(Rule.ACKNOWLEDGED_INPUT_LOST, session, text)


def own_session(history: SessionHistory) -> Iterator[Violation]:
    """A client is let into the session that it asked for."""
    for frame in history.down:
        if frame.opened is not None and frame.opened.session != history.session:
            text = f"connection {frame.connection} was opened as {frame.opened.session}"
            yield Violation(Rule.SESSION_OF_ANOTHER, history.session, text)


def resumed_input(history: SessionHistory) -> Iterator[Violation]:
    """The position from which a client is told to go on is durable: it keeps nothing before it."""
    durable: list[tuple[int, int, int]] = []
    for one in history.chained:
        if one.write.entry == "accepted":
            to_sample = _decode_accepted(one.write.record).input.client_to_samples
            durable.append((one.executed_ns, history.era(one.executed_ns), to_sample))
    for frame in history.down:
        if frame.opened is None:
            continue
        era = history.era(frame.at_ns)
        known = max((to for at, in_, to in durable if at <= frame.at_ns and in_ <= era), default=0)
        if frame.opened.acknowledged_sample > known:
            text = f"told to go on at sample {frame.opened.acknowledged_sample}, durable is {known}"
            yield Violation(Rule.ACKNOWLEDGED_BEFORE_DURABLE, history.session, text)


def journal_first(history: SessionHistory) -> Iterator[Violation]:
    """No replayable event leaves before its journal entry was confirmed; it says what that says; no
    sound is played of a unit that is not committed."""
    session = history.session
    commits: dict[int, int] = {}
    for one in history.chained:
        if one.write.entry == "committed":
            commits.setdefault(one.write.seq, one.executed_ns)
    entries: dict[tuple[int, int], tuple[int, EventFacts]] = {}
    for one in history.journaled:
        era = history.era(one.executed_ns)
        for event in one.write.events:
            entries.setdefault((era, event.sequence), (one.executed_ns, event))
    for frame in history.down:
        event = frame.event
        if event is None:
            continue
        eras = range(history.era(frame.at_ns), -1, -1)
        known = [entries[era, event.sequence] for era in eras if (era, event.sequence) in entries]
        if not any(at_ns <= frame.at_ns for at_ns, _ in known):
            text = f"event {event.sequence} ({event.kind}) left before it was journaled"
            yield Violation(Rule.EVENT_BEFORE_JOURNAL, session, text)
        elif not any(_agree(entry, event) for _, entry in known):
            text = f"event {event.sequence} ({event.kind}) is another one in the journal"
            yield Violation(Rule.EVENT_DIFFERS_FROM_JOURNAL, session, text)
        late = commits.get(event.unit or 0, frame.at_ns + 1) > frame.at_ns
        if event.kind == "audio" and late:
            text = f"sound of unit {event.unit} left before its commit was confirmed"
            yield Violation(Rule.PLAYED_BEFORE_COMMIT, session, text)


def _agree(entry: EventFacts, event: EventFacts) -> bool:
    pairs = ((getattr(entry, name), getattr(event, name)) for name in _AGREE)
    if any(None not in (left, right) and left != right for left, right in pairs):
        return False
    return entry.pcm_sha256 == event.pcm_sha256


def one_sequence_one_event(history: SessionHistory) -> Iterator[Violation]:
    """One sequence number is one byte string for ever, in the journal and on every socket."""
    session = history.session
    journal: dict[tuple[int, int], str] = {}
    for one in history.journaled:
        for event in one.write.events:
            key = (history.era(one.executed_ns), event.sequence)
            if journal.setdefault(key, event.sha256) != event.sha256:
                text = f"event {event.sequence} was journaled with two contents"
                yield Violation(Rule.SEQUENCE_REUSED, session, text)
    wire: dict[tuple[int, int], str] = {}
    for frame in history.down:
        if frame.event is not None:
            key = (history.era(frame.at_ns), frame.event.sequence)
            if wire.setdefault(key, frame.event.sha256) != frame.event.sha256:
                text = f"event {frame.event.sequence} was sent with two contents"
                yield Violation(Rule.SEQUENCE_REUSED, session, text)


def each_event_once(history: SessionHistory) -> Iterator[Violation]:
    """On a connection events count on from where it began, which is what the client had; a client
    that was told the end has them all."""
    session = history.session
    had: dict[str, set[int]] = {}
    ended: set[str] = set()
    for (client, _), frames in history.connections.items():
        got = had.setdefault(client, set())
        expected: int | None = None
        for frame in frames:
            if frame.resumes_after is not None:
                expected = frame.resumes_after + 1
            if not (frame.down and frame.passed_on):
                continue
            if frame.opened is not None and expected is None:
                expected = frame.opened.last_sequence + 1
            if frame.oldest is not None:
                expected = frame.oldest
                got.difference_update(set(range(frame.oldest, max(got, default=0) + 1)))
                got.update(range(1, frame.oldest))
            if frame.type == "session.closed" and frame.problem == "session_ended":
                ended.add(client)
            if frame.event is None:
                continue
            number = frame.event.sequence
            if expected is not None and number > expected:
                text = f"{client}: events {expected} to {number - 1} are missing"
                yield Violation(Rule.EVENT_MISSING, session, text)
            if number in got or (expected is not None and number < expected):
                text = f"{client}: event {number} came again"
                yield Violation(Rule.EVENT_REPEATED, session, text)
            got.add(number)
            expected = number + 1
    last = history.ledger.events_last if history.ledger else 0
    for client in sorted(ended):
        missing = sorted(set(range(1, last + 1)) - had[client])
        if missing:
            text = f"{client}: ended without {len(missing)} events, the first is {missing[0]}"
            yield Violation(Rule.EVENT_MISSING, session, text)


def each_sample_once(history: SessionHistory) -> Iterator[Violation]:
    """The samples of a turn follow each other without a gap or a repeat, over all connections; a
    turn's end names their number. What a client was told to be gone counts no more, and a number
    that a restored server gave again counts as it came last."""
    session = history.session
    spoken: dict[str, dict[int, EventFacts]] = {}
    of_era: dict[tuple[str, int], int] = {}
    for frame in history.down:
        if not frame.passed_on:
            continue
        events = spoken.setdefault(frame.client, {})
        if frame.oldest is not None:
            spoken[frame.client] = {n: event for n, event in events.items() if n < frame.oldest}
        elif frame.event is not None:
            key, era = (frame.client, frame.event.sequence), history.era(frame.at_ns)
            if of_era.setdefault(key, era) < era or frame.event.sequence not in events:
                of_era[key] = era
                events[frame.event.sequence] = frame.event
    for client, events in spoken.items():
        positions: dict[int | None, int] = {}
        for number in sorted(events):
            event = events[number]
            at = positions.get(event.turn, 0)
            if event.kind == "audio" and event.from_sample is not None:
                if event.from_sample != at:
                    rule = Rule.AUDIO_REPEATED if event.from_sample < at else Rule.AUDIO_MISSING
                    text = f"{client}: turn {event.turn} goes on at {event.from_sample}, not {at}"
                    yield Violation(rule, session, text)
                positions[event.turn] = event.from_sample + event.samples
            if event.turn_samples is not None and event.turn_samples != at:
                rule = Rule.AUDIO_MISSING if event.turn_samples > at else Rule.AUDIO_REPEATED
                text = f"{client}: turn {event.turn} ends with {at} of {event.turn_samples} samples"
                yield Violation(rule, session, text)


def epochs(history: SessionHistory) -> Iterator[Violation]:
    """Each vocoder hears each epoch from chunk 0 without a gap; epochs have no gaps either; on the
    wire they never go back."""
    session = history.session
    heard: dict[tuple[str, int], int] = {}
    for chunk in history.chunks:
        key = (chunk.replica, chunk.epoch)
        if chunk.sequence != heard.get(key, 0):
            text = f"epoch {chunk.epoch}: chunk {chunk.sequence} instead of {heard.get(key, 0)}"
            yield Violation(Rule.EPOCH_OUT_OF_ORDER, session, text)
        heard[key] = chunk.sequence + 1
    numbers = sorted({epoch for _, epoch in heard})
    if numbers and numbers != list(range(numbers[-1] + 1)):
        text = f"epochs {numbers} have gaps"
        yield Violation(Rule.EPOCH_OUT_OF_ORDER, session, text)
    before = (-1, -1)
    for one in sorted(history.journaled, key=_first_sequence):
        if history.era(one.executed_ns) != history.last_era:
            continue
        for event in one.write.events:
            if event.kind != "audio" or event.epoch is None or event.stage2_sequence is None:
                continue
            now = (event.epoch, event.stage2_sequence)
            if now <= before:
                text = f"event {event.sequence}: chunk {now} after chunk {before}"
                yield Violation(Rule.EPOCH_OUT_OF_ORDER, session, text)
            before = now


def _first_sequence(one: Journaled) -> int:
    return one.write.first_sequence


def spoken_under_a_lease(history: SessionHistory) -> Iterator[Violation]:
    """What is new leaves a replica only while a confirmed renewal covers that moment, counted from
    before the renewal was sent. (Replays do not count: they are in the journal already.)"""
    run = history.run
    if not run.lease_ms:
        return
    lasts_ns = (run.lease_ms - run.margin_ms) * 1_000_000 + LEASE_TOLERANCE_NS
    renewals = [
        command
        for command in history.executed
        if command.name in (ScriptName.ACQUIRE, ScriptName.RENEW) and command.done
    ]
    opened_with: dict[tuple[str, int], int] = {}
    for frame in history.down:
        place = (frame.client, frame.connection)
        if frame.opened is not None:
            opened_with[place] = frame.opened.last_sequence
        event = frame.event
        if event is None or event.sequence <= opened_with.get(place, 0):
            continue
        if not any(_covers(renewal, frame, lasts_ns) for renewal in renewals):
            text = f"{frame.replica} sent event {event.sequence} without a lease"
            yield Violation(Rule.SPOKE_WITHOUT_LEASE, history.session, text)


def _covers(renewal: Command, frame: Frame, lasts_ns: int) -> bool:
    known = renewal.replied_ns is not None and renewal.replied_ns <= frame.at_ns
    covered = frame.at_ns <= renewal.seen_ns + lasts_ns
    return known and covered and renewal.replica == frame.replica
