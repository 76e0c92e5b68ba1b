"""Which units the Thinker still sees: what a user may say, the defaults, and the resolution.

The only home of window defaults. Effective policy = session > pool preset > defaults, field by
field: naming one field never resets another. Source of the numbers: contract section B.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict

from duplex_api.base import ApiModel, PositiveCount, cel_rules
from duplex_api.problems import Problem


class WindowMode(StrEnum):
    """off: everything stays. basic: between two watermarks of tokens. context: a fixed number of
    units and the text of earlier replies."""

    OFF = "off"
    BASIC = "basic"
    CONTEXT = "context"


class WindowBoundary(StrEnum):
    """Where a slide may cut."""

    UNIT = "unit"
    SENTENCE = "sentence"
    TURN = "turn"


class WindowStrategy(StrEnum):
    """How a slide reaches the engine: a fresh exact prompt, or cache rows moved (approximate)."""

    REPREFILL = "reprefill"
    SHIFT = "shift"


class WindowPolicy(ApiModel):
    """A window policy, as far as its author names it. An absent field means: as preset."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "!has(self.basicWindowLowTokens) || !has(self.basicWindowHighTokens)"
                " || self.basicWindowLowTokens < self.basicWindowHighTokens",
                "basicWindowLowTokens must be below basicWindowHighTokens",
            )
        )
    )

    mode: WindowMode | None = None
    """off, basic or context. Quote "off": YAML reads the bare word as a boolean."""
    basic_window_high_tokens: PositiveCount | None = None
    """basic: above this many tokens in the window the oldest units are dropped."""
    basic_window_low_tokens: PositiveCount | None = None
    """basic: a slide drops units until at most this many tokens stay."""
    context_previous_max_tokens: PositiveCount | None = None
    """context: the newest tokens of earlier replies that are kept as text."""
    context_max_units: PositiveCount | None = None
    """context: units that stay whole."""
    hysteresis_units: PositiveCount | None = None
    """Units dropped at once by a slide. More than 1 makes rebuilds rarer and changes outputs."""
    boundary: WindowBoundary | None = None
    """Where a slide may cut: at any unit, at a sentence end, at a turn end."""
    strategy: WindowStrategy | None = None
    """reprefill is exact. shift would move cache rows and promise units and plans, not tokens: it
    is not served, and a session that names it is refused."""


@dataclass(frozen=True, slots=True)
class ResolvedWindow:
    """A complete policy. Pinned in `status.window` at first placement."""

    mode: WindowMode
    basic_window_high_tokens: int
    basic_window_low_tokens: int
    context_previous_max_tokens: int
    context_max_units: int
    hysteresis_units: int
    boundary: WindowBoundary
    strategy: WindowStrategy

    def as_policy(self) -> WindowPolicy:
        """The same as a policy that names every field (for `status.window`)."""
        return WindowPolicy(**{name: getattr(self, name) for name in WINDOW_FIELDS})


DEFAULT_WINDOW = ResolvedWindow(
    mode=WindowMode.OFF,
    basic_window_high_tokens=8000,
    basic_window_low_tokens=6000,
    context_previous_max_tokens=500,
    context_max_units=24,
    hysteresis_units=1,
    boundary=WindowBoundary.UNIT,
    strategy=WindowStrategy.REPREFILL,
)

WINDOW_FIELDS = tuple(WindowPolicy.model_fields)


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """What the model allows. None: not known here (for example while a manifest is only read).

    max_model_tokens: positions of the Thinker. least_unit_tokens: positions of the shortest unit.
    """

    max_model_tokens: int | None = None
    least_unit_tokens: int | None = None


class WindowConfigError(ValueError):
    """A policy that cannot be run. `problems` names every field at fault and what is allowed."""

    code = "invalid_sliding_window_config"

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


def resolve_window(
    session: WindowPolicy | None,
    pool_preset: WindowPolicy | None,
    limits: WindowLimits,
    *,
    path: str = "spec.window",
    preset_path: str = "pool.spec.windowPresets",
) -> ResolvedWindow:
    """The policy that a session runs with: session > pool preset > defaults, field by field.

    Raises WindowConfigError; its paths lie under `path` or, where the pool's preset named the
    value, under `preset_path`.
    """
    session = session or _EMPTY
    preset = pool_preset or _EMPTY
    values = {
        field: _first_named(getattr(session, field), getattr(preset, field), default)
        for field, default in _DEFAULTS.items()
    }
    resolved = ResolvedWindow(**values)
    paths = {
        field: _field_path(
            path if _named(session, field) or not _named(preset, field) else preset_path, field
        )
        for field in WINDOW_FIELDS
    }
    named = frozenset(f for f in WINDOW_FIELDS if _named(session, f) or _named(preset, f))
    problems = (
        *_watermarks(resolved, paths, named),
        *_limit_problems(resolved, paths, named, limits),
    )
    if problems:
        raise WindowConfigError(problems)
    return resolved


_EMPTY = WindowPolicy()
_DEFAULTS: dict[str, Any] = {field: getattr(DEFAULT_WINDOW, field) for field in WINDOW_FIELDS}


def _first_named(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _named(policy: WindowPolicy, field: str) -> bool:
    return getattr(policy, field) is not None


def _field_path(prefix: str, field: str) -> str:
    return f"{prefix}.{WindowPolicy.model_fields[field].alias}"


def order_problems(policy: WindowPolicy, path: str) -> tuple[Problem, ...]:
    """What is wrong with a policy taken alone: the CRD's own rule, for whoever reads a manifest."""
    low, high = policy.basic_window_low_tokens, policy.basic_window_high_tokens
    if low is None or high is None or low < high:
        return ()
    return (_low_problem(low, high, _field_path(path, "basic_window_low_tokens")),)


def _watermarks(
    window: ResolvedWindow, paths: Mapping[str, str], named: frozenset[str]
) -> Iterator[Problem]:
    """Checked in every mode, whoever named them, as the contract does."""
    low, high = window.basic_window_low_tokens, window.basic_window_high_tokens
    if low < high:
        return
    if "basic_window_low_tokens" in named:
        yield _low_problem(low, high, paths["basic_window_low_tokens"])
    else:
        yield Problem(
            path=paths["basic_window_high_tokens"],
            message=f"{high} is not above basicWindowLowTokens, which is {low} by default",
            allowed=f"{low + 1} or more, or name a basicWindowLowTokens below {high}",
        )


def _low_problem(low: int, high: int, path: str) -> Problem:
    return Problem(
        path=path,
        message=f"{low} is not below basicWindowHighTokens, which is {high}",
        allowed=f"less than {high}, or a basicWindowHighTokens above {low}",
    )


def _limit_problems(
    window: ResolvedWindow,
    paths: Mapping[str, str],
    named: frozenset[str],
    limits: WindowLimits,
) -> Iterator[Problem]:
    """What the model cannot hold. A default counts only in the mode that uses it."""
    length = limits.max_model_tokens
    if length is None:
        return
    used = {
        WindowMode.OFF: frozenset[str](),
        WindowMode.BASIC: frozenset(("basic_window_high_tokens", "basic_window_low_tokens")),
        WindowMode.CONTEXT: frozenset(("context_previous_max_tokens",)),
    }[window.mode]
    for field in _TOKEN_FIELDS:
        value: int = getattr(window, field)
        if value >= length and field in named | used:
            origin = "" if field in named else " by default"
            yield Problem(
                path=paths[field],
                message=f"is {value}{origin}; the model holds {length} tokens in all",
                allowed=f"1 to {length - 1}",
            )
    unit = limits.least_unit_tokens
    if window.mode is not WindowMode.CONTEXT or unit is None:
        return
    if window.context_max_units * unit >= length:
        yield Problem(
            path=paths["context_max_units"],
            message=f"{window.context_max_units} units of at least {unit} tokens do not fit into "
            f"the model's {length} tokens",
            allowed=f"1 to {(length - 1) // unit}",
        )


_TOKEN_FIELDS = (
    "basic_window_high_tokens",
    "basic_window_low_tokens",
    "context_previous_max_tokens",
)
