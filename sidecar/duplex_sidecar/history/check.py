"""The checker: a whole history in, a report out. Pure."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from duplex_sidecar.history import (
    rules_client,
    rules_commands,
    rules_ledger,
    rules_speech,
    rules_window,
)
from duplex_sidecar.history.observations import Command, Frame, Observation, Run
from duplex_sidecar.history.sessions import SessionHistory, by_session
from duplex_sidecar.history.verdict import Counts, Report, Rule, Violation
from duplex_sidecar.ledger.call import ScriptName

_RULES: tuple[Callable[[SessionHistory], Iterator[Violation]], ...] = (
    rules_ledger.final_ledger,
    rules_ledger.nothing_confirmed_is_gone,
    rules_ledger.one_chain,
    rules_ledger.executed_once,
    rules_ledger.one_owner,
    rules_ledger.nothing_after_loss,
    rules_ledger.no_hidden_retry,
    rules_client.acknowledged_input,
    rules_client.own_session,
    rules_client.resumed_input,
    rules_client.journal_first,
    rules_client.one_sequence_one_event,
    rules_client.each_event_once,
    rules_client.each_sample_once,
    rules_speech.each_unit_said_once,
    rules_speech.resync_is_needed,
    rules_client.epochs,
    rules_client.spoken_under_a_lease,
    rules_commands.commands_once,
    rules_commands.commands_are_durable,
    rules_commands.played,
    rules_window.answers,
    rules_window.window,
)


def check_history(observations: Sequence[Observation]) -> Report:
    """The first observation is the run. Raises nothing for what a history says."""
    run = observations[0]
    assert isinstance(run, Run)
    sessions = by_session(observations)
    commands = [one for one in observations if isinstance(one, Command)]
    violations = list(rules_ledger.waits_where_it_wrote(commands))
    for session in sessions:
        violations += _judged(session)
    counts = Counts(
        commands=len(commands), frames=sum(isinstance(one, Frame) for one in observations)
    )
    for session in sessions:
        counts = counts.plus(_counted(session))
    return Report(
        name=run.name,
        counts=counts,
        violations=tuple(violations),
        not_judged=tuple(_not_judged(run, sessions)),
    )


def _judged(session: SessionHistory) -> Iterator[Violation]:
    """A ledger that no rule can read is one violation, not a failure of the checker."""
    for rule in _RULES:
        try:
            yield from list(rule(session))
        except msgspec.MsgspecError as error:
            yield Violation(Rule.LEDGER_UNREADABLE, session.session, str(error))


def _not_judged(run: Run, sessions: Sequence[SessionHistory]) -> Iterator[str]:
    if not run.lease_ms:
        yield f"{Rule.SPOKE_WITHOUT_LEASE}: the run does not say how long leases last"
    for session in sessions:
        reason = rules_window.why_not_replayed(session)
        if reason is not None:
            yield f"{Rule.WINDOW_DIFFERS} of {session.session}: {reason}"
        if session.reference is None:
            yield f"{Rule.ANSWER_DIFFERS} of {session.session}: no reference"


def _counted(session: SessionHistory) -> Counts:
    done = [command for command in session.executed if command.done]
    acquired = [command.replica for command in done if command.name == ScriptName.ACQUIRE]
    sends: dict[tuple[str, str | None], int] = {}
    for command in session.commands:
        if command.operation is not None:
            key = (command.name, command.operation)
            sends[key] = sends.get(key, 0) + 1
    entries = [one.write.entry for one in session.chained]
    return Counts(
        sessions=1,
        acknowledged_units=len({f.acknowledged.unit for f in session.down if f.acknowledged}),
        committed_units=entries.count("committed"),
        events=len({f.event.sequence for f in session.down if f.event}),
        refused_zombie_writes=sum(c.reply[:1] == ("lost",) for c in session.executed),
        redos=entries.count("redo"),
        resends=sum(count > 1 for count in sends.values()),
        cuts=entries.count("truncated") + entries.count("cancelled"),
        takeovers=sum(a != b for a, b in itertools.pairwise(acquired)),
    )
