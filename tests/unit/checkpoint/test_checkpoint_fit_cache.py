"""The cache of fitted rows is a help, never a reason to fail."""

from pathlib import Path

import pytest
import torch

from duplex_sidecar.checkpoint.behaviour import READOUT_NAME, Behaviour, read_behaviours
from duplex_sidecar.checkpoint.fit_cache import FittedReadout, fit_path, read_fit, write_fit

pytestmark = pytest.mark.unit

SHAPE = (7, 4)
FITTED = FittedReadout(
    torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)),
    (
        Behaviour("off", 120, 60, 60, 10, 3, 0, 0.01, 0.9, 1800, 0),
        Behaviour("sampled", 120, 60, 60, 10, 3, 0, None, 0.9, 1800, 0),
    ),
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = fit_path(tmp_path / "new", "abc")
    assert read_fit(path, SHAPE) is None
    write_fit(path, FITTED)
    found = read_fit(path, SHAPE)
    assert found is not None
    assert torch.equal(found.rows, FITTED.rows)
    assert found.behaviours == FITTED.behaviours
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_does_not_fit_is_not_used(tmp_path: Path) -> None:
    path = fit_path(tmp_path, "abc")
    write_fit(path, FITTED)
    assert read_fit(path, (7, 5)) is None
    path.write_bytes(path.read_bytes()[:40])
    assert read_fit(path, SHAPE) is None
    write_fit(path, FittedReadout(FITTED.rows.double(), FITTED.behaviours))
    assert read_fit(path, SHAPE) is None


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_fit(fit_path(tmp_path / "file", "abc"), FITTED)
    assert read_fit(fit_path(tmp_path / "file", "abc"), SHAPE) is None


def test_a_checkpoint_without_a_fit_has_no_behaviours(tmp_path: Path) -> None:
    assert read_behaviours(tmp_path) == ()
    (tmp_path / READOUT_NAME).write_text("[{}]")
    assert read_behaviours(tmp_path) == ()
