"""Each rule of the history checker on a right history, and on the same with one thing wrong."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import structs
from support.made_history import SAMPLES, changed, made_history

from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.observations import (
    RESTORED,
    Acknowledged,
    ChainWrite,
    Command,
    Frame,
    Happening,
    JournalWrite,
    LedgerEnd,
    Observation,
    Opened,
    Reference,
    Run,
    StageChunk,
    UnreadableHistory,
    decode_lines,
    encode_lines,
)
from duplex_sidecar.history.verdict import Minimums, Rule
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.export import Line
from duplex_sidecar.window.state import WindowState

pytestmark = pytest.mark.unit
History = list[Observation]


def rules_of(history: History) -> set[Rule]:
    return set(check_history(history).rules)


def named(name: str, nth: int = 1) -> Callable[[Command], bool]:
    seen = [0]

    def is_it(command: Command) -> bool:
        seen[0] += command.name == name
        return command.name == name and seen[0] == nth

    return is_it


def command(history: History, name: str, nth: int = 1) -> Command:
    of_name = [one for one in history if isinstance(one, Command) and one.name == name]
    return of_name[nth - 1]


def event(number: int) -> Callable[[Frame], bool]:
    return lambda frame: frame.event is not None and frame.event.sequence == number


def with_event(history: History, number: int, **change: Any) -> History:
    """The message of that number says something else."""
    frame = next(one for one in history if isinstance(one, Frame) and event(number)(one))
    assert frame.event is not None
    return changed(history, Frame, event(number), event=structs.replace(frame.event, **change))


def test_a_right_history_holds_and_says_what_happened() -> None:
    report = check_history(made_history())
    assert report.violations == ()
    assert report.not_judged == ()
    counts = report.counts
    assert (counts.sessions, counts.acknowledged_units, counts.committed_units) == (1, 4, 4)
    assert (counts.events, counts.takeovers, counts.resends, counts.redos) == (8, 1, 0, 0)
    assert (report.lost, report.duplicated) == (0, 0)


def test_too_little_is_no_proof() -> None:
    counts = check_history(made_history()).counts
    assert Minimums(takeovers=1).missing(counts) == []
    assert Minimums(takeovers=2, redos=1).missing(counts) == [
        "redos: 0, at least 1 wanted",
        "takeovers: 1, at least 2 wanted",
    ]


def test_an_acknowledgement_before_the_accept() -> None:
    history = made_history()
    early = changed(history, Frame, lambda one: one.acknowledged is not None, at_ns=1)
    assert rules_of(early) == {Rule.ACKNOWLEDGED_BEFORE_DURABLE}


def test_a_client_that_is_told_to_go_on_behind_what_is_durable() -> None:
    history = made_history()
    far = Opened("made", SAMPLES * 2 + 1, 4)
    told = changed(
        history, Frame, lambda one: one.opened is not None and one.connection == 2, opened=far
    )
    assert rules_of(told) == {Rule.ACKNOWLEDGED_BEFORE_DURABLE}


def test_an_acknowledged_unit_that_is_not_in_the_ledger() -> None:
    history = made_history()
    end = next(one for one in history if isinstance(one, LedgerEnd))
    short = changed(history, LedgerEnd, lambda _: True, lines=end.lines[:-1])
    assert rules_of(short) == {Rule.ACKNOWLEDGED_INPUT_LOST, Rule.CONFIRMED_WRITE_GONE}
    other = Acknowledged(1, 0, SAMPLES + 1)
    moved = changed(history, Frame, lambda one: one.acknowledged is not None, acknowledged=other)
    assert rules_of(moved) == {Rule.ACKNOWLEDGED_INPUT_LOST}
    assert check_history(moved).lost == 1


@pytest.mark.parametrize("kept", [0, 2])
def test_a_ledger_whose_units_do_not_follow(kept: int) -> None:
    history = made_history()
    end = next(one for one in history if isinstance(one, LedgerEnd))
    lines = (*end.lines[:2], *end.lines[2 + kept :]) if kept else (end.lines[0], *end.lines[3:1:-1])
    assert Rule.LEDGER_UNREADABLE in rules_of(
        changed(history, LedgerEnd, lambda _: True, lines=lines)
    )


@pytest.mark.parametrize(
    ("cleared", "holds"),
    [
        ({2: (300, True), 4: (SAMPLES, True)}, True),
        ({2: (0, True), 3: (300, True)}, True),
        ({3: (300, False)}, False),
        ({2: (300, True), 3: (300, False)}, False),
        ({1: (0, True), 3: (300, False)}, False),
        ({3: (300, False), 4: (0, True)}, False),
        ({3: (-300, True)}, False),
    ],
)
def test_input_between_two_units_is_missing_only_where_the_client_cleared_it(
    cleared: dict[int, tuple[int, bool]], holds: bool
) -> None:
    report = check_history(made_history(cleared=cleared))
    assert set(report.rules) == (set() if holds else {Rule.UNITS_NOT_CONTIGUOUS})


def test_an_opening_of_another_session() -> None:
    """On a socket, or in the ledger under this one's name."""
    history = made_history()
    other = Opened("other", 0, 0)
    told = changed(history, Frame, lambda one: one.opened is not None, opened=other)
    assert rules_of(told) == {Rule.SESSION_OF_ANOTHER}
    renamed = [
        one if isinstance(one, Run | Happening) else structs.replace(one, session="renamed")
        for one in history
        if not isinstance(one, Frame)
    ]
    report = check_history(renamed)
    assert [one.rule for one in report.violations] == [Rule.SESSION_OF_ANOTHER]


def test_a_ledger_that_cannot_be_read() -> None:
    history = made_history()
    broken = changed(history, LedgerEnd, lambda _: True, lines=(), problem="a blob is missing")
    assert Rule.LEDGER_UNREADABLE in rules_of(broken)
    rubbish = changed(history, LedgerEnd, lambda _: True, lines=("{}",))
    assert Rule.LEDGER_UNREADABLE in rules_of(rubbish)
    none = [one for one in history if not isinstance(one, LedgerEnd)]
    assert Rule.LEDGER_UNREADABLE in rules_of(none)


def test_confirmed_writes_that_are_gone_at_the_end() -> None:
    """The server forgot its newest ones and nobody said so; the client was told of them."""
    history = made_history()
    end = next(one for one in history if isinstance(one, LedgerEnd))
    short = changed(history, LedgerEnd, lambda _: True, events_last=6)
    assert rules_of(short) == {Rule.CONFIRMED_WRITE_GONE}
    last = msgspec.json.decode(end.lines[-1], type=Line)
    open_unit = structs.replace(
        last,
        committed=False,
        records=last.records[:1],
        index=last.index - 1,
        hash=records.sha256(last.records[0].encode()),
        token_ids=(),
    )
    lines = (*end.lines[:-1], msgspec.json.encode(open_unit).decode())
    unanswered = changed(history, LedgerEnd, lambda _: True, lines=lines)
    assert Rule.CONFIRMED_WRITE_GONE in rules_of(unanswered)
    assert check_history(unanswered).lost == 1
    at_ns = command(history, "commit", 4).executed_ns
    assert at_ns is not None
    restored = Happening(at_ns=at_ns + 1_000_000_000, what=RESTORED, whom="")
    assert Rule.CONFIRMED_WRITE_GONE not in rules_of([*unanswered, restored])


def test_what_comes_behind_the_look_at_the_ledger_need_not_be_in_it() -> None:
    history = made_history()
    end = next(one for one in history if isinstance(one, LedgerEnd))
    before_ns = command(history, "accept", 4).seen_ns
    short = structs.replace(end, lines=end.lines[:-1], events_last=6, at_ns=before_ns)
    early = [short if isinstance(one, LedgerEnd) else one for one in history]
    assert rules_of(early) == set()
    late = structs.replace(short, at_ns=max(one.at_ns for one in history if isinstance(one, Frame)))
    assert Rule.CONFIRMED_WRITE_GONE in rules_of(
        [late if isinstance(one, LedgerEnd) else one for one in history]
    )


def test_two_writes_on_one_entry() -> None:
    history = made_history()
    first = command(history, "accept")
    assert isinstance(first.write, ChainWrite)
    write = structs.replace(first.write, hash="another")
    again = structs.replace(first, write=write, operation="another")
    assert rules_of([*history, again]) == {Rule.CHAIN_FORKED, Rule.CONFIRMED_WRITE_GONE}
    stray = changed(history, Command, named("accept"), write=structs.replace(write, prev_hash="?"))
    assert Rule.CHAIN_FORKED in rules_of(stray)


def test_an_operation_done_twice() -> None:
    history = made_history()
    commit = command(history, "commit")
    repeat = structs.replace(commit, seen_ns=commit.seen_ns + 1, executed_ns=commit.seen_ns + 2)
    assert rules_of([*history, repeat]) == set()
    assert check_history([*history, repeat]).counts.resends == 1
    twice = structs.replace(repeat, reply=("ok", "9"))
    assert rules_of([*history, twice]) == {Rule.EXECUTED_TWICE}


def test_one_fence_for_two_replicas() -> None:
    history = made_history()
    same = changed(history, Command, named("acquire", 2), reply=("ok", "1", "era"))
    assert rules_of(same) == {Rule.FENCE_OF_TWO_REPLICAS}
    less = changed(history, Command, named("acquire"), reply=("ok", "7", "era"))
    assert rules_of(less) == {Rule.FENCE_OF_TWO_REPLICAS}


def zombie(history: History, reply: tuple[str, ...]) -> History:
    """The first owner writes once more, after the second one has taken the lease."""
    first = command(history, "renew")
    late = max(one.executed_ns or 0 for one in history if isinstance(one, Command)) + 1
    return [
        *history,
        structs.replace(first, seen_ns=late, executed_ns=late + 1, reply=reply),
    ]


def with_renewal(history: History) -> History:
    place = next(n for n, one in enumerate(history) if isinstance(one, Frame))
    acquired = command(history, "acquire")
    renewal = structs.replace(acquired, name="renew", operation=None, reply=("ok",), fence=1)
    return [*history[:place], renewal, *history[place:]]


def test_a_zombie_that_writes() -> None:
    history = with_renewal(made_history())
    assert rules_of(history) == set()
    assert rules_of(zombie(history, ("ok",))) == {Rule.WRITE_AFTER_LOSS}
    refused = check_history(zombie(history, ("lost", "2", "b")))
    assert (refused.violations, refused.counts.refused_zombie_writes) == ((), 1)


@pytest.mark.parametrize("name", ["break", "release", "park"])
def test_a_write_after_the_lease_is_gone(name: str) -> None:
    history = with_renewal(made_history())
    accept = history.index(command(history, "accept", 2))
    renewal = command(history, "renew")
    before = history[accept]
    assert isinstance(before, Command)
    gone = structs.replace(
        renewal,
        name=name,
        reply=("ok", "1"),
        seen_ns=before.seen_ns - 2,
        executed_ns=before.seen_ns - 1,
    )
    assert Rule.WRITE_AFTER_LOSS in rules_of([*history[:accept], gone, *history[accept:]])


def test_an_event_before_its_journal_entry() -> None:
    history = made_history()
    early = changed(history, Frame, event(3), at_ns=5)
    assert Rule.EVENT_BEFORE_JOURNAL in rules_of(early)
    never = [one for one in history if not (isinstance(one, Command) and named("journal", 1)(one))]
    assert Rule.EVENT_BEFORE_JOURNAL in rules_of(never)


def test_an_event_that_says_something_else_than_the_journal() -> None:
    other = with_event(made_history(), 1, pcm_sha256="other")
    assert rules_of(other) == {Rule.EVENT_DIFFERS_FROM_JOURNAL}
    unit = with_event(made_history(), 2, unit=3)
    assert rules_of(unit) == {Rule.EVENT_DIFFERS_FROM_JOURNAL}


def test_sound_before_its_commit() -> None:
    history = made_history()
    uncommitted = changed(history, Command, named("commit", 4), reply=("head", "1"))
    assert Rule.PLAYED_BEFORE_COMMIT in rules_of(uncommitted)


def test_a_sequence_number_with_two_contents() -> None:
    history = made_history()
    again = next(one for one in history if isinstance(one, Frame) and event(2)(one))
    assert again.event is not None
    other = structs.replace(again, client="d", event=structs.replace(again.event, sha256="another"))
    assert Rule.SEQUENCE_REUSED in rules_of([*history, other])
    journal = command(history, "journal")
    assert isinstance(journal.write, JournalWrite)
    events = tuple(structs.replace(one, sha256="another") for one in journal.write.events)
    twice = structs.replace(
        journal, operation="another", write=structs.replace(journal.write, events=events)
    )
    assert Rule.SEQUENCE_REUSED in rules_of([*history, twice])


def test_events_that_are_missing_or_come_again() -> None:
    history = made_history()
    gap = [one for one in history if not (isinstance(one, Frame) and event(4)(one))]
    assert rules_of(gap) == {Rule.EVENT_MISSING}
    end = [one for one in history if not (isinstance(one, Frame) and event(8)(one))]
    assert rules_of(end) == {Rule.EVENT_MISSING}
    unheard = changed(history, Frame, event(4), passed_on=False)
    assert rules_of(unheard) == {Rule.EVENT_MISSING}
    frame = next(one for one in history if isinstance(one, Frame) and event(4)(one))
    again = structs.replace(frame, at_ns=frame.at_ns + 1)
    assert rules_of([*history, again]) == {Rule.EVENT_REPEATED}


def told_to_synchronise() -> History:
    """The client has not seen event 4, and is told at its second connection that it is gone."""
    history = [one for one in made_history() if not (isinstance(one, Frame) and event(4)(one))]
    resumed = next(one for one in history if isinstance(one, Frame) and one.resumes_after)
    history = changed(history, Frame, lambda one: one is resumed, resumes_after=3)
    opened = next(
        one for one in history if isinstance(one, Frame) and one.connection == 2 and one.down
    )
    told = structs.replace(
        opened, type="session.resync_required", opened=None, oldest=5, at_ns=opened.at_ns + 1
    )
    place = history.index(opened) + 1
    return [*history[:place], told, *history[place:]]


def after_a_minute(history: History) -> History:
    """The same, but that the second owner comes so much later: the journal has dropped it all."""
    second = history.index(command(history, "acquire", 2))
    return [*history[:second], *(later(one, 61_000_000_000) for one in history[second:])]


def later(one: Observation, by_ns: int) -> Observation:
    if isinstance(one, Frame):
        return structs.replace(one, at_ns=one.at_ns + by_ns)
    if isinstance(one, Command):
        names = ("seen_ns", "executed_ns", "replied_ns")
        return structs.replace(one, **{name: getattr(one, name) + by_ns for name in names})
    return one


def test_a_client_that_is_told_to_synchronise_is_owed_nothing_older() -> None:
    assert rules_of(after_a_minute(told_to_synchronise())) == set()


def test_samples_that_are_missing_or_come_again() -> None:
    history = made_history()
    assert Rule.AUDIO_MISSING in rules_of(with_event(history, 3, from_sample=700))
    assert Rule.AUDIO_REPEATED in rules_of(with_event(history, 3, from_sample=500))
    assert Rule.AUDIO_MISSING in rules_of(with_event(history, 8, turn_samples=2_401))
    assert Rule.AUDIO_REPEATED in rules_of(with_event(history, 8, turn_samples=2_399))


def test_a_unit_that_is_said_again_behind_itself() -> None:
    """Its samples go on, its epoch is a new one, each number is sent once: only the unit tells."""
    history = made_history(said=(1, 2, 2, 3, 4))
    assert rules_of(history) == {Rule.UNIT_SAID_TWICE}
    assert check_history(history).duplicated == 2


def test_a_unit_that_is_never_said() -> None:
    history = made_history(said=(1, 3, 4))
    assert rules_of(history) == {Rule.UNIT_NOT_SAID}
    assert check_history(history).lost == 1
    assert rules_of(made_history(said=(1, 2, 3))) == set()  # the last one is on its way


def test_events_that_are_said_to_be_gone_and_are_not() -> None:
    assert rules_of(told_to_synchronise()) == {Rule.EVENT_MISSING}


def test_epochs_and_chunks_out_of_order() -> None:
    history = made_history()
    late = changed(history, StageChunk, lambda _: True, sequence=1)
    assert rules_of(late) == {Rule.EPOCH_OUT_OF_ORDER}
    gap = [
        structs.replace(one, epoch=5) if isinstance(one, StageChunk) and one.replica == "b" else one
        for one in history
    ]
    assert rules_of(gap) == {Rule.EPOCH_OUT_OF_ORDER}


def test_speech_without_a_lease() -> None:
    history = made_history()
    second = 1_000_000_000
    late = [
        structs.replace(one, at_ns=one.at_ns + 3 * second)
        if isinstance(one, Frame) and event(8)(one)
        else one
        for one in history
    ]
    assert Rule.SPOKE_WITHOUT_LEASE in rules_of(late)
    unconfirmed = changed(history, Command, named("acquire", 2), replied_ns=None)
    assert rules_of(unconfirmed) == {Rule.SPOKE_WITHOUT_LEASE}
    run = history[0]
    assert isinstance(run, Run)
    silent = [structs.replace(run, lease_ms=0), *unconfirmed[1:]]
    report = check_history(silent)
    assert report.violations == ()
    assert report.not_judged == ("spoke_without_lease: the run does not say how long leases last",)


def test_a_plan_that_does_not_follow_from_the_records() -> None:
    history = made_history()
    wrong = WindowState(7, None, (), 0, ())
    commit = command(history, "commit", 3)
    assert isinstance(commit.write, ChainWrite)
    write = structs.replace(commit.write, window=wrong)
    assert rules_of(changed(history, Command, named("commit", 3), write=write)) == {
        Rule.WINDOW_DIFFERS
    }
    right = WindowState(44, None, (), 0, ())
    write = structs.replace(commit.write, window=right)
    assert rules_of(changed(history, Command, named("commit", 3), write=write)) == set()


def test_other_tokens_than_the_reference() -> None:
    history = made_history()
    other = changed(history, Reference, lambda _: True, token_ids=((1,),))
    assert rules_of(other) == {Rule.ANSWER_DIFFERS}


def test_a_client_library_that_retries() -> None:
    history = made_history()
    accept = command(history, "accept")
    again = structs.replace(accept, seen_ns=accept.seen_ns + 1_000)
    thrice = structs.replace(accept, seen_ns=accept.seen_ns + 2_000)
    assert rules_of([*history, again]) == set()
    assert rules_of([*history, again, thrice]) == {Rule.HIDDEN_RETRY}
    later = structs.replace(thrice, seen_ns=accept.seen_ns + 200_000_000)
    assert rules_of([*history, again, later]) == set()


@pytest.mark.parametrize(("connection", "rules"), [(1, set()), (2, {Rule.WAIT_ELSEWHERE})])
def test_a_wait_on_another_connection(connection: int, rules: set[Rule]) -> None:
    history = made_history()
    accept = command(history, "accept")
    wait = structs.replace(
        accept,
        name="WAIT",
        session=None,
        operation=None,
        write=None,
        connection=connection,
        seen_ns=accept.seen_ns + 1,
    )
    assert rules_of([*history, wait]) == rules


def test_what_came_before_a_restored_server_is_another_era() -> None:
    """The same numbers with other contents are no contradiction then; what was lost is."""
    history = made_history()
    frames = [one for one in history if isinstance(one, Frame)]
    late = max(frame.at_ns for frame in frames) + 1
    end = next(one for one in history if isinstance(one, LedgerEnd))
    lost = changed(history, LedgerEnd, lambda _: True, lines=end.lines[:3], events_last=4)
    assert rules_of([*lost, Happening(late, RESTORED, "")]) == {Rule.ACKNOWLEDGED_INPUT_LOST}


def test_a_history_survives_its_file() -> None:
    history = made_history()
    assert decode_lines(encode_lines(history)) == history


@pytest.mark.parametrize(
    "lines",
    [[], [b"{}\n"], [b"\xff\n"], [b'{"kind":"happening","at_ns":1,"what":"x","whom":""}\n']],
)
def test_files_that_are_no_histories(lines: list[bytes]) -> None:
    with pytest.raises(UnreadableHistory):
        decode_lines(lines)


def test_a_newer_schema_is_refused() -> None:
    newer = msgspec.json.encode(Run(schema=99, name="x"))
    with pytest.raises(UnreadableHistory, match="schema 99"):
        decode_lines([newer])
