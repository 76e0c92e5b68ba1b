"""The planner on the contract's worked examples, its limits and its options."""

import time

import msgspec
import pytest

from duplex_api.window import WindowBoundary, WindowMode
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.state import (
    EMPTY_WINDOW,
    Directive,
    Extend,
    Overflow,
    PlanLimits,
    Rebuild,
    RebuildCause,
    WindowAppend,
    WindowLayout,
    WindowState,
    WindowUnit,
)

pytestmark = pytest.mark.unit

LAYOUT = WindowLayout(
    context_tokens=3, prefix_tokens=2, suffix_tokens=1, marker_tokens=2, special_ids=frozenset({9})
)
BASIC = WindowPolicy(WindowMode.BASIC, 16, 9, 500, 24)
CONTEXT = WindowPolicy(WindowMode.CONTEXT, 8000, 6000, 500, 1)
OFF = WindowPolicy(WindowMode.OFF, 16, 9, 500, 1)
NO_LIMIT = PlanLimits(None)
PLAIN = Directive()


def window(prompt_tokens: int, open_start: int | None = None) -> WindowState:
    return WindowState(prompt_tokens, open_start, (), 0, ())


@pytest.mark.parametrize(
    ("update", "open_start", "dropped", "replacement"),
    [(21, 0, 12, 19), (21, None, 9, 22), (20, None, 9, 21), (8, None, 9, 9)],
    ids=["12/19", "9/22", "21-token plan", "9/9"],
)
def test_worked_examples(
    update: int, open_start: int | None, dropped: int, replacement: int
) -> None:
    decision, after = plan(
        window(9, open_start), WindowAppend(2, update, (40,)), BASIC, LAYOUT, NO_LIMIT, PLAIN
    )
    assert decision == Rebuild(RebuildCause.SLIDE, 1, dropped, 1, (), replacement)
    assert after == WindowState(replacement, 3, (), 0, ())


@pytest.mark.parametrize(
    ("limit", "fits"),
    [(20, False), (21, False), (22, True), (25, True)],
    ids=["limit 20", "limit 21", "limit 22", "limit 25"],
)
def test_a_plan_of_21_tokens_needs_a_limit_of_22(limit: int, fits: bool) -> None:
    state = window(9)
    decision, after = plan(
        state, WindowAppend(2, 20, (40,)), BASIC, LAYOUT, PlanLimits(limit), PLAIN
    )
    if fits:
        assert isinstance(decision, Rebuild)
        assert decision.replacement_tokens == 21
    else:
        assert isinstance(decision, Overflow)
        assert decision.projected_tokens == 21
        assert isinstance(decision.refused, Rebuild)
        assert after is state


@pytest.mark.parametrize(("limit", "step", "fits"), [(19, 1, True), (18, 1, False), (19, 2, False)])
def test_an_extension_leaves_room_for_a_step(limit: int, step: int, fits: bool) -> None:
    decision, _ = plan(
        window(9), WindowAppend(2, 8, (40,)), OFF, LAYOUT, PlanLimits(limit, step), PLAIN
    )
    assert isinstance(decision, Extend) is fits


def test_context_window_keeps_what_was_said() -> None:
    opened, first = plan(EMPTY_WINDOW, WindowAppend(1, 9, ()), CONTEXT, LAYOUT, NO_LIMIT, PLAIN)
    assert opened == Extend(position_tokens=0, prompt_tokens=9)
    second, state = plan(first, WindowAppend(2, 8, (40,)), CONTEXT, LAYOUT, NO_LIMIT, PLAIN)
    assert second == Extend(position_tokens=10, prompt_tokens=18)
    assert state.open_start == 12
    third, state = plan(state, WindowAppend(3, 8, (50,)), CONTEXT, LAYOUT, NO_LIMIT, PLAIN)
    assert third == Rebuild(RebuildCause.SLIDE, 1, 9, 1, (40,), 21)
    assert [unit.tokens for unit in state.units] == [9]


def test_previous_keeps_the_newest_ids_and_no_special_ones() -> None:
    policy = WindowPolicy(WindowMode.CONTEXT, 8000, 6000, 2, 1)
    state = window(9)
    for seq, said in ((2, (40, 9, 41, 42)), (3, (9,)), (4, (50,)), (5, ())):
        _, state = plan(state, WindowAppend(seq, 8, said), policy, LAYOUT, NO_LIMIT, PLAIN)
    assert state.previous_ids == (42, 50)


def test_zero_start_and_zero_prefix_are_values() -> None:
    layout = WindowLayout(0, 0, 0, 0, frozenset())
    decision, after = plan(
        window(5),
        WindowAppend(2, 4, (7,)),
        WindowPolicy(WindowMode.BASIC, 9, 1, 5, 5),
        layout,
        NO_LIMIT,
        PLAIN,
    )
    assert decision == Rebuild(RebuildCause.SLIDE, 1, 8, 1, (), 2)
    assert after.open_start == 0


def test_an_unmarked_previous_region_costs_its_ids_only() -> None:
    layout = WindowLayout(3, 2, 1, 0, frozenset())
    state = WindowState(18, 12, (WindowUnit(1, 9, (40,), WindowBoundary.UNIT),), 9, ())
    decision, after = plan(state, WindowAppend(3, 8, (50,)), CONTEXT, layout, NO_LIMIT, PLAIN)
    assert isinstance(decision, Rebuild)
    assert decision.replacement_tokens == 27 + 1 - 9
    assert after.open_start == 3 + 1 + 9


def test_nothing_is_left_means_no_rebuild() -> None:
    layout = WindowLayout(0, 0, 0, 0, frozenset())
    policy = WindowPolicy(WindowMode.BASIC, 3, 1, 5, 5)
    decision, after = plan(window(4), WindowAppend(2, 1, (7,)), policy, layout, NO_LIMIT, PLAIN)
    assert decision == Extend(5, 6)
    assert [unit.tokens for unit in after.units] == [7]


def test_mode_off_keeps_no_units() -> None:
    state = EMPTY_WINDOW
    for seq in range(1, 200):
        answer = (5, 6) if seq > 1 else ()
        decision, state = plan(state, WindowAppend(seq, 13, answer), OFF, LAYOUT, NO_LIMIT, PLAIN)
        assert isinstance(decision, Extend)
    assert state == WindowState(199 * 13 + 198 * 2, None, (), 0, ())


@pytest.mark.parametrize("policy", [OFF, BASIC, CONTEXT])
def test_a_lost_stream_gets_the_same_prompt_as_a_whole(policy: WindowPolicy) -> None:
    state, append = window(9), WindowAppend(2, 3, (40,))
    extended, after_extend = plan(state, append, policy, LAYOUT, NO_LIMIT, PLAIN)
    rebuilt, after_rebuild = plan(
        state, append, policy, LAYOUT, NO_LIMIT, Directive(rebuild=RebuildCause.MOVE)
    )
    assert isinstance(extended, Extend)
    assert rebuilt == Rebuild(RebuildCause.MOVE, 0, 0, None, (), extended.prompt_tokens)
    assert after_rebuild == after_extend


def units(count: int, ends: dict[int, WindowBoundary] | None = None) -> tuple[WindowUnit, ...]:
    return tuple(
        WindowUnit(seq, 13, (seq,), (ends or {}).get(seq, WindowBoundary.UNIT))
        for seq in range(1, count + 1)
    )


def full_context(count: int, ends: dict[int, WindowBoundary] | None = None) -> WindowState:
    return WindowState(3 + 13 * count + 11, 3 + 13 * count, units(count, ends), 13 * count, ())


def slide(state: WindowState, max_units: int, directive: Directive) -> Rebuild:
    policy = WindowPolicy(WindowMode.CONTEXT, 8000, 6000, 500, max_units)
    append = WindowAppend(len(state.units) + 2, 13, ())
    decision, _ = plan(state, append, policy, LAYOUT, NO_LIMIT, directive)
    assert isinstance(decision, Rebuild)
    return decision


def test_hysteresis_drops_more_at_once_but_never_early() -> None:
    assert slide(full_context(24), 24, Directive(hysteresis_units=6)).drop_units == 6
    assert slide(full_context(2), 2, Directive(hysteresis_units=6)).drop_units == 3
    policy = WindowPolicy(WindowMode.CONTEXT, 8000, 6000, 500, 24)
    decision, _ = plan(
        full_context(23),
        WindowAppend(25, 13, ()),
        policy,
        LAYOUT,
        NO_LIMIT,
        Directive(hysteresis_units=6),
    )
    assert isinstance(decision, Extend)


def test_a_slide_goes_on_to_a_boundary_or_ends_where_it_is_due() -> None:
    ends = {3: WindowBoundary.SENTENCE, 6: WindowBoundary.TURN}
    state = full_context(10, ends)
    for boundary, limit, dropped in (
        (WindowBoundary.UNIT, 8, 1),
        (WindowBoundary.SENTENCE, 8, 3),
        (WindowBoundary.TURN, 8, 6),
        (WindowBoundary.TURN, 5, 6),
        (WindowBoundary.TURN, 4, 1),
    ):
        directive = Directive(boundary=boundary, boundary_limit_units=limit)
        assert slide(state, 10, directive).drop_units == dropped


def test_states_and_plans_are_serialisable() -> None:
    state = full_context(24)
    policy = WindowPolicy(WindowMode.CONTEXT, 8000, 6000, 500, 24)
    decision, after = plan(state, WindowAppend(26, 13, (5,)), policy, LAYOUT, NO_LIMIT, PLAIN)
    packed = msgspec.msgpack.encode((decision, after))
    assert msgspec.msgpack.decode(packed, type=tuple[Rebuild, WindowState]) == (decision, after)


@pytest.mark.parametrize(
    ("mode", "high", "low", "max_units"),
    [
        (WindowMode.OFF, 8000, 6000, 24),
        (WindowMode.BASIC, 9000, 6000, 24),
        (WindowMode.BASIC, 7000, 6000, 24),
        (WindowMode.BASIC, 7000, 1, 24),
        (WindowMode.CONTEXT, 8000, 6000, 600),
        (WindowMode.CONTEXT, 8000, 6000, 700),
    ],
)
def test_planning_600_units_takes_at_most_50_microseconds(
    mode: WindowMode, high: int, low: int, max_units: int
) -> None:
    state = full_context(600)
    policy = WindowPolicy(mode, high, low, 500, max_units)
    append = WindowAppend(602, 13, tuple(range(100, 119)))
    best = min(_timed(state, append, policy) for _ in range(200))
    assert best <= 50e-6 * times_slower()


def times_slower() -> float:
    """Than a processor on which the bound holds with room to spare; at least 1."""

    def counted() -> float:
        start = time.perf_counter()
        for number in range(1_000):
            _ = number + 1
        return time.perf_counter() - start

    return max(1.0, min(counted() for _ in range(200)) / 20e-6)


def _timed(state: WindowState, append: WindowAppend, policy: WindowPolicy) -> float:
    start = time.perf_counter()
    plan(state, append, policy, LAYOUT, NO_LIMIT, PLAIN)
    return time.perf_counter() - start
