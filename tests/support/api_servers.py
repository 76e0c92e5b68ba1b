"""A Kubernetes API server without nodes: etcd, kube-apiserver and kube-controller-manager as plain
processes on loopback ports. Needs no root. Pods are objects only: nothing runs them.
"""

import datetime
import ipaddress
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support.kube import Kube, reserve_port

from scripts import cluster

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
CONTROLLERS = (
    "namespace-controller",
    "garbage-collector-controller",
    "serviceaccount-controller",
    "clusterrole-aggregation-controller",
    "disruption-controller",
)
"""What makes namespaces usable, and what deletes that of which the owner is gone."""


Process = subprocess.Popen[bytes]


class ApiServer(Kube):
    """A running one."""

    def __init__(
        self, folder: Path, port: int, binaries: Path, start: Callable[[], Process]
    ) -> None:
        """start: starts its process."""
        programs = (binaries / "kubectl", binaries / "helm")
        super().__init__(folder / "kubeconfig", *programs, folder / "caches")
        self.folder = folder
        self.url = f"https://127.0.0.1:{port}"
        self._start = start
        self._process = start()

    def pause(self) -> None:
        """It answers nobody and closes nothing, as a machine that hangs."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Its connections break. What it stored stays."""
        _stop(self._process)

    def restart(self) -> None:
        """After `kill`: returns when it is ready. Raises ClusterError."""
        self._process = self._start()
        self.await_ready()

    def await_ready(self) -> None:
        """Raises ClusterError."""
        _await_ready(self, self._process, self.folder / "kube-apiserver.log")

    def finish_pod(self, name: str, namespace: str) -> None:
        """Remove a pod that is bound to a node, as its kubelet would once it has ended."""
        arguments = ("delete", "pod", name, "--grace-period=0", "--force", "--ignore-not-found")
        self.kubectl(*arguments, namespace=namespace)


@contextmanager
def running_api_server(*more: str) -> Generator[ApiServer]:
    """Compiles the binaries first if they are not in the cache. more: flags of the API server.
    Raises ClusterError."""
    binaries = cluster.build(cluster.API_PARTS)
    folder = Path(tempfile.mkdtemp(prefix="duplex-api-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ports = [stack.enter_context(reserve_port()) for _ in range(3)]
        client, peer, secure = (kept.getsockname()[1] for kept in ports)
        write_credentials(folder, secure)
        start = _starter(stack, folder, binaries)
        start("etcd", etcd_flags(folder, client, peer))
        flags = (*api_server_flags(folder, client, secure), *more)
        server = ApiServer(folder, secure, binaries, lambda: start("kube-apiserver", flags))
        server.await_ready()
        start("kube-controller-manager", controller_flags(folder))
        yield server


def _starter(
    stack: ExitStack, folder: Path, binaries: Path
) -> Callable[[str, Sequence[str]], Process]:
    """Starts programs that end with the stack, and with this process however it ends."""

    def start(name: str, flags: Sequence[str]) -> Process:
        log = stack.enter_context((folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", binaries / name, *flags),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        stack.callback(_stop, process)
        return process

    return start


def _stop(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


def _await_ready(server: ApiServer, process: Process, log: Path) -> None:
    context = ssl.create_default_context(cafile=server.folder / "ca.crt")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/readyz", timeout=5, context=context):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise cluster.ClusterError(f"the API server did not become ready:\n{tail}")


# --- flags ---------------------------------------------------------------------------------------


def etcd_flags(folder: Path, client: int, peer: int) -> tuple[str, ...]:
    client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return (
        *("--name=e", f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn"),
        *("--socket-reuse-port", f"--initial-cluster=e={peer_url}"),
        *(f"--listen-client-urls={client_url}", f"--advertise-client-urls={client_url}"),
        *(f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"),
    )


def api_server_flags(folder: Path, client: int, secure: int) -> tuple[str, ...]:
    return (
        f"--etcd-servers=http://127.0.0.1:{client}",
        *("--bind-address=127.0.0.1", f"--secure-port={secure}", "--permit-port-sharing"),
        *("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"),
        *("--authorization-mode=RBAC", f"--client-ca-file={folder / 'ca.crt'}"),
        f"--tls-cert-file={folder / 'server.crt'}",
        f"--tls-private-key-file={folder / 'server.key'}",
        *("--service-cluster-ip-range=10.96.0.0/16", f"--cert-dir={folder}"),
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={folder / 'accounts.key'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
    )


def controller_flags(folder: Path) -> tuple[str, ...]:
    return (
        *(f"--kubeconfig={folder / 'kubeconfig'}", "--secure-port=0", "--leader-elect=false"),
        f"--service-account-private-key-file={folder / 'accounts.key'}",
        f"--controllers={','.join(CONTROLLERS)}",
    )


# --- credentials ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def key_pem(self) -> bytes:
        return _key_pem(self.key)

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def write_credentials(folder: Path, port: int) -> None:
    """ca.crt, server.crt, server.key, accounts.key, and a kubeconfig of system:masters."""
    authority = make_identity("duplex-test-ca", None)
    server = make_identity("kube-apiserver", authority)
    admin = make_identity("admin", authority, organization="system:masters")
    accounts = ec.generate_private_key(ec.SECP256R1())
    for name, content in (
        ("ca.crt", authority.certificate_pem()),
        ("server.crt", server.certificate_pem()),
        ("server.key", server.key_pem()),
        ("accounts.key", _key_pem(accounts)),
        ("kubeconfig", _kubeconfig(authority, admin, port)),
    ):
        file = folder / name
        file.touch(mode=0o600)
        file.write_bytes(content)


def make_identity(
    name: str, authority: Identity | None, organization: str = "", hosts: Sequence[str] = ()
) -> Identity:
    """A certificate for both ends of TLS, good on loopback and for these hosts, or an authority if
    there is none above it."""
    key = ec.generate_private_key(ec.SECP256R1())
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if organization:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    subject = x509.Name(parts)
    issuer = authority.certificate.subject if authority else subject
    signer = authority.key if authority else key
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(_usage(authority is None), critical=True)
        .add_extension(x509.BasicConstraints(authority is None, None), critical=True)
    )
    if authority is not None:
        usages = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = [*map(x509.DNSName, ("localhost", *hosts)), loopback]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Identity(key, builder.sign(signer, hashes.SHA256()))


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _kubeconfig(authority: Identity, user: Identity, port: int) -> bytes:
    cluster_entry = {
        "server": f"https://127.0.0.1:{port}",
        "certificate-authority-data": _base64(authority.certificate_pem()),
    }
    user_entry = {
        "client-certificate-data": _base64(user.certificate_pem()),
        "client-key-data": _base64(user.key_pem()),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "api", "cluster": cluster_entry}],
        "users": [{"name": "admin", "user": user_entry}],
        "contexts": [{"name": "api", "context": {"cluster": "api", "user": "admin"}}],
        "current-context": "api",
    }
    return yaml.safe_dump(document).encode()


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
