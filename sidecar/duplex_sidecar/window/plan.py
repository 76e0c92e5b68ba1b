"""Which units stay (contract section B). One pure function: (plan, the state after its admission).

The caller keeps the new state only once the append is admitted and recorded; until then the old one
is the truth. The same inputs always give the same plan, so a redo replays it.
"""

from itertools import islice

from msgspec import structs

from duplex_api.window import WindowBoundary, WindowMode
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.state import (
    Directive,
    Extend,
    Overflow,
    Plan,
    PlanLimits,
    Rebuild,
    RebuildCause,
    WindowAppend,
    WindowLayout,
    WindowState,
    WindowUnit,
    previous_tokens,
)

CLOSURE_TOKENS = 2
"""Terminator and end of unit: they arrive with the next append and belong to the completed one."""


def plan(
    state: WindowState,
    append: WindowAppend,
    policy: WindowPolicy,
    layout: WindowLayout,
    limits: PlanLimits,
    directive: Directive,
) -> tuple[Plan, WindowState]:
    """Decide how `append` reaches the Thinker. An overflow comes with `state` itself."""
    position = state.prompt_tokens + len(append.completed_ids)
    projected = position + append.update_tokens
    drop = 0
    closed = state
    if policy.mode is not WindowMode.OFF and append.seq > 1:
        closed = _close_unit(state, append, policy, layout, position)
        drop = _units_to_drop(closed, projected, policy, directive)
    after = _without_oldest(closed, drop, projected, policy, layout) if drop else None
    decision: Extend | Rebuild
    if after is not None:
        decision = _slide(closed, after, drop, directive.rebuild or RebuildCause.SLIDE)
    else:
        after = structs.replace(closed, prompt_tokens=projected)
        decision = _keep(position, after, directive)
    room = max(1, limits.sampled_tokens_per_step)
    if limits.max_model_tokens is not None and after.prompt_tokens + room > limits.max_model_tokens:
        return Overflow(refused=decision, projected_tokens=after.prompt_tokens), state
    return decision, after


def _close_unit(
    state: WindowState,
    append: WindowAppend,
    policy: WindowPolicy,
    layout: WindowLayout,
    position: int,
) -> WindowState:
    """The state in which the previous append, now answered, is a unit of the window."""
    boundary = position + CLOSURE_TOKENS
    open_start = layout.context_tokens if state.open_start is None else state.open_start
    tokens = boundary - open_start
    if tokens <= 0:  # nothing there yet: the span joins the next unit
        return state
    spoken: tuple[int, ...] = ()
    if policy.mode is WindowMode.CONTEXT:
        spoken = tuple(id_ for id_ in append.completed_ids if id_ not in layout.special_ids)
    unit = WindowUnit(append.seq - 1, tokens, spoken, append.completed_ends)
    return WindowState(
        prompt_tokens=state.prompt_tokens,
        open_start=boundary,
        units=(*state.units, unit),
        unit_tokens=state.unit_tokens + tokens,
        previous_ids=state.previous_ids,
    )


def _units_to_drop(
    closed: WindowState, projected: int, policy: WindowPolicy, directive: Directive
) -> int:
    """How many of the oldest units leave; 0 when nothing is due."""
    units = closed.units
    due = 0
    if policy.mode is WindowMode.CONTEXT:
        due = len(units) - policy.context_max_units
    elif projected > policy.basic_high_tokens:
        excess = projected - policy.basic_low_tokens
        for unit in units:
            if excess <= 0:
                break
            excess -= unit.tokens
            due += 1
    if due <= 0:
        return 0
    due = min(len(units), max(due, directive.hysteresis_units))
    return _at_boundary(units, due, directive)


def _at_boundary(units: tuple[WindowUnit, ...], due: int, directive: Directive) -> int:
    """`due`, or a little more if that makes the last dropped unit end at the wished boundary."""
    if directive.boundary is WindowBoundary.UNIT:
        return due
    wished = (
        (WindowBoundary.TURN,)
        if directive.boundary is WindowBoundary.TURN
        else (WindowBoundary.SENTENCE, WindowBoundary.TURN)
    )
    last = min(len(units), due + directive.boundary_limit_units)
    for drop in range(due, last + 1):
        if units[drop - 1].ends in wished:
            return drop
    return due


def _without_oldest(
    closed: WindowState, drop: int, projected: int, policy: WindowPolicy, layout: WindowLayout
) -> WindowState | None:
    """The state without its `drop` oldest units; None where no prompt would be left."""
    dropped_tokens = sum(unit.tokens for unit in islice(closed.units, drop))
    previous_ids = closed.previous_ids
    keep = layout.context_tokens
    if policy.mode is WindowMode.CONTEXT:
        said = [*previous_ids]
        for unit in islice(closed.units, drop):
            said.extend(unit.spoken_ids)
        previous_ids = tuple(said[-policy.context_previous_max_tokens :])
        region = previous_tokens(layout, previous_ids)
        projected += region - previous_tokens(layout, closed.previous_ids)
        prefix = layout.context_tokens if layout.prefix_tokens is None else layout.prefix_tokens
        keep = prefix + region + layout.suffix_tokens
    replacement = projected - dropped_tokens
    if replacement <= 0:
        return None
    unit_tokens = closed.unit_tokens - dropped_tokens
    return WindowState(
        prompt_tokens=replacement,
        open_start=keep + unit_tokens,
        units=closed.units[drop:],
        unit_tokens=unit_tokens,
        previous_ids=previous_ids,
    )


def _slide(closed: WindowState, after: WindowState, drop: int, cause: RebuildCause) -> Rebuild:
    return Rebuild(
        cause=cause,
        drop_units=drop,
        dropped_tokens=closed.unit_tokens - after.unit_tokens,
        dropped_through_seq=closed.units[drop - 1].seq,
        previous_ids=after.previous_ids,
        replacement_tokens=after.prompt_tokens,
    )


def _keep(position: int, after: WindowState, directive: Directive) -> Extend | Rebuild:
    """Nothing leaves. A stream that is gone gets the same prompt as a whole."""
    if directive.rebuild is None:
        return Extend(position_tokens=position, prompt_tokens=after.prompt_tokens)
    return Rebuild(
        cause=directive.rebuild,
        drop_units=0,
        dropped_tokens=0,
        dropped_through_seq=None,
        previous_ids=after.previous_ids,
        replacement_tokens=after.prompt_tokens,
    )
