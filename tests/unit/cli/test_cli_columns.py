"""What a verb prints to be copied or read later is whole, in a narrow terminal and in a pipe."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from duplex_sidecar.checkpoint import tiny
from duplex_sidecar.cli.columns import print_columns
from duplex_sidecar.cli.places import own_command
from duplex_sidecar.cli.starting import make_checkpoint

pytestmark = pytest.mark.unit

COMMAND = ".venv/bin/duplex checkpoint make /a/folder/with/a/long/name/and/more/of/it/below/tiny"


@pytest.mark.parametrize("width", [20, 80])
def test_nothing_is_cut_off(width: int) -> None:
    out = io.StringIO()
    rows = [("ok", "disk", ""), ("FAIL", "checkpoint [x]", COMMAND)]
    print_columns(Console(file=out, width=width), ("", "what", "fix"), rows, [None, "red"])
    assert out.getvalue().splitlines() == [
        "      what            fix",
        "ok    disk",
        f"FAIL  checkpoint [x]  {COMMAND}",
    ]


def test_columns_without_rows_have_their_names() -> None:
    out = io.StringIO()
    print_columns(Console(file=out, width=80), ("unit", "replica"), [])
    assert out.getvalue() == "unit  replica\n"


@pytest.mark.parametrize(
    ("called", "path", "told"),
    [
        (".venv/bin/duplex", "/usr/bin", ".venv/bin/duplex"),
        ("{bin}/duplex", "{bin}", "duplex"),
        ("/somewhere/pytest", "/usr/bin", "duplex"),
    ],
)
def test_a_command_is_told_as_this_one_was_called(
    called: str, path: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "duplex").touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [called.format(bin=tmp_path)])
    monkeypatch.setenv("PATH", path.format(bin=tmp_path))
    assert own_command() == told


@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_that_takes_a_minute_is_told_before(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe nothing turns; one that is there already is not spoken of."""
    out = io.StringIO()
    before: list[str] = []

    def make(*_: object, **__: object) -> bool:
        before.append(out.getvalue())
        return not there

    monkeypatch.setattr(tiny, "make_tiny", make)
    path = tmp_path / "tiny"
    if there:
        path.mkdir()
    make_checkpoint(Console(file=out, width=200), path)
    assert before == ["" if there else "making the tiny checkpoint (once): about a minute\n"]
