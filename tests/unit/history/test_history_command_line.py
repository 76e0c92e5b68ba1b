"""`duplex history check`: exit status and what it says."""

from pathlib import Path

import pytest
from support.made_history import changed, made_history

from duplex_sidecar.cli.history import check
from duplex_sidecar.history.observations import Frame, encode_lines

pytestmark = pytest.mark.unit


@pytest.fixture
def right(tmp_path: Path) -> Path:
    file = tmp_path / "right.jsonl"
    file.write_bytes(b"".join(encode_lines(made_history())))
    return file


def test_histories_that_hold(right: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(right, right, takeovers=2) == 0
    said = capsys.readouterr().out
    assert "2 sessions" in said
    assert "takeovers 2" in said
    assert "it holds" in said


def test_a_vacuous_history(right: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(right, zombies=1, redos=1) == 1
    said = capsys.readouterr().out
    assert "too little happened: refused_zombie_writes: 0, at least 1 wanted" in said


def test_a_violation_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = changed(made_history(), Frame, lambda frame: frame.event is not None, passed_on=False)
    file = tmp_path / "wrong.jsonl"
    file.write_bytes(b"".join(encode_lines(history)))
    assert check(file) == 1
    said = capsys.readouterr().out
    assert "made: event_missing: made: c: events 1 to 1 are missing" in said
    assert "0 of something said twice" in said


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check() == 2
    assert check(tmp_path / "none.jsonl") == 2
    rubbish = tmp_path / "rubbish.jsonl"
    rubbish.write_text("{}")
    assert check(rubbish) == 2
    assert "rubbish.jsonl: line 1" in capsys.readouterr().err
