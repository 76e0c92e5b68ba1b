"""What one feed says to the logits processor in the engine core: `SamplingParams.extra_args`."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

UNIT_KEY = "duplex"


class UnitArgs(NamedTuple):
    """stream: number of the stream in its stage process. rules: msgpack of the unit's rules."""

    stream: int
    unit: int
    rules: bytes

    def as_extra_args(self) -> dict[str, Any]:
        return {UNIT_KEY: self._asdict()}


def unit_args(extra_args: Mapping[str, Any] | None) -> UnitArgs | None:
    """None for a request that is not ours. Raises ValueError for a malformed one."""
    fields = (extra_args or {}).get(UNIT_KEY)
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise ValueError(f"extra_args.{UNIT_KEY} must be a map")
    named = cast("Mapping[str, Any]", fields)
    stream, unit, rules = named.get("stream"), named.get("unit"), named.get("rules")
    if not (isinstance(stream, int) and isinstance(unit, int) and isinstance(rules, bytes)):
        raise ValueError(f"extra_args.{UNIT_KEY} needs integers stream and unit and bytes rules")
    return UnitArgs(stream, unit, rules)
