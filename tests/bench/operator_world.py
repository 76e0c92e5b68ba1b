"""What an operator is measured in: an API server and a ledger server of its own, stand-in pods, and
the operator as the process that the image runs. Every part's processor time is told apart.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil
import yaml
from support.api_servers import ApiServer, running_api_server
from support.kube import reserve_port, restricted_namespace
from support.operators import login

from duplex_api.constants import API_VERSION, POOL_KIND, SESSION_KIND
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.resources import PODS, POOLS, SESSIONS
from duplex_operator.objects import ObjectKey
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from scripts.cluster import say
from tests.bench.operator_requests import dispatched, flow_schemas
from tests.bench.processes import cpu_s

NAMESPACE, POOL, ACCOUNT = "bench", "pool", "operator"
CREATE_AT_ONCE = 16
START_S = 90.0
_GAUGE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)

Json = dict[str, Any]


class World:
    """One namespace, one pool. `made` makes it."""

    def __init__(
        self, server: ApiServer, valkey: EmbeddedValkey, folder: Path, pods: int, slots: int
    ) -> None:
        self.server = server
        self.redis_url = valkey.url
        self.operator_kubeconfig = folder / "operator-kubeconfig"
        self.pods, self.slots = pods, slots
        self.user = KubernetesApi(ApiConnection(login(server.kubeconfig), requests_per_s=2_000))
        self._valkey = valkey
        self._kubelet: asyncio.subprocess.Process | None = None
        self._operator: Operator | None = None

    async def start(self) -> None:
        """Up to a pool of which all pods are ready. Needs a moment's operator to make them."""
        _prepare(self.server)
        token = self.server.token_for(ACCOUNT, NAMESPACE)
        config = yaml.safe_load(self.server.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        self.operator_kubeconfig.write_text(yaml.safe_dump(config))
        arguments = (str(self.server.kubeconfig), self.redis_url, NAMESPACE, str(self.slots))
        self._kubelet = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.stand_in_pods", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        spec = {"checkpoint": {"path": "/model"}, "slots": self.slots, "replicas": self.pods}
        pool = {"kind": POOL_KIND, "metadata": {"name": POOL}, "spec": spec}
        await self.user.create(POOLS, NAMESPACE, {"apiVersion": API_VERSION, **pool})
        with self.operator():
            await self.until_ready()

    async def until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            pool = await self.user.get(POOLS, ObjectKey(NAMESPACE, POOL))
            if pool.get("status", {}).get("freeSlots") == self.pods * self.slots:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the pool is not ready: {pool.get('status')}")
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        if self._kubelet is not None:
            assert self._kubelet.stdin is not None
            self._kubelet.stdin.close()
            await self._kubelet.wait()
        await self.user.connection.close()

    @contextmanager
    def operator(self) -> "Generator[Operator]":
        """Ends with SIGTERM, as a Deployment ends it."""
        with TemporaryDirectory() as folder:
            self._operator = Operator(self, Path(folder, "operator.log"))
            try:
                yield self._operator
            finally:
                self._operator.stop()
                self._operator = None

    async def order(self, do: str, **more: Any) -> Json:
        """To the stand-in pods."""
        assert self._kubelet is not None
        assert self._kubelet.stdin is not None
        assert self._kubelet.stdout is not None
        self._kubelet.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        answer = await self._kubelet.stdout.readline()
        return json.loads(answer)

    async def make_session(self, name: str) -> None:
        body = {"kind": SESSION_KIND, "metadata": {"name": name}}
        spec = {"poolRef": {"name": POOL}, "prompt": "You are a helpful assistant."}
        await self.user.create(
            SESSIONS, NAMESPACE, {"apiVersion": API_VERSION, **body, "spec": spec}
        )

    async def make_sessions(self, names: list[str]) -> None:
        """As fast as the API server takes them."""
        gate = asyncio.Semaphore(CREATE_AT_ONCE)

        async def make(name: str) -> None:
            async with gate:
                await self.make_session(name)

        await asyncio.gather(*(make(name) for name in names))

    async def pods_alive(self) -> int:
        return len((await self.user.list(PODS, NAMESPACE)).items)

    def requests(self) -> dict[str, float]:
        """What the operator's account has asked of the API server, by the server's own count:
        `upkeep` (its Lease, pools, pods) and `sessions` (all else)."""
        return dispatched(self.server.kubectl("get", "--raw", "/metrics"))

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds since each began."""
        mine = {child.name(): child.pid for child in psutil.Process().children()}
        pids = {
            name: mine[command]
            for name, command in (("api server", "kube-apiserver"), ("etcd", "etcd"))
        }
        if self._valkey.pid is not None:
            pids["ledger"] = self._valkey.pid
        if self._kubelet is not None:
            pids["stand-in pods"] = self._kubelet.pid
        if self._operator is not None:
            pids["operator"] = self._operator.process.pid
        return {name: cpu_s(pid) for name, pid in pids.items()} | {"load": time.process_time()}


class Operator:
    """The process. Its log is a file, and is shown when it ends by itself."""

    def __init__(self, world: World, log: Path) -> None:
        with reserve_port() as reserved:
            self.port = int(reserved.getsockname()[1])
        environment = {
            **os.environ,
            "KUBECONFIG": str(world.operator_kubeconfig),
            "DUPLEX_NAMESPACE": NAMESPACE,
            "DUPLEX_REDIS_URL": world.redis_url,
            "DUPLEX_SIDECAR_IMAGE": "duplex/sidecar:bench",
            "DUPLEX_GATEWAY_ENDPOINT": "wss://duplex.example/v1/realtime",
            "DUPLEX_HEALTH_PORT": str(self.port),
        }
        self.log = log
        self.began_s = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "duplex_operator"),
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        ended = self.process.poll()
        if ended is not None:
            raise RuntimeError(f"the operator ended: {ended}\n{self.log.read_text()[-4000:]}")
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def metrics(self) -> Mapping[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            text: str = page.read().decode()
        return {name: float(value) for name, value in _GAUGE.findall(text)}

    async def until_ready(self) -> None:
        url = f"http://127.0.0.1:{self.port}/readyz"

        def ready() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return True
            except OSError:
                return False

        deadline = time.monotonic() + START_S
        while not await asyncio.to_thread(ready):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator is not ready\n{self.log.read_text()[-4000:]}")
            await asyncio.sleep(0.05)

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) / 1024


@dataclass
class Clock:
    """Processor time of every part between two moments."""

    world: World
    began_s: float
    cpu_s: dict[str, float]

    @classmethod
    def of(cls, world: World) -> Self:
        return cls(world, time.monotonic(), world.cpu_s())

    def cores(self) -> dict[str, float]:
        """Of one core, by part, on average since it was made."""
        took_s, now = time.monotonic() - self.began_s, self.world.cpu_s()
        return {
            part: round((now[part] - was) / took_s, 3)
            for part, was in self.cpu_s.items()
            if part in now
        }


@asynccontextmanager
async def made(pods: int, slots: int) -> AsyncGenerator[World]:
    with TemporaryDirectory() as folder, running_api_server() as server:
        server.install_crds()
        valkey = EmbeddedValkey(Path(folder))
        valkey.start()
        try:
            world = World(server, valkey, Path(folder), pods, slots)
            try:
                say(f"{pods} pods of {slots} slots")
                await world.start()
                yield world
            finally:
                await world.stop()
        finally:
            valkey.stop()


def _prepare(server: ApiServer) -> None:
    """The namespace, the operator's account, and flows of its own, by which the API server counts
    its requests. Rights are not what is measured: it may do everything."""
    account = {"kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": NAMESPACE}}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    documents: list[Json] = [
        restricted_namespace(NAMESPACE),
        {"apiVersion": "v1", **account},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "bench-operator"},
            "roleRef": role,
            "subjects": [subject],
        },
        *flow_schemas(ACCOUNT, NAMESPACE),
    ]
    server.apply(documents)
