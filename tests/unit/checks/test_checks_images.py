"""What is built without Docker has the names that charts and examples ask for."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from scripts import images
from scripts.cluster import ROOT, ClusterError

pytestmark = pytest.mark.unit


class _Disk(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path))


def test_tags_are_those_of_charts_and_examples() -> None:
    known = images.images()
    chart = yaml.safe_load((ROOT / "charts" / "duplex" / "Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "charts" / "duplex" / "values.yaml").read_text())
    pool = yaml.safe_load((ROOT / "examples" / "pool-cpu.yaml").read_text())
    assert known["control"].tag == f"{values['image']['repository']}:{chart['appVersion']}"
    assert known["sidecar-cpu"].tag == pool["spec"]["image"]
    assert known["sidecar-cuda"].tag == f"duplex-sidecar:{chart['appVersion']}-cuda"


def test_each_has_a_dockerfile_and_a_word_on_room() -> None:
    known = images.images()
    for image in known.values():
        assert (ROOT / "docker" / image.dockerfile).is_file()
    assert set(images.LEAST_FREE_GB) == set(known)
    assert set(images.DEFAULT) <= set(known)


def test_without_root_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="root"):
        images.build(("control",))


def test_a_full_disk_is_seen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Disk(21_000_000_000))
    with pytest.raises(ClusterError, match="sidecar-cpu needs 22 GB"):
        images.build(("control", "sidecar-cpu"))


def test_an_image_that_is_there_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Disk(21_000_000_000))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    done = subprocess.CompletedProcess((), 0)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done)
    assert images.why_not("sidecar-cpu") is None
