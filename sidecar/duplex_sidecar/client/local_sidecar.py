"""A sidecar of one's own on this machine, as `duplex run`, the demo, tests and benches start it."""

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from duplex_api.admin import ADMIN_PREFIX
from duplex_sidecar.settings import SidecarSettings

READY_TIMEOUT_S = 240.0
_POLL_S = 0.2
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LAST_PORT = 20_000, 60_000
_NODE_PORTS = 30_000
"""From here on a cluster on this machine may listen."""
_ENOUGH_PORTS = 4_000
_PORT_TRIES = 100


class SidecarFailed(Exception):
    """The sidecar ended or did not become ready; the text holds the last lines that it wrote."""


class ApiError(Exception):
    """The admin API refused. `body` is its typed answer."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {json.dumps(body)}")
        self.status = status
        self.body = body


def free_port() -> int:
    """A port that nobody listens on now. Not one of those that the system itself gives to
    connections, where there are others: it is to be free still when a process has started."""
    for port in random.sample(_ports_of_our_own(), _PORT_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port in {_PORT_TRIES} tries")


def _ports_of_our_own() -> range:
    try:
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_given = 0
    own = range(_FIRST_PORT, min(first_given, _NODE_PORTS))
    return own if len(own) >= _ENOUGH_PORTS else range(_FIRST_PORT, _LAST_PORT)


@dataclass
class LocalSidecar:
    """One `duplex serve` process and its stage processes."""

    settings: SidecarSettings
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def prepare(cls, folder: Path, **settings: Any) -> "LocalSidecar":
        """A sidecar below `folder` on a free port, with an admin token of its own."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        values: dict[str, Any] = {
            "runtime_dir": str(folder.absolute()),
            "port": free_port(),
            "admin_token": secrets.token_urlsafe(32),
        } | settings
        return cls(SidecarSettings(**values), folder / "sidecar.log")

    @property
    def base_url(self) -> str:
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def realtime_url(self) -> str:
        """What the `openai` SDK takes as base URL."""
        return f"{self.base_url}/v1"

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it."""
        config = Path(self.settings.runtime_dir) / "sidecar.json"
        config.touch(mode=0o600)
        config.write_bytes(msgspec.json.encode(self.settings))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "duplex_sidecar.cli.main", "serve", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(
        self,
        on_progress: Callable[[str], None] = lambda text: None,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> float:
        """Seconds until ready. Raises SidecarFailed."""
        started, name, waiting_for = time.monotonic(), self.settings.replica, ""
        while time.monotonic() - started < timeout_s:
            if self.process is None or self.process.poll() is not None:
                raise SidecarFailed(f"{name} ended before it was ready\n{self.log_tail()}")
            ready, waiting_for = self.readiness()
            if ready:
                return time.monotonic() - started
            on_progress(waiting_for)
            time.sleep(_POLL_S)
        waited = f"{name} was not ready in {timeout_s:.0f} s, it waits for {waiting_for}"
        raise SidecarFailed(f"{waited}\n{self.log_tail()}")

    def readiness(self) -> tuple[bool, str]:
        """(ready, what it waits for)."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/readyz", timeout=5) as answer:
                return bool(json.load(answer)["ready"]), ""
        except urllib.error.HTTPError as error:
            return False, str(json.load(error).get("waiting_for") or "")
        except (OSError, ValueError):
            return False, "starting"

    def open_session(self, session: str, manifest: str, token: str) -> dict[str, Any]:
        """PUT a DuplexSession manifest. Raises ApiError."""
        return self.admin("PUT", f"/sessions/{session}", {"manifest": manifest, "token": token})

    def declare_dead(self, replica: str) -> None:
        """Tell this sidecar that another replica's process has ended."""
        self.admin("POST", "/dead-replicas", {"replica": replica})

    def admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call of the admin API. Raises ApiError."""
        request = urllib.request.Request(
            f"{self.base_url}{ADMIN_PREFIX}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "authorization": f"Bearer {self.settings.admin_token}",
                "content-type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, json.load(error)) from None

    def tree(self) -> list[psutil.Process]:
        """The sidecar's process and everything below it."""
        if self.process is None:
            return []
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stage_process(self, stage: str) -> psutil.Process | None:
        """The process of one stage."""
        wanted = f"duplex_sidecar.stages.{stage}.process"
        for process in self.tree():
            try:
                if wanted in process.cmdline():
                    return process
            except psutil.Error:
                continue
        return None

    def kill_tree(self) -> None:
        """SIGKILL to every process of the tree, as a node's death would."""
        tree = self.tree()
        for process in tree:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        psutil.wait_procs(tree, timeout=10)
        if self.process is not None:
            self.process.wait(timeout=10)

    def ask_to_stop(self) -> None:
        """SIGTERM, without waiting."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float = 30.0) -> int | None:
        """SIGTERM and wait; by force after the time. Returns the exit status."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill_tree()
        return self.process.returncode

    def keep_logs(self, folder: Path) -> None:
        """Copies what it and its stages have written into `folder`: `sidecar.log`, `STAGE.log`."""
        folder.mkdir(parents=True, exist_ok=True)
        stages = Path(self.settings.runtime_dir).glob("*/log")
        named = {"sidecar": self.log} | {log.parent.name: log for log in stages}
        for name, log in named.items():
            with suppress(FileNotFoundError):
                shutil.copyfile(log, folder / f"{name}.log")

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
