"""When a pod that is being emptied is told to park what it has left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_operator.decide.emptying import HAND_OVER_BOUND_MS, may_park

pytestmark = pytest.mark.unit


@given(st.integers(0, 9), st.integers(0, 2 * HAND_OVER_BOUND_MS), st.integers(0, 10**12))
def test_when_nobody_talks_or_the_bound_has_passed(talkers: int, after_ms: int, at_ms: int) -> None:
    bound_passed = after_ms >= HAND_OVER_BOUND_MS
    assert may_park(talkers, at_ms, at_ms + after_ms) is (bound_passed or talkers == 0)
