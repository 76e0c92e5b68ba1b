"""`duplex demo` whose second sidecar does not come: it says so at once, by name, and keeps what
that sidecar and its stages wrote."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from duplex_sidecar.cli import demo as demo_module
from duplex_sidecar.cli.demo import demo
from duplex_sidecar.cli.main import app
from duplex_sidecar.client import local_sidecar
from duplex_sidecar.client.conversation import Talk
from duplex_sidecar.client.local_sidecar import READY_TIMEOUT_S, LocalSidecar, SidecarFailed
from duplex_sidecar.settings import SidecarSettings

pytestmark = pytest.mark.integration

KILL_AT = 2


@dataclass
class Lame(LocalSidecar):
    """Sidecars that are never started. The first is ready, the second is not."""

    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        (Path(self.settings.runtime_dir) / "thinker").mkdir()
        (Path(self.settings.runtime_dir) / "thinker" / "log").write_text("loading\n")
        self.log.write_text("begun\n")

    def wait_ready(
        self, on_progress: Callable[[str], None] = lambda text: None, timeout_s: float = 0
    ) -> float:
        if self.settings.replica == "sidecar-1":
            return 1.0
        raise SidecarFailed(f"{self.settings.replica} was not ready")

    def open_session(self, session: str, manifest: str, token: str) -> dict[str, Any]:
        return {}

    def kill_tree(self) -> None:
        self.calls.append("kill")


class Waiting:
    """A client that has had its units and then dials a sidecar that is gone."""

    redial_for_s = 0.0

    def __init__(self, *_: object, redial_for_s: float, on_event: Any, **__: object) -> None:
        Waiting.redial_for_s = redial_for_s
        self._on_event = on_event

    async def run(self) -> Talk:
        self._on_event({"type": "error", "error": {"code": "x", "message": "y"}})
        self._on_event({"type": "duplex.unit", "unit": KILL_AT} | UNIT)
        await asyncio.Event().wait()
        raise AssertionError


UNIT = {
    "decision": "listen",
    "tokens": 1,
    "window_tokens": 1,
    "rebuild_cause": None,
    "rebuild_ms": None,
    "head": 1,
    "epoch": 0,
    "stage2_sequence": None,
    "audio_samples": 0,
    "wall_ms": 1.0,
}


class NoLedger:
    @staticmethod
    async def connect(url: str) -> "NoLedger":
        return NoLedger()

    async def load(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture
def lame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "LocalSidecar", Lame)
    monkeypatch.setattr(demo_module, "Conversation", Waiting)
    monkeypatch.setattr(demo_module, "LedgerReader", NoLedger)
    monkeypatch.setattr(demo_module, "make_checkpoint", lambda *_: None)


@pytest.mark.usefixtures("lame")
def test_a_second_sidecar_that_does_not_come_is_told_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo-out"
    assert demo(out=out, kill_at=KILL_AT) == 1
    told = capsys.readouterr().out
    assert "duplex demo: sidecar-2 was not ready" in told
    assert f"logs: {out / 'sidecar-2-logs'}" in told
    kept = {path.name: path.read_text() for path in (out / "sidecar-2-logs").iterdir()}
    assert kept == {"sidecar.log": "begun\n", "thinker.log": "loading\n"}
    assert Waiting.redial_for_s >= READY_TIMEOUT_S + 30


@pytest.mark.usefixtures("lame")
@pytest.mark.parametrize("kill_at", [74, 500])
def test_a_kill_behind_the_recording_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kill_at: int
) -> None:
    command = ["demo", "--out", str(tmp_path), "--kill-at", str(kill_at)]
    assert app(command, result_action="return_value") == 2
    assert "the recording has 74 units: --kill-at has to be less" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


class NotYet(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"ready": false, "waiting_for": "thinker: starting"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[LocalSidecar]:
    """A process that never becomes ready."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NotYet) as server:
        settings = SidecarSettings(
            checkpoint="/none",
            redis_url="redis://none",
            runtime_dir=str(tmp_path),
            cache_dir=str(tmp_path),
            port=server.server_address[1],
            replica="sidecar-2",
        )
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with process:
            yield LocalSidecar(settings, tmp_path / "log", process)
            process.kill()
        server.shutdown()
        thread.join()


def test_what_is_not_ready_is_told_with_what_it_waits_for(
    starting: LocalSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sidecar, "_POLL_S", 0.01)
    with pytest.raises(SidecarFailed, match="sidecar-2 was not ready in 2 s, it waits for thinker"):
        starting.wait_ready(timeout_s=2)
    assert starting.process is not None
    starting.process.kill()
    starting.process.wait()
    with pytest.raises(SidecarFailed, match="sidecar-2 ended before it was ready"):
        starting.wait_ready()
