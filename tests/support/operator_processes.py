"""The operator as a process of its own, as its image runs it."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.api_servers import ApiServer

from duplex_sidecar.client.local_sidecar import free_port


@dataclass
class Process:
    process: subprocess.Popen[bytes]
    port: int

    def page(self, path: str) -> str:
        """Empty while there is no answer, or another one than 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as page:
                return str(page.read(), "utf-8")
        except OSError:
            return ""

    def leads(self) -> bool:
        return "duplex_operator_leads 1" in self.page("/metrics")


@contextmanager
def operator(
    api_server: ApiServer, namespace: str, redis_url: str, **more: str
) -> Iterator[Process]:
    """Of this namespace. Killed at the end."""
    port = free_port()
    environment = {
        **api_server.environment(),
        "DUPLEX_NAMESPACE": namespace,
        "DUPLEX_WATCH_NAMESPACES": namespace,
        "DUPLEX_REDIS_URL": redis_url,
        "DUPLEX_SIDECAR_IMAGE": "duplex/sidecar:1",
        "DUPLEX_HEALTH_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    } | more
    command = (sys.executable, "-m", "duplex_operator")
    with subprocess.Popen(command, env=environment, cwd=Path.cwd()) as process:
        try:
            yield Process(process, port)
        finally:
            process.kill()
