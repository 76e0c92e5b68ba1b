"""What a verb has made and its disk does not take."""

import errno
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from duplex_sidecar.cli import demo, run
from duplex_sidecar.cli.demo import write_wave
from duplex_sidecar.cli.output import OutputFailed, swapped_in, written

pytestmark = pytest.mark.unit


class FullDisk(io.FileIO):
    """Takes the first bytes and no more."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[:8])
        raise OSError(errno.ENOSPC, "No space left on device")


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", lambda path, mode: FullDisk(path, mode))


def test_a_disk_that_fills_is_told_by_the_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reply.wav"
    with monkeypatch.context() as patched:
        full(patched)
        with pytest.raises(OutputFailed) as failed:
            write_wave(path, bytes(48_000))
    assert str(failed.value) == f"{path} cannot be written: No space left on device"
    assert not path.exists()
    write_wave(path, bytes(48_000))
    assert path.stat().st_size > 48_000


def test_a_device_is_not_removed() -> None:
    sentence = "/dev/full cannot be written: No space"
    with pytest.raises(OutputFailed, match=sentence), written(Path("/dev/full")) as path:
        path.write_bytes(bytes(10))
    assert Path("/dev/full").exists()


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "reply.wav"
    path.write_text("before")
    link = tmp_path / "link.wav"
    link.symlink_to(path)

    def fill() -> None:
        with written(link) as new:
            new.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputFailed):
        fill()
    assert path.read_text() == "before"
    with written(link) as new:
        assert new.suffix == ".wav"
        new.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_results_are_swapped_all_together_or_not_at_all(tmp_path: Path) -> None:
    names = ("reply.wav", "spans.jsonl", "timeline.png")
    for name in (*names, "mine.txt"):
        (tmp_path / name).write_text("before")

    def leave() -> None:
        with swapped_in(tmp_path, names) as new:
            (new / "reply.wav").write_text("after")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert {path.read_text() for path in tmp_path.iterdir()} == {"before"}
    with swapped_in(tmp_path, names) as new:
        for name in names[:2]:
            (new / name).write_text("after")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"reply.wav": "after", "spans.jsonl": "after", "mine.txt": "before"}


@pytest.mark.parametrize("verb", ["demo", "run"])
def test_the_verbs_end_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    said = io.StringIO()

    def fail(*_: Any) -> int:
        raise OutputFailed(tmp_path / "timeline.png", "No space left on device")

    module = {"demo": demo, "run": run}[verb]
    monkeypatch.setattr(module, "Console", lambda: Console(file=said, width=200))
    monkeypatch.setattr(module, f"_{verb}", fail)
    monkeypatch.setattr(run, "read_manifest", lambda _: None)
    monkeypatch.setattr(run, "read_speech", lambda _: b"")
    monkeypatch.setattr(run, "require_room", lambda *_: None)
    monkeypatch.setattr(run, "require_servable", lambda *_: None)
    manifest = tmp_path / "session.yaml"
    manifest.touch()
    if verb == "demo":
        status = demo.demo(out=tmp_path)
    else:
        status = run.run(file=manifest, audio=manifest, checkpoint=tmp_path, out=tmp_path / "w.wav")
    assert status == 1
    assert "timeline.png cannot be written: No space left on device" in said.getvalue()
