"""The window policy as the planner takes it, and the wire options that give one (contract B)."""

import reprlib
from collections.abc import Mapping
from typing import Final

import msgspec

from duplex_api.window import DEFAULT_WINDOW, ResolvedWindow, WindowMode

MODE_OPTION: Final = "sliding_window_mode"
_COUNT_OPTIONS: Final = {
    "basic_window_high_tokens": "basic_high_tokens",
    "basic_window_low_tokens": "basic_low_tokens",
    "context_previous_max_tokens": "context_previous_max_tokens",
    "context_max_units": "context_max_units",
}
OPTIONS: Final = (MODE_OPTION, *_COUNT_OPTIONS)


class WindowPolicy(msgspec.Struct, frozen=True):
    """A complete, valid policy; fixed when the session opens. Tokens are Thinker positions."""

    mode: WindowMode
    basic_high_tokens: int
    basic_low_tokens: int
    context_previous_max_tokens: int
    context_max_units: int


class WindowOptionsError(ValueError):
    """Window options that cannot be run. `option` is the one at fault."""

    code: Final = "invalid_sliding_window_config"

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


def policy_of(window: ResolvedWindow) -> WindowPolicy:
    """The planner's policy of a resolved session manifest."""
    return WindowPolicy(
        mode=window.mode,
        basic_high_tokens=window.basic_window_high_tokens,
        basic_low_tokens=window.basic_window_low_tokens,
        context_previous_max_tokens=window.context_previous_max_tokens,
        context_max_units=window.context_max_units,
    )


def parse_window_options(options: Mapping[str, object]) -> WindowPolicy | None:
    """The policy that the options of `session.extra_body` name, None when they name none.

    Options that are absent have their defaults; others than `OPTIONS` are not looked at.
    Raises WindowOptionsError.
    """
    if not any(name in options for name in OPTIONS):
        return None
    counts = {
        field: _count(name, options[name]) if name in options else getattr(DEFAULT_WINDOW, name)
        for name, field in _COUNT_OPTIONS.items()
    }
    policy = WindowPolicy(mode=_mode(options), **counts)
    if policy.basic_low_tokens >= policy.basic_high_tokens:
        raise WindowOptionsError(
            "basic_window_low_tokens",
            f"{policy.basic_low_tokens} is not below basic_window_high_tokens,"
            f" which is {policy.basic_high_tokens}",
        )
    return policy


def _mode(options: Mapping[str, object]) -> WindowMode:
    given = options.get(MODE_OPTION, DEFAULT_WINDOW.mode)
    try:
        return WindowMode(given)
    except ValueError:
        allowed = ", ".join(WindowMode)
        raise WindowOptionsError(
            MODE_OPTION, f"{reprlib.repr(given)} is not one of {allowed}"
        ) from None


def _count(name: str, given: object) -> int:
    """A count above zero: numeric strings are read, fractions cut off, booleans refused."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise WindowOptionsError(name, f"{reprlib.repr(given)} is not a number")
    try:
        count = int(given)
    except (ValueError, OverflowError):
        raise WindowOptionsError(name, f"{reprlib.repr(given)} is not a number") from None
    if count <= 0:
        raise WindowOptionsError(name, f"{reprlib.repr(given)} is not above zero")
    return count
