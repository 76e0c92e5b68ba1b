"""What the engine stages refuse before they submit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.stages.engine.guards import (
    EngineLimits,
    Refusal,
    StreamState,
    check_extends,
    check_ids,
    check_length,
    check_room,
    check_rows,
)
from duplex_sidecar.stages.envelope import ElementType, Tensor

pytestmark = pytest.mark.unit

LIMITS = EngineLimits(max_model_len=544, seats=2, blocks=20, block_tokens=32)
FLOATS = (ElementType.FLOAT32, ElementType.BFLOAT16)


@pytest.mark.parametrize(
    ("position", "new", "fits"),
    [(0, 524, True), (0, 525, False), (512, 12, True), (512, 13, False), (0, 0, False)],
)
def test_a_unit_must_be_able_to_end(position: int, new: int, fits: bool) -> None:
    if fits:
        check_length(LIMITS, position, new, answer_limit=20)
        return
    with pytest.raises(Refusal):
        check_length(LIMITS, position, new, answer_limit=20)


def test_seats_count_only_for_new_streams() -> None:
    check_room(LIMITS, 32, [32], opens=True)
    check_room(LIMITS, 32, [32, 32], opens=False)
    with pytest.raises(Refusal, match="all 2 seats are taken"):
        check_room(LIMITS, 32, [32, 32], opens=True)


def test_blocks_count_the_worst_case_of_everybody() -> None:
    check_room(LIMITS, 10 * 32, [10 * 32], opens=True)
    with pytest.raises(Refusal, match="21 KV blocks"):
        check_room(LIMITS, 10 * 32, [10 * 32 + 1], opens=True)


@given(st.lists(st.integers(1, 600), max_size=5), st.integers(1, 600))
def test_what_is_admitted_fits(others: list[int], own: int) -> None:
    limits = EngineLimits(max_model_len=600, seats=5, blocks=40, block_tokens=32)
    try:
        check_room(limits, own, others, opens=True)
    except Refusal:
        return
    assert sum(-(-each // 32) for each in [*others, own]) <= limits.blocks
    assert len(others) + 1 <= limits.seats


@pytest.mark.parametrize(
    ("unit", "position", "opens", "busy", "reason"),
    [
        (3, 40, False, False, None),
        (9, 40, False, False, None),
        (3, 40, True, False, "is open"),
        (3, 40, False, True, "another feed"),
        (3, 41, False, False, "holds 40 positions, not 41"),
        (2, 40, False, False, "unit 2 after unit 2"),
    ],
)
def test_a_feed_continues_where_the_stream_is(
    unit: int, position: int, opens: bool, busy: bool, reason: str | None
) -> None:
    state = StreamState(positions=40, last_unit=2, busy=busy)
    if reason is None:
        check_extends(state, unit, position, opens=opens)
        return
    with pytest.raises(Refusal, match=reason):
        check_extends(state, unit, position, opens=opens)


def test_ids() -> None:
    check_ids((), 10, "ids")
    check_ids((0, 9), 10, "ids")
    for wrong in (-1, 10):
        with pytest.raises(Refusal, match=r"in \[0, 10\)"):
            check_ids((1, wrong), 10, "ids")


def _rows(shape: tuple[int, ...], kind: ElementType = ElementType.FLOAT32) -> Tensor:
    size = 4 if kind is ElementType.FLOAT32 else 2
    return Tensor(kind, shape, bytes(size * int(np.prod(shape))))


def test_rows_of_the_right_shape_and_type() -> None:
    check_rows(_rows((3, 8)), 8, FLOATS, "rows")
    check_rows(_rows((3, 8), ElementType.BFLOAT16), 8, FLOATS, "rows", count=3)
    for shape in ((3, 7), (0, 8), (8,), (1, 3, 8)):
        with pytest.raises(Refusal, match="shape"):
            check_rows(_rows(shape), 8, FLOATS, "rows")
    with pytest.raises(Refusal, match="2 rows, not 3"):
        check_rows(_rows((3, 8)), 8, FLOATS, "rows", count=2)
    with pytest.raises(Refusal, match="must be float32, not bfloat16"):
        check_rows(_rows((3, 8), ElementType.BFLOAT16), 8, FLOATS[:1], "rows")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_hold_numbers(value: float) -> None:
    rows = np.ones((2, 8), np.float32)
    rows[1, 3] = value
    with pytest.raises(Refusal, match="no number"):
        check_rows(Tensor(ElementType.FLOAT32, (2, 8), rows.tobytes()), 8, FLOATS, "rows")
    halves = (rows.view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(Refusal, match="no number"):
        check_rows(Tensor(ElementType.BFLOAT16, (2, 8), halves.tobytes()), 8, FLOATS, "rows")
    largest = np.full((2, 8), 0x7F7F, np.uint16)
    check_rows(Tensor(ElementType.BFLOAT16, (2, 8), largest.tobytes()), 8, FLOATS, "rows")
