"""The gateway as a process, and its certificate."""

import asyncio
import datetime
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.patience import PATIENCE_S
from support.realtime import RealtimeClient
from websockets.asyncio.client import connect

from duplex_gateway.tls import Certificate
from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, Yard, calling, gate, http_get, until_ready, yard
from session_kit import TOKEN, second

pytestmark = pytest.mark.integration


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


def start(environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUPLEX_")}
    return subprocess.Popen(
        [sys.executable, "-m", "duplex_gateway"],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_the_process_serves_until_sigterm(valkey: EmbeddedValkey, ground: Yard) -> None:
    """Its calls are closed with 1012; its log names the session and holds no token."""
    await ground.build()
    session = f"p-{secrets.token_hex(4)}"
    await ground.operator.declare(session)
    port, health_port = free_port(), free_port()
    process = start(
        {
            "DUPLEX_REDIS_URL": valkey.url,
            "DUPLEX_HOST": "127.0.0.1",
            "DUPLEX_PORT": str(port),
            "DUPLEX_HEALTH_HOST": "127.0.0.1",
            "DUPLEX_HEALTH_PORT": str(health_port),
            "DUPLEX_DRAIN_GRACE_S": "0.2",
        }
    )
    try:
        await asyncio.to_thread(wait_for_port, health_port)
        await until_ready(health_port)
        front = Gate(port, health_port, asyncio.Event(), asyncio.create_task(asyncio.sleep(0)))
        async with calling(front, session) as client:
            await client.until("session.created")
            await client.format()
            await client.append(second(1))
            await client.until_unit(1)
            process.send_signal(signal.SIGTERM)
            assert (await client.until_closed())[0] == 1012
        _, errors = await asyncio.to_thread(process.communicate, None, PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in errors.splitlines()]
    assert TOKEN.encode() not in errors
    ended = [line for line in lines if line["message"] == "call ended"]
    assert [(line["session"], line["fields"]["end"]) for line in ended] == [(session, "shutdown")]


def wait_for_port(port: int) -> None:
    for _ in range(2_000):
        try:
            socket.create_connection(("127.0.0.1", port), 0.1).close()
        except OSError:
            signal.sigtimedwait([], 0.05)
        else:
            return
    raise AssertionError("nobody listens")


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({}, 2, b"redis_url"),
        ({"DUPLEX_REDIS_URL": "redis://:secret@x", "DUPLEX_PORT": "ninety"}, 2, b"port"),
        ({"DUPLEX_REDIS_URL": "no-such-scheme://:secret@x"}, 2, b"ledger"),
    ],
)
def test_a_process_that_cannot_start_says_why(
    environment: dict[str, str], status: int, words: bytes
) -> None:
    ports = {"DUPLEX_HEALTH_PORT": "0"} | (
        {} if "DUPLEX_PORT" in environment else {"DUPLEX_PORT": "0"}
    )
    process = start(ports | environment)
    _, errors = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == status, errors
    assert words in errors
    assert b"secret" not in errors
    assert b"Traceback" not in errors


# --- TLS ------------------------------------------------------------------------------------------


def write_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    files = folder / "tls.crt", folder / "tls.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(files[0]), str(files[1])


async def name_at(port: int) -> str:
    """Common name of the certificate that is shown there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    names = x509.load_der_x509_certificate(shown).subject
    return str(names.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


async def test_a_certificate_is_read_again(
    valkey: EmbeddedValkey, ground: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex_gateway.tls.LOOK_EVERY_S", 0.02)
    cert_file, key_file = write_certificate(tmp_path, "first")
    await ground.build()
    session = f"p-{secrets.token_hex(4)}"
    await ground.operator.declare(session)
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    async with gate(valkey.url, tls_cert_file=cert_file, tls_key_file=key_file) as front:
        assert await name_at(front.port) == "first"
        headers = {"authorization": f"Bearer {TOKEN}"}
        url = front.url(session, scheme="wss")
        async with connect(url, ssl=trust, additional_headers=headers, proxy=None) as socket_:
            client = RealtimeClient(socket_, session)
            await client.until("session.created")
            write_certificate(tmp_path, "second")
            async with asyncio.timeout(PATIENCE_S):
                while await name_at(front.port) != "second":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await client.format()  # this connection stands
        assert (await http_get(front.health_port, "/readyz"))[0] == 200


def test_a_half_written_certificate_is_left_alone(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, "first")
    certificate = Certificate(*files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    assert not certificate.look(context)
    key = Path(files[1]).read_bytes()
    write_certificate(tmp_path, "second")
    new_key = Path(files[1]).read_bytes()
    Path(files[1]).write_bytes(key)  # the old key to the new certificate
    assert not certificate.look(context)
    Path(files[1]).unlink()
    assert not certificate.look(context)
    Path(files[1]).write_bytes(new_key)
    assert certificate.look(context)
    assert not certificate.look(context)
