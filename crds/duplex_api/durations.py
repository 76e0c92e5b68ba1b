"""Durations as Kubernetes users write them ("30s", "5m", "1h30m", "250ms"), in milliseconds."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from duplex_api.base import cel_rules

DURATION_ALLOWED = 'hours, minutes, seconds, milliseconds in this order, for example "1h30m"'
SHORTEST_MS = 1_000
LONGEST_MS = 720 * 3_600_000
"""30 days. Bounds every timer and every expiry that a user can ask for."""

LONGEST_TEXT = 40

_PATTERN = r"^([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?([0-9]{1,9}ms)?$"
_FACTORS_MS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


def duration_ms(text: str) -> int:
    """Milliseconds of a duration. Raises ValueError that names what is allowed."""
    if not text or re.fullmatch(_PATTERN, text) is None:
        raise ValueError(f"{text!r} is not a duration ({DURATION_ALLOWED})")
    parts = re.findall(r"([0-9]+)(ms|h|m|s)", text)
    return sum(int(amount) * _FACTORS_MS[unit] for amount, unit in parts)


def _bounded(text: Any) -> Any:
    """Before pydantic's own look at it, which would show the pattern."""
    if not isinstance(text, str):
        raise ValueError(f"is not a duration in quotes ({DURATION_ALLOWED})")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"a text of {len(text)} characters is not a duration ({DURATION_ALLOWED})")
    if not SHORTEST_MS <= duration_ms(text) <= LONGEST_MS:
        raise ValueError(f"{text!r} is not between 1s and 720h")
    return text


Duration = Annotated[
    str,
    Field(
        strict=True,
        min_length=2,
        max_length=LONGEST_TEXT,
        pattern=_PATTERN,
        json_schema_extra=cel_rules(
            (
                "duration(self) >= duration('1s') && duration(self) <= duration('720h')",
                "must be between 1s and 720h",
            )
        ),
    ),
    BeforeValidator(_bounded),
]
"""From one second to 30 days, kept as the text the user wrote; `duration_ms` gives the number."""
