"""The script of `helm test`, against an API server and a gateway that only look like ones."""

import base64
import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.sync.server import ServerConnection, serve

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[3] / "charts" / "duplex" / "files" / "conversation.py"
SESSIONS = "/apis/duplex.dev/v1alpha1/namespaces/voice/duplexsessions"
POOLS = "/apis/duplex.dev/v1alpha1/namespaces/voice/duplexpools"
SECRET = "/api/v1/namespaces/voice/secrets/talk-test-token"
UID, TOKEN, ACCOUNT_TOKEN = "0d0a-uid", "session-token", "account-token"
CREATED = f"POST {SESSIONS}"
DELETED = f"DELETE {SESSIONS}/talk-test"


@dataclass
class Cluster:
    """One session, which is in `status` as soon as it was made."""

    status: dict[str, Any]
    pools: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"metadata": {"name": "full"}, "status": {"freeSlots": 0}},
            {"metadata": {"name": "free"}, "status": {"freeSlots": 2}},
        ]
    )
    session: dict[str, Any] | None = None
    calls: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    taken: list[str] = field(default_factory=list)
    """Pools of the sessions that were made."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append(f"{method} {path}")
        if path == POOLS:
            return 200, {"items": self.pools}
        if path == SECRET:
            return 200, {"data": {"token": base64.b64encode(TOKEN.encode()).decode()}}
        if method == "POST":
            self.taken.append(body["spec"]["poolRef"]["name"])
            self.session = body | {"status": self.status}
            self.session["metadata"]["uid"] = UID
            return 201, self.session
        found, self.session = self.session, None if method == "DELETE" else self.session
        return (404, {"message": "not found"}) if found is None else (200, found)


READY = {
    "phase": "Ready",
    "tokenSecret": {"name": "talk-test-token", "key": "token"},
    "conditions": [{"type": "Ready", "status": "True"}],
}


@contextmanager
def api_server(cluster: Cluster) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            cluster.tokens.add(self.headers.get("Authorization"))
            status, answer = cluster.answer(self.command, urlsplit(self.path).path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Gateway:
    """Answers each unit; `units` of them, then it closes."""

    units: int = 3
    error: dict[str, str] | None = None
    dialled: list[tuple[str, str | None]] = field(default_factory=list)

    def talk(self, socket: ServerConnection) -> None:
        request = socket.request
        assert request is not None
        self.dialled.append((request.path, request.headers.get("Authorization")))
        if self.error is not None:
            socket.send(json.dumps({"type": "error", "error": self.error}))
        answered = 0
        for message in socket:
            event = json.loads(message)
            if event["type"] == "input_audio_buffer.append" and answered < self.units:
                assert len(base64.b64decode(event["audio"])) == 32_000
                socket.send(json.dumps({"type": "duplex.unit", "wall_ms": 70.0}))
                answered += 1
            elif event["type"] == "session.close":
                socket.send(json.dumps({"type": "session.closed"}))
                return


@contextmanager
def listening(gateway: Gateway, context: ssl.SSLContext | None = None) -> Iterator[str]:
    with serve(gateway.talk, "127.0.0.1", 0, ssl=context) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        try:
            yield f"{'ws' if context is None else 'wss'}://127.0.0.1:{port}/v1/realtime"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(ACCOUNT_TOKEN)
    return tmp_path


def converse(
    account: Path, api_url: str, gateway_url: str, **more: str
) -> subprocess.CompletedProcess[str]:
    told = {
        "TEST_ACCOUNT_DIR": str(account),
        "TEST_API_SERVER": api_url,
        "TEST_GATEWAY_URL": gateway_url,
        "TEST_NAMESPACE": "voice",
        "TEST_SESSION": "talk-test",
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        (sys.executable, str(SCRIPT)),
        env=told | more,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_a_conversation_is_held_and_nothing_stays(account: Path) -> None:
    cluster, gateway = Cluster(READY), Gateway()
    with api_server(cluster) as api_url, listening(gateway) as url:
        done = converse(account, api_url, url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("A conversation was held: session ready after ")
    assert "70, 70, 70 ms; closed; deleted" in done.stdout
    assert gateway.dialled == [(f"/v1/realtime?session={UID}", f"Bearer {TOKEN}")]
    assert cluster.tokens == {f"Bearer {ACCOUNT_TOKEN}"}
    assert cluster.session is None


def test_the_pool_with_a_free_slot_is_taken_unless_one_is_named(account: Path) -> None:
    taken: list[str] = []
    for more in ({}, {"TEST_POOL": "full"}):
        cluster = Cluster({"phase": "Ended", "reason": "Refused", "message": "No room."})
        with api_server(cluster) as api_url:
            done = converse(account, api_url, "ws://127.0.0.1:1/", **more)
        assert done.returncode == 1
        assert "FAILED: session talk-test is not ready: Ended Refused No room." in done.stdout
        taken += cluster.taken
    assert taken == ["free", "full"]


def test_a_session_left_over_is_deleted_first(account: Path) -> None:
    cluster, gateway = Cluster(READY), Gateway()
    cluster.session = {"metadata": {"uid": "old"}, "status": READY}
    with api_server(cluster) as api_url, listening(gateway) as url:
        assert converse(account, api_url, url).returncode == 0
    assert cluster.calls.index(DELETED) < cluster.calls.index(CREATED)
    assert [path for path, _ in gateway.dialled] == [f"/v1/realtime?session={UID}"]


def test_without_a_pool_it_says_what_to_do(account: Path) -> None:
    with api_server(Cluster(READY, pools=[])) as api_url:
        done = converse(account, api_url, "ws://127.0.0.1:1/")
    assert done.returncode == 1
    assert "FAILED: there is no DuplexPool in namespace voice: apply one" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("gateway", "said"),
    [
        (Gateway(units=1), "1 of 3 units were answered before the conversation closed"),
        (Gateway(error={"code": "session_not_found", "message": "no"}), "session_not_found: no"),
        (None, "the gateway: ConnectionRefusedError"),
    ],
)
def test_a_failed_conversation_is_told_and_deleted(
    account: Path, gateway: Gateway | None, said: str
) -> None:
    cluster = Cluster(READY)
    with api_server(cluster) as api_url:
        if gateway is None:
            done = converse(account, api_url, "ws://127.0.0.1:1/v1/realtime")
        else:
            with listening(gateway) as url:
                done = converse(account, api_url, url)
    assert done.returncode == 1
    assert f"FAILED: {said}" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    assert cluster.session is None


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("192.0.2.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_file, key_file


@pytest.mark.parametrize("trusted", ["voice.example", "other.example"])
def test_with_tls_it_wants_the_very_certificate(account: Path, trusted: str) -> None:
    files = {name: certificate(account, name) for name in ("voice.example", "other.example")}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files["voice.example"])
    with api_server(Cluster(READY)) as api_url, listening(Gateway(), context) as url:
        done = converse(
            account,
            api_url,
            url,
            TEST_CERTIFICATE_FILE=str(files[trusted][0]),
            TEST_SERVER_NAME="voice.example",
        )
    assert done.returncode == (0 if trusted == "voice.example" else 1)
    assert trusted == "voice.example" or "CERTIFICATE_VERIFY_FAILED" in done.stdout
