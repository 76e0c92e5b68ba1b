"""The admin token and its file: rotation, a grace for the old one, files that are not there."""

import os
from pathlib import Path

import pytest

from duplex_sidecar.admin.tokens import (
    LOOK_EVERY_S,
    OLD_TOKEN_VALID_S,
    FixedToken,
    TokenFile,
    file_reader,
)

pytestmark = pytest.mark.unit


class Times:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_fixed_token() -> None:
    assert FixedToken("right").matches("right")
    assert not FixedToken("right").matches("wrong")
    assert not FixedToken("").matches("")
    assert not FixedToken("right").matches("r\xefght")


def test_a_file_that_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "token", Times()
    path.write_text("first\n")
    token = TokenFile(file_reader(path), clock)
    assert token.matches("first")
    replaced = tmp_path / "new"
    replaced.write_text("second")
    os.replace(replaced, path)
    assert not token.matches("second"), "not looked at again within a second"
    clock.now_s = LOOK_EVERY_S
    assert token.matches("second")
    assert token.matches("first")
    clock.now_s = LOOK_EVERY_S + OLD_TOKEN_VALID_S - 0.1
    assert token.matches("first")
    clock.now_s = LOOK_EVERY_S + OLD_TOKEN_VALID_S
    assert not token.matches("first")
    assert token.matches("second")
    assert not token.matches("")


def test_of_three_tokens_the_last_two_are_good(tmp_path: Path) -> None:
    path, clock = tmp_path / "token", Times()
    path.write_text("1")
    token = TokenFile(file_reader(path), clock)
    for number in ("2", "33"):
        path.write_text(number)
        clock.now_s += LOOK_EVERY_S
        assert token.matches(number)
    assert [token.matches(each) for each in ("1", "2", "33")] == [False, True, True]


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_file_that_loses_its_token_changes_nothing(tmp_path: Path, how: str) -> None:
    path, clock = tmp_path / "token", Times()
    path.write_text("first")
    token = TokenFile(file_reader(path), clock)
    if how == "gone":
        path.unlink()
    else:
        path.write_text(" \n")
    clock.now_s = LOOK_EVERY_S
    assert token.matches("first")
    assert not token.matches("")


def test_a_start_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TokenFile(file_reader(tmp_path / "nowhere"))
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        TokenFile(file_reader(tmp_path / "empty"))
