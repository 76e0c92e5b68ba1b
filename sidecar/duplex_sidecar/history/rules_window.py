"""Rules about the conversation itself: its window is the plan replayed from the records, and its
answers are those of the same input when nothing happens."""

from collections.abc import Iterator

import msgspec
from msgspec import structs

from duplex_api.resolve import ResolvedCamera
from duplex_api.window import ResolvedWindow, WindowBoundary
from duplex_sidecar.history.sessions import SessionHistory
from duplex_sidecar.history.verdict import Rule, Violation
from duplex_sidecar.ledger.export import Line
from duplex_sidecar.ledger.records import (
    Accepted,
    Committed,
    Opening,
    PlanFacts,
    PromptIds,
    PromptRows,
    Truncated,
)
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import policy_of
from duplex_sidecar.window.state import (
    EMPTY_WINDOW,
    Directive,
    Overflow,
    PlanLimits,
    Rebuild,
    RebuildCause,
    WindowAppend,
    WindowLayout,
    WindowState,
)

UNIT_MARK_POSITIONS = 1
ROWS_OF_A_CHUNK = 10
CLOSURE_POSITIONS = 2


def answers(history: SessionHistory) -> Iterator[Violation]:
    """The committed tokens of each unit are the reference's."""
    if history.reference is None:
        return
    wanted = history.reference.token_ids
    for line in history.lines:
        if line.committed and line.seq <= len(wanted) and line.token_ids != wanted[line.seq - 1]:
            text = f"unit {line.seq} has other tokens than the same input undisturbed"
            yield Violation(Rule.ANSWER_DIFFERS, history.session, text)


def why_not_replayed(history: SessionHistory) -> str | None:
    """Why the window of this session is not judged; None if it is."""
    try:
        return _why_not(history)
    except msgspec.MsgspecError:
        return "its ledger cannot be read"


def _why_not(history: SessionHistory) -> str | None:
    if not history.lines:
        return "no ledger"
    opening = _opening(history.lines[0])
    if msgspec.json.decode(opening.output, type=ResolvedCamera).frames_per_unit:
        return "a camera's positions are not in the records"
    if _window(opening).boundary is not WindowBoundary.UNIT:
        return "boundaries of sentences are not in the records"
    if len(history.lines) > 1 and history.lines[1].seq > 1:
        return "the first units were trimmed"
    return None


def window(history: SessionHistory) -> Iterator[Violation]:
    """Each recorded plan, and the window in each committed state, follow from the records."""
    if why_not_replayed(history) is not None:
        return
    session = history.session
    opening = _opening(history.lines[0])
    layout = _layout(opening, frozenset(history.run.special_ids))
    policy, options = policy_of(_window(opening)), _window(opening)
    states = _committed_windows(history)
    state, completed = EMPTY_WINDOW, ()
    said: dict[int, tuple[int, ...]] = {}
    for line in history.lines:
        if line.kind == "truncated":
            state, completed = _taken_back(state, said, line, layout)
            if _named(states.get(line.hash, state)) != _named(state):
                text = f"cut after unit {line.seq}: the state has another window than the replay"
                yield Violation(Rule.WINDOW_DIFFERS, session, text)
                return
        if line.kind != "unit" or line.input is None:
            continue
        accepted, committed = _records(line)
        update = UNIT_MARK_POSITIONS + ROWS_OF_A_CHUNK * line.input.chunks
        update += layout.context_tokens if line.seq == 1 else CLOSURE_POSITIONS
        recorded = (committed or accepted).plan
        decided, state = plan(
            state,
            WindowAppend(line.seq, update, completed, WindowBoundary.UNIT),
            policy,
            layout,
            PlanLimits(None),
            Directive(rebuild=_lost(recorded), hysteresis_units=options.hysteresis_units),
        )
        if isinstance(decided, Overflow) or not _fits(decided, state, recorded):
            text = f"unit {line.seq}: recorded {recorded.prompt_tokens} positions,"
            yield Violation(Rule.WINDOW_DIFFERS, session, f"{text} replayed {state.prompt_tokens}")
            return
        if _named(states.get(line.hash, state)) != _named(state):
            text = f"unit {line.seq}: the state has another window than the replay"
            yield Violation(Rule.WINDOW_DIFFERS, session, text)
            return
        completed = line.token_ids[:-1] if line.terminator else line.token_ids
        said[line.seq] = completed


def _taken_back(
    state: WindowState, said: dict[int, tuple[int, ...]], line: Line, layout: WindowLayout
) -> tuple[WindowState, tuple[int, ...]]:
    """The window after a truncation, and what is left of the last answer. Each id that is taken
    back is a position less; an answer's terminator is only ever replaced."""
    record = msgspec.json.decode(line.records[-1], type=Truncated)
    gone: dict[int, int] = {}
    for seq in range(record.unit, record.through + 1):
        ids = said.get(seq, ())
        said[seq] = ids[: record.token_index if seq == record.unit else 0]
        gone[seq] = len(ids) - len(said[seq])
    units = tuple(
        structs.replace(
            unit,
            tokens=unit.tokens - gone.get(unit.seq, 0),
            spoken_ids=tuple(id_ for id_ in said[unit.seq] if id_ not in layout.special_ids)
            if unit.spoken_ids
            else (),
        )
        for unit in state.units
    )
    less = sum(tokens for seq, tokens in gone.items() if seq < record.seq)
    window = structs.replace(
        state,
        prompt_tokens=state.prompt_tokens - less,
        open_start=None if state.open_start is None else state.open_start - less,
        units=units,
        unit_tokens=sum(unit.tokens for unit in units),
    )
    return window, said[record.seq]


def _fits(decided: object, state: WindowState, recorded: PlanFacts) -> bool:
    dropped = decided.drop_units if isinstance(decided, Rebuild) else 0
    return (state.prompt_tokens, dropped) == (recorded.prompt_tokens, recorded.dropped_units)


def _named(state: WindowState) -> object:
    """All of a window but where its sentences end, which the records do not say."""
    units = tuple((unit.seq, unit.tokens, unit.spoken_ids) for unit in state.units)
    sizes = (state.prompt_tokens, state.open_start, state.unit_tokens)
    return sizes, units, state.previous_ids


def _lost(recorded: PlanFacts) -> RebuildCause | None:
    """Why the stream was gone, apart from any slide."""
    cause = RebuildCause(recorded.cause) if recorded.cause else None
    return None if cause is RebuildCause.SLIDE else cause


def _committed_windows(history: SessionHistory) -> dict[str, WindowState]:
    """By the hash of the committed entry."""
    return {
        one.write.hash: one.write.window for one in history.chained if one.write.window is not None
    }


def _opening(line: Line) -> Opening:
    return msgspec.json.decode(line.records[0], type=Opening)


def _window(opening: Opening) -> ResolvedWindow:
    return msgspec.json.decode(opening.window, type=ResolvedWindow)


def _records(line: Line) -> tuple[Accepted, Committed | None]:
    accepted = msgspec.json.decode(line.records[0], type=Accepted)
    last = line.records[-1]
    return accepted, msgspec.json.decode(last, type=Committed) if line.committed else None


def _layout(opening: Opening, special_ids: frozenset[int]) -> WindowLayout:
    prefix, suffix, marker = (part.ids for part in opening.parts if isinstance(part, PromptIds))
    reference = sum(part.rows for part in opening.parts if isinstance(part, PromptRows))
    return WindowLayout(
        context_tokens=len(prefix) + reference + len(suffix),
        prefix_tokens=len(prefix) + reference,
        suffix_tokens=len(suffix),
        marker_tokens=len(marker),
        special_ids=special_ids,
    )
