"""`duplex serve --from-environment`, as a pod starts it: two ports, TLS on the admin one, a token
file that is replaced under it, numbers for nobody who has no token, and a quiet end."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.certificates import make_certificate
from support.sidecars import Bed, make_bed

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.cli.serve import EXIT_USAGE
from duplex_sidecar.client.local_sidecar import free_port

pytestmark = pytest.mark.fault
UID = "5e0f7b62-0000-4000-8000-000000000001"


def command(environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    kept = {name: text for name, text in os.environ.items() if not name.startswith("DUPLEX_")}
    return subprocess.Popen(
        [sys.executable, "-m", "duplex_sidecar.cli.main", "serve", "--from-environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=kept | environment,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({}, "DUPLEX_CHECKPOINT is not set"),
        ({"DUPLEX_SLOTS": "several"}, "slots"),
        ({"DUPLEX_ADMIN_TOKEN_FILE": "/nowhere/token"}, "/nowhere/token"),
    ],
)
def test_an_environment_that_is_wrong(
    environment: dict[str, str], word: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    needed = {
        "DUPLEX_CHECKPOINT": str(tiny_checkpoint),
        "DUPLEX_REDIS_URL": "unix:///nowhere",
        "DUPLEX_PORT": str(free_port()),
        "DUPLEX_RUNTIME_DIR": str(tmp_path),
    }
    process = command(needed | environment if environment else {})
    output, _ = process.communicate(timeout=180)
    assert process.returncode == EXIT_USAGE
    assert word in output.decode()
    assert "Traceback" not in output.decode()


@pytest.fixture
def bed(tiny_checkpoint: Path) -> Iterator[Bed]:
    bed = make_bed(tiny_checkpoint)
    yield bed
    bed.close()


class Caller:
    """Of one port. trusted: a certificate, None for plain HTTP."""

    def __init__(self, port: int, trusted: Path | None = None) -> None:
        self._base = f"{'https' if trusted else 'http'}://127.0.0.1:{port}"
        self._context: ssl.SSLContext | None = None
        if trusted is not None:
            self._context = ssl.create_default_context(cafile=str(trusted))
            self._context.check_hostname = False

    def get(self, path: str, token: str = "") -> tuple[int, str]:
        request = urllib.request.Request(f"{self._base}{path}")
        if token:
            request.add_header("authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self, path: str, token: str = "") -> int:
        return self.get(path, token)[0]


def test_a_pods_two_ports(bed: Bed, tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    make_certificate(tmp_path, "first")
    token_file = tmp_path / "token"
    token_file.write_text("first token\n")
    process = command(
        {
            "DUPLEX_CHECKPOINT": str(bed.checkpoint),
            "DUPLEX_REDIS_URL": bed.valkey.url,
            "DUPLEX_RUNTIME_DIR": str(bed.work / "pod"),
            "DUPLEX_CACHE_DIR": str(default_cache_dir()),
            "DUPLEX_HOST": "0.0.0.0",
            "DUPLEX_PORT": str(port),
            "DUPLEX_ADMIN_PORT": str(admin_port),
            "DUPLEX_ADMIN_TOKEN_FILE": str(token_file),
            "DUPLEX_TLS_CERT_FILE": str(tmp_path / "tls.crt"),
            "DUPLEX_TLS_KEY_FILE": str(tmp_path / "tls.key"),
            "DUPLEX_POD_UID": UID,
        }
    )
    try:
        door = Caller(port)
        admin = Caller(admin_port, tmp_path / "tls.crt")
        wait_for(lambda: door.status("/livez") == 200)
        assert json.loads(door.get("/readyz")[1])["replica"].startswith(f"{UID}-")
        for path in ("/metrics", "/statusz", "/admin/v1/sessions"):
            assert door.status(path) == 401
        assert door.status("/metrics", "first token") == 200
        assert door.status("/admin/v1/sessions", "first token") == 404, "it is on its own port"
        for path in ("/", "/livez", "/metrics", "/admin/v1/sessions", "/admin/v1/feed"):
            assert admin.status(path) == 401
        assert admin.status("/admin/v1/sessions", "first token") == 503, "no ledger yet"
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            Caller(admin_port).get("/admin/v1/sessions")

        (tmp_path / "new token").write_text("second token")
        (tmp_path / "new token").rename(token_file)
        wait_for(lambda: admin.status("/admin/v1/sessions", "second token") == 503)
        assert admin.status("/admin/v1/sessions", "first token") == 503, "it is good for a while"
        assert door.status("/metrics", "second token") == 200

        make_certificate(tmp_path, "second")
        wait_for(lambda: reaches(Caller(admin_port, tmp_path / "tls.crt")))
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output.decode()
    for secret in ("first token", "second token"):
        assert secret not in output.decode()


def reaches(caller: Caller) -> bool:
    try:
        return caller.status("/livez") == 401
    except urllib.error.URLError:
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
