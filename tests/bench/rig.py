"""What every measure stands on: a Valkey, an OTLP receiver, the recording, and sidecars."""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from duplex_sidecar.checkpoint.behaviour import read_behaviours
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.client.media import read_frames, read_speech
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.telemetry.otlp_sink import OtlpSink
from tests.bench.client import UnitClient
from tests.bench.figures import Broken
from tests.bench.revision import ROOT

CHECKPOINT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Scenario:
    """A kind of session. window: of its manifest."""

    name: str
    window: dict[str, object]
    camera: bool = False

    def manifest(self) -> str:
        spec: dict[str, object] = {
            "poolRef": {"name": "bench"},
            "window": self.window,
            "sampling": {"temperature": 0.7, "topK": 20, "topP": 0.8, "seed": 42},
            "lifecycle": {"disconnectGrace": "60s", "maxDuration": "2h"},
        }
        if self.camera:
            spec["camera"] = {"framesPerUnit": 1}
        return json.dumps(
            {
                "apiVersion": "duplex.dev/v1alpha1",
                "kind": "DuplexSession",
                "metadata": {"name": "bench"},
                "spec": spec,
            }
        )


@dataclass
class Rig:
    """Used as a context manager: ends everything that it started."""

    checkpoint: Path
    quick: bool
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="duplex-bench-")))
    _sidecars: list[LocalSidecar] = field(default_factory=list[LocalSidecar])

    @classmethod
    def prepare(cls, checkpoint: Path | None, quick: bool) -> "Rig":
        """Makes the tiny checkpoint first, unless another is named. Raises Broken."""
        path = checkpoint or default_checkpoint()
        if not path.exists():
            make = ("-m", "duplex_sidecar.cli.main", "checkpoint", "make", str(path))
            made = subprocess.run(
                [sys.executable, *make],
                capture_output=True,
                text=True,
                timeout=CHECKPOINT_TIMEOUT_S,
                check=False,
            )
            if made.returncode:
                raise Broken(f"no checkpoint: {(made.stdout + made.stderr).strip()[-300:]}")
        return cls(path.absolute(), quick)

    def __post_init__(self) -> None:
        self.forced = not read_behaviours(self.checkpoint)
        """The checkpoint is not fitted: listening has to be forced."""
        examples = ROOT / "examples"
        self.speech = read_speech(examples / "audio" / "conversation.flac")
        self.frames = read_frames(examples / "video" / "camera.mp4")
        self.valkey = EmbeddedValkey(self.folder / "ledger")
        self.sink = OtlpSink(None, None)

    def __enter__(self) -> Self:
        self.valkey.start()
        self.sink.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for sidecar in self._sidecars:
            sidecar.stop()
        self.sink.close()
        self.valkey.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_sidecar(self, name: str, **settings: object) -> LocalSidecar:
        """Not started yet. Telemetry goes out, as in the demo. settings: over the usual ones."""
        usual: dict[str, object] = {
            "checkpoint": str(self.checkpoint),
            "redis_url": self.valkey.url,
            "cache_dir": str(default_cache_dir()),
            "replica": name,
            "otlp_endpoint": self.sink.endpoint,
        }
        sidecar = LocalSidecar.prepare(self.folder / name, **(usual | settings))
        self._sidecars.append(sidecar)
        return sidecar

    def start_sidecar(self, name: str, **settings: object) -> tuple[LocalSidecar, float]:
        """(a ready sidecar, seconds from exec to ready). Raises SidecarFailed."""
        sidecar = self.new_sidecar(name, **settings)
        began = time.monotonic()
        sidecar.start()
        sidecar.wait_ready()
        return sidecar, time.monotonic() - began

    def open(self, sidecar: LocalSidecar, scenario: Scenario) -> UnitClient:
        """A new session and a client that has not dialled yet. Raises ApiError."""
        session = f"bench-{scenario.name}-{secrets.token_hex(4)}"
        token = secrets.token_urlsafe(32)
        sidecar.open_session(session, scenario.manifest(), token)
        return UnitClient(sidecar, session, token)

    def view(self, client: UnitClient) -> dict[str, Any]:
        """What the admin API says of the session."""
        return client.sidecar.admin("GET", f"/sessions/{client.session}")


def root_process(sidecar: LocalSidecar) -> psutil.Process:
    """The sidecar's own process. Raises Broken."""
    if sidecar.process is None or sidecar.process.poll() is not None:
        raise Broken("the sidecar has ended")
    return psutil.Process(sidecar.process.pid)
