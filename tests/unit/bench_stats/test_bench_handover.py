"""Where a talk can be moved in the middle of a reply."""

import pytest

from tests.bench.measure_handover import FIRST_UNIT, sounding_pairs
from tests.bench.paced import Answer

pytestmark = pytest.mark.unit


def answers(*turns: int | None) -> dict[int, Answer]:
    """By unit from 1: its turn where it sounded, None where it did not."""
    return {
        unit: Answer(unit, turn or 0, "here", 0.1, None if turn is None else 0.1)
        for unit, turn in enumerate(turns, start=1)
    }


def test_only_between_two_units_that_sound_in_the_same_turn() -> None:
    assert sounding_pairs(answers(None, None, None, 1, 1, None, 1, 2, 2)) == (4, 8)
    assert sounding_pairs(answers()) == ()


def test_none_next_to_another_and_none_at_the_beginning() -> None:
    found = sounding_pairs(answers(*[1] * 12))
    assert found == tuple(range(FIRST_UNIT, 12, 2))
