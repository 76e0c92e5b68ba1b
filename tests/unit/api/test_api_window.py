"""Window policies: resolution order, merging, and every way a policy can be wrong."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_api.window import (
    DEFAULT_WINDOW,
    WINDOW_FIELDS,
    ResolvedWindow,
    WindowBoundary,
    WindowConfigError,
    WindowLimits,
    WindowMode,
    WindowPolicy,
    WindowStrategy,
    order_problems,
    resolve_window,
)

pytestmark = pytest.mark.unit

NO_LIMITS = WindowLimits()


def problems_of(
    session: WindowPolicy | None, preset: WindowPolicy | None, limits: WindowLimits
) -> dict[str, str]:
    with pytest.raises(WindowConfigError) as caught:
        resolve_window(session, preset, limits, preset_path="pool.spec.windowPresets.p")
    assert caught.value.code == "invalid_sliding_window_config"
    return {problem.path: problem.allowed for problem in caught.value.problems}


def test_defaults_are_the_contract_s() -> None:
    resolved = resolve_window(None, None, NO_LIMITS)
    assert resolved == DEFAULT_WINDOW
    assert dataclasses.astuple(resolved) == (
        WindowMode.OFF,
        8000,
        6000,
        500,
        24,
        1,
        WindowBoundary.UNIT,
        WindowStrategy.REPREFILL,
    )


POLICIES = st.builds(
    WindowPolicy,
    mode=st.none() | st.sampled_from(WindowMode),
    basic_window_high_tokens=st.none() | st.integers(5000, 9000),
    basic_window_low_tokens=st.none() | st.integers(1, 4999),
    context_previous_max_tokens=st.none() | st.integers(1, 900),
    context_max_units=st.none() | st.integers(1, 90),
    hysteresis_units=st.none() | st.integers(1, 9),
    boundary=st.none() | st.sampled_from(WindowBoundary),
    strategy=st.none() | st.sampled_from(WindowStrategy),
)


@given(session=POLICIES, preset=POLICIES)
def test_every_field_comes_from_the_first_that_names_it(
    session: WindowPolicy, preset: WindowPolicy
) -> None:
    # The default low mark (6000) may lie above a named high mark: then it has to be refused.
    low_named = (
        session.basic_window_low_tokens is not None or preset.basic_window_low_tokens is not None
    )
    high = session.basic_window_high_tokens or preset.basic_window_high_tokens or 8000
    if not low_named and high <= 6000:
        with pytest.raises(WindowConfigError):
            resolve_window(session, preset, NO_LIMITS)
        return
    resolved = resolve_window(session, preset, NO_LIMITS)
    for field in WINDOW_FIELDS:
        named = [getattr(policy, field) for policy in (session, preset, DEFAULT_WINDOW)]
        assert getattr(resolved, field) == next(value for value in named if value is not None)


def test_resolving_a_pinned_policy_changes_nothing() -> None:
    pinned = resolve_window(WindowPolicy(mode=WindowMode.CONTEXT), None, NO_LIMITS).as_policy()
    other_preset = WindowPolicy(mode=WindowMode.BASIC, context_max_units=3)
    assert resolve_window(pinned, other_preset, NO_LIMITS).as_policy() == pinned


def test_inverted_watermarks_name_the_field_that_was_set() -> None:
    low_set = WindowPolicy(basic_window_low_tokens=9000)
    assert problems_of(low_set, None, NO_LIMITS).keys() == {"spec.window.basicWindowLowTokens"}
    high_set = WindowPolicy(basic_window_high_tokens=500)
    found = problems_of(high_set, None, NO_LIMITS)
    assert found.keys() == {"spec.window.basicWindowHighTokens"}
    assert "6001 or more" in found["spec.window.basicWindowHighTokens"]


def test_equal_watermarks_are_refused() -> None:
    both = WindowPolicy(basic_window_low_tokens=7, basic_window_high_tokens=7)
    assert problems_of(both, None, NO_LIMITS).keys() == {"spec.window.basicWindowLowTokens"}
    assert [problem.path for problem in order_problems(both, "p")] == ["p.basicWindowLowTokens"]
    one = WindowPolicy(basic_window_low_tokens=9000)
    assert order_problems(one, "p") == ()


def test_a_value_of_the_preset_is_reported_there() -> None:
    preset = WindowPolicy(mode=WindowMode.BASIC, basic_window_high_tokens=9000)
    found = problems_of(WindowPolicy(), preset, WindowLimits(max_model_tokens=8192))
    assert found == {"pool.spec.windowPresets.p.basicWindowHighTokens": "1 to 8191"}


@pytest.mark.parametrize(("length", "fits"), [(8000, False), (8001, True)])
def test_the_model_s_length_bounds_what_a_mode_uses(length: int, fits: bool) -> None:
    policy = WindowPolicy(mode=WindowMode.BASIC)
    limits = WindowLimits(max_model_tokens=length)
    if fits:
        assert resolve_window(policy, None, limits).basic_window_high_tokens == 8000
    else:
        assert problems_of(policy, None, limits) == {
            "spec.window.basicWindowHighTokens": "1 to 7999"
        }


def test_defaults_that_no_mode_uses_are_no_problem() -> None:
    small = WindowLimits(max_model_tokens=600, least_unit_tokens=13)
    assert resolve_window(None, None, small).mode is WindowMode.OFF
    assert resolve_window(WindowPolicy(mode=WindowMode.CONTEXT), None, small).context_max_units


def test_units_that_cannot_fit_are_refused() -> None:
    policy = WindowPolicy(mode=WindowMode.CONTEXT, context_max_units=200)
    limits = WindowLimits(max_model_tokens=2048, least_unit_tokens=13)
    assert problems_of(policy, None, limits) == {"spec.window.contextMaxUnits": "1 to 157"}


def test_all_problems_are_told_at_once() -> None:
    policy = WindowPolicy(
        mode=WindowMode.CONTEXT,
        basic_window_high_tokens=9000,
        basic_window_low_tokens=9500,
        context_previous_max_tokens=9999,
    )
    assert len(problems_of(policy, None, WindowLimits(max_model_tokens=8192))) >= 3


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "7", None, 2**31])
@pytest.mark.parametrize("field", ["basicWindowHighTokens", "contextMaxUnits", "hysteresisUnits"])
def test_numbers_are_positive_integers(field: str, wrong: Any) -> None:
    if wrong is None:
        assert WindowPolicy.model_validate({field: wrong}) == WindowPolicy()
        return
    with pytest.raises(ValueError, match=field):
        WindowPolicy.model_validate({field: wrong})


def test_the_resolved_policy_names_every_field() -> None:
    assert tuple(field.name for field in dataclasses.fields(ResolvedWindow)) == WINDOW_FIELDS
