"""The six defects: each is there, and leaves what it does not concern as it was."""

import pytest
from support.exact_defects import Defect, spoil
from support.exact_layout import Answer, Conversation, Position, Script, Window, unit_input

pytestmark = pytest.mark.unit

NAMED = {
    "<unit>": 1,
    "</unit>": 2,
    "<|listen|>": 3,
    "<|chunk_eos|>": 4,
    "<image>": 5,
    "</image>": 6,
}
SCRIPT = Script(NAMED, set(NAMED.values()), (20, 21), (22,), (23, 24))
UNITS = 8


def context(mode: str, *, camera: bool = False) -> tuple[Position, ...]:
    """Of the last of eight units. Unit n says n + 100 and n + 200."""
    conversation = Conversation(SCRIPT, Window(mode, 10_000, 5_000, 6, 4))
    before: Answer | None = None
    whole: tuple[Position, ...] = ()
    for unit in range(1, UNITS + 1):
        rows = tuple(b"%d/%d" % (unit, row) for row in range(10))
        images = [tuple(b"%d:%d" % (unit, row) for row in range(64))] if camera else []
        pending = unit_input(SCRIPT, ["image"] * camera, images, [rows])
        whole = conversation.append(pending, before).context
        before = Answer((100 + unit, 200 + unit), NAMED["<|listen|>"])
    return whole


@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("mode", ["off", "context"])
@pytest.mark.parametrize("defect", Defect)
def test_a_defect_is_where_it_says(defect: Defect, mode: str, camera: bool) -> None:
    right = context(mode, camera=camera)
    wrong = spoil(right, defect, SCRIPT)
    assert wrong != right
    assert wrong[-11:] == right[-11:], "the unit to be decided is as it was"
    unit = len(right) - right.index(NAMED["<unit>"])
    lengths = {
        Defect.UNIT_MISSING: -(81 if camera else 15),
        Defect.ONE_POSITION_OFF: 1,
        Defect.WRONG_PREVIOUS: 3 if mode == "off" else 0,
    }
    assert len(wrong) - len(right) == lengths.get(defect, 0)
    if defect in (Defect.ROWS_SWAPPED, Defect.ORDER_OF_UNITS):
        assert sorted(map(str, wrong)) == sorted(map(str, right))
    if defect is Defect.WRONG_PREVIOUS:
        assert wrong[-unit:] == right[-unit:]
    else:
        assert wrong[: len(right) - unit] == right[: len(right) - unit]
    if defect is Defect.TERMINATOR:
        assert [pair for pair in zip(right, wrong, strict=True) if pair[0] != pair[1]] == [(3, 4)]
    if defect is Defect.ROWS_SWAPPED:
        changed = [one for one, other in zip(right, wrong, strict=True) if one != other]
        assert changed == [b"7/0", b"7/9"]


def test_wrong_previous_has_the_same_words_in_another_order() -> None:
    right, wrong = context("context"), spoil(context("context"), Defect.WRONG_PREVIOUS, SCRIPT)
    assert right[:10] == (20, 21, 23, 24, 101, 201, 102, 202, 103, 203)
    assert wrong[:10] == (20, 21, 23, 24, 203, 101, 201, 102, 202, 103)
