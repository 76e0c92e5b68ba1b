"""Window options as they come on the wire."""

import pytest

from duplex_api.window import DEFAULT_WINDOW, WindowMode
from duplex_sidecar.window.policy import (
    WindowOptionsError,
    WindowPolicy,
    parse_window_options,
    policy_of,
)

pytestmark = pytest.mark.unit


def test_no_option_is_no_policy() -> None:
    assert parse_window_options({}) is None
    assert parse_window_options({"auto_response": True}) is None


def test_absent_options_have_their_defaults() -> None:
    assert parse_window_options({"sliding_window_mode": "context"}) == WindowPolicy(
        WindowMode.CONTEXT, 8000, 6000, 500, 24
    )


def test_numbers_are_read_leniently() -> None:
    policy = parse_window_options({"context_max_units": " 7 ", "basic_window_low_tokens": 12.7})
    assert policy is not None
    assert (policy.context_max_units, policy.basic_low_tokens) == (7, 12)


@pytest.mark.parametrize(
    ("options", "at_fault"),
    [
        ({"sliding_window_mode": "Basic"}, "sliding_window_mode"),
        ({"sliding_window_mode": None}, "sliding_window_mode"),
        ({"sliding_window_mode": []}, "sliding_window_mode"),
        ({"context_max_units": True}, "context_max_units"),
        ({"context_max_units": 0}, "context_max_units"),
        ({"context_max_units": 0.4}, "context_max_units"),
        ({"context_max_units": float("nan")}, "context_max_units"),
        ({"context_max_units": float("inf")}, "context_max_units"),
        ({"context_max_units": None}, "context_max_units"),
        ({"context_previous_max_tokens": "x"}, "context_previous_max_tokens"),
        ({"context_previous_max_tokens": "9" * 9_999}, "context_previous_max_tokens"),
        ({"basic_window_high_tokens": 6000}, "basic_window_low_tokens"),
        ({"basic_window_low_tokens": 8000}, "basic_window_low_tokens"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], at_fault: str) -> None:
    with pytest.raises(WindowOptionsError) as caught:
        parse_window_options(options)
    assert caught.value.code == "invalid_sliding_window_config"
    assert caught.value.option == at_fault
    assert len(str(caught.value)) < 300


def test_a_manifest_gives_the_same_policy() -> None:
    assert policy_of(DEFAULT_WINDOW) == parse_window_options({"sliding_window_mode": "off"})
