"""Six ways in which a rendered context can be wrong, each as small as it can be.

A proof of exactness is worth something only if it fails on every one of them: each changes what the
Thinker sees and leaves all of its tokens valid, so nothing but the numbers can tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from support.exact_layout import Position, Script


class Defect(StrEnum):
    UNIT_MISSING = "unit missing"
    ROWS_SWAPPED = "rows swapped"
    ORDER_OF_UNITS = "order of units"
    TERMINATOR = "terminator"
    ONE_POSITION_OFF = "one position off"
    WRONG_PREVIOUS = "wrong previous"


@dataclass
class _Parsed:
    """prefix, previous, suffix: the session context. units: closed ones, then the open one."""

    prefix: list[Position]
    previous: list[Position]
    suffix: list[Position]
    units: list[list[Position]]

    def whole(self, marker: Sequence[int]) -> tuple[Position, ...]:
        text = [*marker, *self.previous] if self.previous else []
        places = [*self.prefix, *text, *self.suffix]
        for unit in self.units:
            places += unit
        return tuple(places)


def spoil(context: Sequence[Position], defect: Defect, script: Script) -> tuple[Position, ...]:
    """The context with that defect in it. It has to hold three closed units or more."""
    parsed = _parse(context, script)
    closed = len(parsed.units) - 1
    assert closed >= 3, "a context too short to be spoilt"
    middle = closed // 2
    match defect:
        case Defect.UNIT_MISSING:
            del parsed.units[middle]
        case Defect.ROWS_SWAPPED:
            _swap_rows(parsed.units[closed - 1])
        case Defect.ORDER_OF_UNITS:
            units = parsed.units
            units[middle - 1], units[middle] = units[middle], units[middle - 1]
        case Defect.TERMINATOR:
            unit, named = parsed.units[middle], script.named
            listens = unit[-2] == named["<|listen|>"]
            unit[-2] = named["<|chunk_eos|>" if listens else "<|listen|>"]
        case Defect.ONE_POSITION_OFF:
            # As the public implementation fills up what its builder left short.
            parsed.units[0].insert(0, script.named["</unit>"])
        case Defect.WRONG_PREVIOUS:
            # The newest id stands first; where there is none, one that nobody said.
            said = parsed.previous
            parsed.previous = (
                [*said[-1:], *said[:-1]] if len(set(said)) > 1 else [script.prefix[-1]]
            )
    spoilt = parsed.whole(script.marker)
    assert spoilt != tuple(context)
    return spoilt


def _parse(context: Sequence[Position], script: Script) -> _Parsed:
    places = list(context)
    unit, unit_end = script.named["<unit>"], script.named["</unit>"]
    first = places.index(unit)
    head, units = places[:first], [[unit]]
    for place in places[first + 1 :]:
        # Within an append of several chunks `<unit>` follows `</unit>` as well: for a defect such
        # a chunk is as good as a unit.
        if place == unit and units[-1][-1] == unit_end:
            units.append([])
        units[-1].append(place)
    prefix, suffix = len(script.prefix) + len(script.reference), len(script.suffix)
    text = head[prefix : len(head) - suffix]
    return _Parsed(head[:prefix], text[len(script.marker) :], head[len(head) - suffix :], units)


def _swap_rows(unit: list[Position]) -> None:
    """The first and the last audio row of the unit."""
    rows = [index for index, place in enumerate(unit) if isinstance(place, bytes)]
    a, b = rows[-10], rows[-1]
    assert unit[a] != unit[b], "two rows that differ"
    unit[a], unit[b] = unit[b], unit[a]
