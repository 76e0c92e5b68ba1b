"""The cluster's programs are compiled beside other tests, and not a moment longer."""

import os
import time
from pathlib import Path

import pytest

from scripts import cluster

pytestmark = pytest.mark.integration

WITHIN_S = 90.0


def appeared(file: Path) -> str:
    deadline = time.monotonic() + WITHIN_S
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.02)
    return file.read_text().strip()


def runs(process: Path) -> bool:
    """Not one that has ended and that nobody has collected."""
    try:
        return "Z" not in (process / "stat").read_text()
    except OSError:  # it ends while it is looked at
        return False


def test_a_build_beside_the_tests_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that never comes to an end stands in for the real one."""
    started = tmp_path / "started"
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = version ]; then echo "go version go1.99 linux/amd64"; exit; fi\n'
        f"echo $$ >{started}\nexec sleep 600\n"
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(go.parent), prepend=":")
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path / "cache"))
    with cluster.building_meanwhile(("pause",)):
        compiler = Path("/proc", appeared(started))
        assert compiler.exists()
        assert os.getpriority(os.PRIO_PROCESS, int(compiler.name)) == 19
    deadline = time.monotonic() + WITHIN_S
    while runs(compiler):
        assert time.monotonic() < deadline, "the compiler goes on"
        time.sleep(0.02)
    log = (cluster.cache_folder() / "build.log").read_text()
    assert "pause: compiling" in log
