"""Any Kubernetes API server, through kubectl and helm. A cluster of nodes is one with more."""

import base64
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from duplex_api.constants import (
    API_GROUP,
    POOL_PLURAL,
    POOL_SHORT_NAME,
    SESSION_PLURAL,
    SESSION_SHORT_NAME,
)

T = TypeVar("T")
Json = dict[str, Any]
Documents = str | Json | Sequence[Json]
"""YAML text, one object, or several."""

CRD_FOLDER = Path(__file__).parents[2] / "crds"
CACHE_VARIABLES = ("KUBECACHEDIR", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
TIMEOUT_S = 120.0
POLL_S = 0.2
POD_SECURITY = "pod-security.kubernetes.io"
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


class KubeError(Exception):
    """kubectl or helm failed; the text is what it said."""


class Kube:
    """A server and the programs that speak with it. Methods raise KubeError.

    caches: folder for what kubectl and helm keep; default: the user's own.
    """

    def __init__(
        self, kubeconfig: Path, kubectl: Path, helm: Path, caches: Path | None = None
    ) -> None:
        self.kubeconfig = kubeconfig
        self._kubectl = kubectl
        self._helm = helm
        self._caches = {} if caches is None else {name: str(caches) for name in CACHE_VARIABLES}

    # --- programs ---

    def kubectl(
        self,
        *arguments: str,
        namespace: str | None = None,
        stdin: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """What it printed."""
        where = () if namespace is None else ("--namespace", namespace)
        return self._run((self._kubectl, *where, *arguments), stdin, timeout_s)

    def helm(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        return self._run((self._helm, *arguments), None, timeout_s)

    def _run(self, command: Sequence[str | Path], stdin: str | None, timeout_s: float) -> str:
        try:
            done = subprocess.run(
                command,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
                env=self.environment(),
            )
        except subprocess.TimeoutExpired:
            raise KubeError(f"no answer in {timeout_s} s: {_shown(command)}") from None
        if done.returncode != 0:
            raise KubeError(f"{_shown(command)}: {done.stderr.strip()}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """For programs that shall speak with this server."""
        return {**os.environ, **self._caches, "KUBECONFIG": str(self.kubeconfig)}

    # --- objects ---

    def apply(self, documents: Documents, namespace: str | None = None) -> None:
        self.kubectl("apply", "-f", "-", namespace=namespace, stdin=_yaml(documents))

    def create(self, document: Json | str, namespace: str | None = None) -> Json:
        """Unlike apply it refuses what exists, and understands metadata.generateName."""
        text = _yaml(document)
        made = self.kubectl("create", "-f", "-", "-o", "json", namespace=namespace, stdin=text)
        return json.loads(made)

    def delete(self, documents: Documents, namespace: str | None = None) -> None:
        """Without waiting for the end; what does not exist is fine."""
        arguments = ("delete", "-f", "-", "--ignore-not-found", "--wait=false")
        self.kubectl(*arguments, namespace=namespace, stdin=_yaml(documents))

    def get(self, kind: str, name: str, namespace: str | None = None) -> Json:
        return json.loads(self.kubectl("get", kind, name, "-o", "json", namespace=namespace))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Json | None:
        """None if there is none."""
        arguments = ("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(self.kubectl(*arguments, namespace=namespace) or "null")

    def items(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Json]:
        arguments = ("get", kind, "-o", "json", "--selector", selector)
        return json.loads(self.kubectl(*arguments, namespace=namespace))["items"]

    def secret(self, name: str, namespace: str) -> dict[str, bytes]:
        """Its contents by key."""
        data = self.get("secret", name, namespace).get("data", {})
        return {key: base64.b64decode(value) for key, value in data.items()}

    def patch(
        self,
        kind: str,
        name: str,
        change: Json | list[Json],
        namespace: str | None = None,
        *,
        subresource: str | None = None,
    ) -> None:
        """A mapping is a merge patch, a list a JSON patch."""
        form = "merge" if isinstance(change, Mapping) else "json"
        part = () if subresource is None else (f"--subresource={subresource}",)
        arguments = ("patch", kind, name, f"--type={form}", *part, "-p", json.dumps(change))
        self.kubectl(*arguments, namespace=namespace)

    def wait(
        self,
        resource: str,
        condition: str,
        namespace: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """resource: kind/name; condition: what `kubectl wait --for` takes, as condition=Ready."""
        arguments = ("wait", resource, f"--for={condition}", f"--timeout={timeout_s:.0f}s")
        self.kubectl(*arguments, namespace=namespace, timeout_s=timeout_s + 10)

    @contextmanager
    def watch(self, kind: str, namespace: str) -> Generator["subprocess.Popen[str]"]:
        """`kubectl get KIND --watch`, with its output to be read."""
        command = (self._kubectl, "--namespace", namespace, "get", kind, "--watch")
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    @contextmanager
    def namespace(self, prefix: str = "test", enforce: str = "restricted") -> Generator[str]:
        """A new namespace under a level of Pod Security; deleted, without waiting, at the end."""
        name = f"{prefix}-{secrets.token_hex(4)}"
        self.create(restricted_namespace(name, enforce))
        try:
            until(
                lambda: self.find("serviceaccount", "default", name) is not None,
                f"the service account of {name}",
            )
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def may(self, user: str, verb: str, resource: str, namespace: str, *more: str) -> bool:
        """What the authorizer says now: it learns of a role or a binding a moment after the API
        server has taken it."""
        arguments = ("auth", "can-i", verb, resource, f"--as={user}", "--quiet", *more)
        try:
            self.kubectl(*arguments, namespace=namespace)
        except KubeError:
            return False
        return True

    def await_right(self, user: str, verb: str, resource: str, namespace: str) -> None:
        allowed = partial(self.may, user, verb, resource, namespace)
        until(allowed, f"the right of {user} to {verb} {resource}")

    def token_for(self, service_account: str, namespace: str) -> str:
        """A bearer token of it, good for an hour."""
        return self.kubectl("create", "token", service_account, namespace=namespace).strip()

    def install_crds(self) -> None:
        """Both kinds of this project, from the generated files, ready to be used."""
        for file in sorted(CRD_FOLDER.glob("*.yaml")):
            self.kubectl("apply", "-f", str(file))
        self.await_kinds()

    def await_kinds(self) -> None:
        """Until the server serves both kinds and says so: Established comes a little earlier."""
        for plural in (SESSION_PLURAL, POOL_PLURAL):
            name = f"{plural}.{API_GROUP}"
            until(lambda name=name: self._is_established(name), f"the definition of {name}")
        for short_name in (SESSION_SHORT_NAME, POOL_SHORT_NAME):
            until(lambda name=short_name: self._explains(name), f"the kind {short_name}")

    def _is_established(self, definition: str) -> bool:
        """`kubectl wait` fails for one so new that it has no conditions at all."""
        conditions = self.get("crd", definition).get("status", {}).get("conditions") or ()
        return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)

    def _explains(self, kind: str) -> bool:
        with suppress(KubeError):
            return bool(self.kubectl("explain", kind))
        return False

    # --- pods ---

    def logs(self, pod: str, namespace: str, *, container: str = "", previous: bool = False) -> str:
        which = ("--container", container) if container else ()
        earlier = ("--previous",) if previous else ()
        return self.kubectl("logs", pod, *which, *earlier, namespace=namespace)

    def execute(self, pod: str, namespace: str, *command: str) -> str:
        return self.kubectl("exec", pod, "--", *command, namespace=namespace)

    @contextmanager
    def port_forward(self, target: str, port: int, namespace: str) -> Generator[int]:
        """target: pod/name or service/name. Yields a loopback port that leads there."""
        command = (
            *(self._kubectl, "--namespace", namespace, "port-forward", "--address", "127.0.0.1"),
            *(target, f":{port}"),
        )
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
        ) as process:
            try:
                assert process.stdout is not None
                yield _forwarded_port(process.stdout, _shown(command))
            finally:
                process.terminate()


def until(
    look: Callable[[], T | None], what: str, timeout_s: float = TIMEOUT_S, poll_s: float = POLL_S
) -> T:
    """What `look` gives as soon as it is neither None nor false. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(poll_s)


def _forwarded_port(stdout: Iterable[str], command: str) -> int:
    """What `kubectl port-forward` says first may be a warning."""
    said: list[str] = []
    for line in stdout:
        found = _FORWARDING.search(line)
        if found is not None:
            return int(found[1])
        said.append(line.strip())
    raise KubeError(f"{command}: {' '.join(said)}")


def restricted_namespace(name: str, enforce: str = "restricted") -> Json:
    """A namespace under a level of Pod Security."""
    labels = {f"{POD_SECURITY}/enforce": enforce}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def reserve_port() -> socket.socket:
    """A bound socket that keeps a loopback port for a server that shares ports (SO_REUSEPORT)."""
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


def _yaml(documents: Documents) -> str:
    if isinstance(documents, str):
        return documents
    if isinstance(documents, Mapping):
        return yaml.safe_dump(documents)
    return yaml.safe_dump_all(documents)


def _shown(command: Sequence[str | Path]) -> str:
    return " ".join((Path(command[0]).name, *map(str, command[1:])))
