"""Durations as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from duplex_api.durations import Duration, duration_ms

pytestmark = pytest.mark.unit

FIELD: TypeAdapter[str] = TypeAdapter(Duration)


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999), st.integers(0, 999))
def test_the_parts_add_up(hours: int, minutes: int, seconds: int, ms: int) -> None:
    wanted = ((hours * 60 + minutes) * 60 + seconds) * 1000 + ms
    assert duration_ms(f"{hours}h{minutes}m{seconds}s{ms}ms") == wanted


@pytest.mark.parametrize(
    ("text", "ms"), [("30s", 30_000), ("5m", 300_000), ("1h30m", 5_400_000), ("1500ms", 1_500)]
)
def test_as_users_write_them(text: str, ms: int) -> None:
    assert duration_ms(text) == ms
    assert FIELD.validate_python(text) == text


@pytest.mark.parametrize("text", ["", "5", "s", "5 m", "1.5h", "-5s", "5s5m", "5d", "٣s", "5s\n"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_ms(text)
    with pytest.raises(ValidationError):
        FIELD.validate_python(text)


@pytest.mark.parametrize("text", ["0s", "999ms", "721h", "999999999h"])
def test_fields_are_bounded(text: str) -> None:
    with pytest.raises(ValidationError, match="not between 1s and 720h"):
        FIELD.validate_python(text)


def test_a_number_is_no_duration() -> None:
    with pytest.raises(ValidationError):
        FIELD.validate_python(30)
