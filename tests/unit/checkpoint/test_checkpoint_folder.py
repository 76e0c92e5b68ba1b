"""A checkpoint folder appears whole or not at all."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from duplex_sidecar.checkpoint import folder as folder_module
from duplex_sidecar.checkpoint.config import write_config
from duplex_sidecar.checkpoint.dummy8b import make_dummy8b, write_shards
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.folder import Recipe, make_folder, write_tensors
from duplex_sidecar.checkpoint.layout import WEIGHTS_NAME, weight_shapes
from duplex_sidecar.checkpoint.parts import write_parts
from duplex_sidecar.checkpoint.presets import TINY_VOCAB_SIZE, tiny_config
from duplex_sidecar.checkpoint.report import make_report
from duplex_sidecar.checkpoint.tokenizer import train_tokenizer

pytestmark = pytest.mark.unit

CONFIG = tiny_config()
RECIPE = Recipe("tiny", 0, "abc")
TOKENIZER = train_tokenizer(TINY_VOCAB_SIZE)


def write_whole(staging: Path) -> None:
    write_parts(staging, CONFIG, TOKENIZER, 0)
    tensors = {name: torch.zeros(shape) for name, shape in weight_shapes(CONFIG).items()}
    write_tensors(staging / WEIGHTS_NAME, tensors)


def test_made_once_and_readable_by_everybody(tmp_path: Path) -> None:
    target = tmp_path / "new" / "checkpoint"
    assert make_folder(target, RECIPE, write_whole)
    assert make_report(target).complete
    for path in (target, *target.rglob("*")):
        assert path.stat().st_mode & 0o044 == 0o044, path

    def never(_: Path) -> None:
        raise AssertionError("written twice")

    assert not make_folder(target, RECIPE, never)
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint"]


def test_another_recipe_or_a_damaged_folder_is_made_anew(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    make_folder(target, RECIPE, write_whole)
    assert make_folder(target, Recipe("tiny", 1, "abc"), write_whole)
    (target / WEIGHTS_NAME).write_bytes(b"")
    assert make_folder(target, Recipe("tiny", 1, "abc"), write_whole)
    assert make_report(target).complete


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("mine", "file"):
        with pytest.raises(CheckpointError, match="in the way") as caught:
            make_folder(tmp_path / name, RECIPE, write_whole)
        assert caught.value.fault is CheckpointFault.NOT_WRITABLE
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    assert make_folder(tmp_path / "empty", RECIPE, write_whole)


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, CheckpointFault.DISK_FULL),
        (errno.EDQUOT, CheckpointFault.DISK_FULL),
        (errno.EACCES, CheckpointFault.NOT_WRITABLE),
        (errno.EROFS, CheckpointFault.NOT_WRITABLE),
    ],
)
def test_a_failure_leaves_nothing(tmp_path: Path, number: int, fault: CheckpointFault) -> None:
    def fail(staging: Path) -> None:
        write_config(CONFIG, staging)
        raise OSError(number, os.strerror(number), str(staging / WEIGHTS_NAME))

    with pytest.raises(CheckpointError) as caught:
        make_folder(tmp_path / "checkpoint", RECIPE, fail)
    assert caught.value.fault is fault
    assert WEIGHTS_NAME in caught.value.path
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_older_one(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    make_folder(target, RECIPE, write_whole)

    def fail(_: Path) -> None:
        raise CheckpointError(CheckpointFault.FIT_FAILED, "readout", "no luck")

    with pytest.raises(CheckpointError, match="no luck"):
        make_folder(target, Recipe("tiny", 1, "x"), fail)
    assert make_report(target).complete


def test_the_leftovers_of_a_killed_maker_go_away(tmp_path: Path) -> None:
    stale = tmp_path / ".checkpoint.x.partial"
    stale.mkdir()
    (stale / WEIGHTS_NAME).write_bytes(b"half")
    make_folder(tmp_path / "checkpoint", RECIPE, write_whole)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        make_folder(tmp_path / "file" / "checkpoint", RECIPE, write_whole)
    assert caught.value.fault is CheckpointFault.NOT_WRITABLE


def test_two_makers_make_it_once(tmp_path: Path) -> None:
    made: list[bool] = []
    written: list[Path] = []
    gate = threading.Barrier(2)

    def write(staging: Path) -> None:
        written.append(staging)
        write_whole(staging)

    def maker() -> None:
        gate.wait(60)
        made.append(make_folder(tmp_path / "checkpoint", RECIPE, write))

    threads = [threading.Thread(target=maker) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(made) == [False, True]
    assert len(written) == 1


def test_waiting_for_another_maker_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "LOCK_TIMEOUT_S", 0.0)

    def write(staging: Path) -> None:
        with pytest.raises(CheckpointError, match="another maker"):
            make_folder(tmp_path / "other", RECIPE, write_whole)
        write_whole(staging)

    assert make_folder(tmp_path / "checkpoint", RECIPE, write)


def test_write_errors_of_the_library_have_their_number(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_NAME).mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        write_tensors(tmp_path / WEIGHTS_NAME, {"a": torch.zeros(1)})
    assert caught.value.errno == errno.EISDIR


def test_a_full_disk_is_told_before_the_dummy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=10**9)

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(CheckpointError, match="6 GB are needed, 1 GB are free") as caught:
        make_dummy8b(tmp_path / "dummy", thinker_layers=2)
    assert caught.value.fault is CheckpointFault.DISK_FULL
    assert list(tmp_path.iterdir()) == []


def test_shards_are_a_whole_checkpoint(tmp_path: Path) -> None:
    write_parts(tmp_path, CONFIG, TOKENIZER, 0)
    write_shards(tmp_path, CONFIG, 0, 1024 * 1024)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 5
    assert make_report(tmp_path).complete
