"""Valkey processes of the shapes that an installation has: a primary with its replica, a Sentinel,
a cluster of one node."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.ledger.embedded import EmbeddedValkey, server_binary

START_S = 90.0
"""A Sentinel that stood still for two seconds decides nothing for the next thirty."""
SLOTS = 16_384


@contextmanager
def frozen(valkey: EmbeddedValkey) -> Iterator[None]:
    """The server answers nothing, and connections to it stay."""
    pid = valkey.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def dead(valkey: EmbeddedValkey) -> Iterator[None]:
    crash(valkey)
    try:
        yield
    finally:
        valkey.start()


def crash(server: "EmbeddedValkey | ValkeyProcess") -> None:
    """SIGKILL of its process, while the disk keeps up: nothing that it has confirmed is lost.

    With `appendfsync everysec` a server answers up to two seconds before it writes as long as an
    earlier sync is under way, and on a busy machine one is. What a death costs then is the business
    of the tests that hold syncs; without syncs it writes before each answer. The setting ends with
    the process."""
    with Redis.from_url(server.url, socket_timeout=20) as client:
        client.config_set("appendfsync", "no")
    server.kill()


class ValkeyProcess:
    """One server on a port of 127.0.0.1; `arguments` as on its command line."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        sentinel_of: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port()
        self._arguments = arguments
        self._sentinel_of = sentinel_of
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def client(self) -> "Redis":
        return Redis(port=self.port, socket_timeout=20)

    def start(self) -> None:
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        argv = [str(server_binary()), *common, "--save", "", *self._arguments]
        if self._sentinel_of is not None:
            argv = [str(server_binary()), str(self._sentinel_config()), "--sentinel", *common]
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(argv, stdout=log, stderr=log, env=self._environment)
        log.close()
        wait_until(self._answers)

    def _sentinel_config(self) -> Path:
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor main 127.0.0.1 {self._sentinel_of} 1\n"
            "sentinel down-after-milliseconds main 500\n"
            "sentinel failover-timeout main 3000\n"
        )
        return config

    def _answers(self) -> bool:
        try:
            with self.client as client:
                return bool(client.ping())
        except RedisError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@contextmanager
def primary_and_replica(folder: Path) -> Generator[tuple[ValkeyProcess, ValkeyProcess]]:
    """The primary takes no write without a replica."""
    primary = ValkeyProcess(folder / "a", "--min-replicas-to-write", "1", "--appendonly", "yes")
    replica = ValkeyProcess(
        folder / "b", "--replicaof", f"127.0.0.1 {primary.port}", "--appendonly", "yes"
    )
    primary.start()
    try:
        with primary.client as client:
            client.config_set("repl-diskless-sync-delay", 0)
        replica.start()
        wait_until(lambda: connected_replicas(primary) == 1)
        with primary.client as client:  # the first confirmation after a sync takes a second
            client.set("first", 1)
            assert client.wait(1, round(1_000 * START_S)) == 1
        yield primary, replica
    finally:
        replica.kill()
        primary.kill()
        shutil.rmtree(folder, ignore_errors=True)


class FailingPair:
    """A primary with its replica, as often as they fail over. folder: for new replicas."""

    def __init__(self, folder: Path, primary: ValkeyProcess, replica: ValkeyProcess) -> None:
        self._folder = folder
        self.primary, self._replica = primary, replica
        self.started: list[ValkeyProcess] = []

    def fail_over(self) -> str:
        """The primary dies, its replica takes over and gets a replica of its own. Returns the new
        primary's address."""
        self.primary.kill()
        self.primary = self._replica
        with self.primary.client as client:
            client.config_set("repl-diskless-sync-delay", 0)
            client.config_set("min-replicas-to-write", 1)
            client.replicaof("NO", "ONE")
        new = ValkeyProcess(
            self._folder / f"more-{len(self.started)}",
            *("--replicaof", f"127.0.0.1 {self.primary.port}", "--appendonly", "yes"),
        )
        self.started.append(new)
        new.start()
        self._replica = new
        return self.primary.url


@contextmanager
def failing_pair(folder: Path) -> Generator[FailingPair]:
    with primary_and_replica(folder) as (primary, replica):
        pair = FailingPair(folder, primary, replica)
        try:
            yield pair
        finally:
            for server in pair.started:
                server.kill()


@contextmanager
def cluster_of_three(folder: Path) -> Generator[list[ValkeyProcess]]:
    """Three nodes of one cluster, each with a third of the slots."""
    nodes: list[ValkeyProcess] = []
    bus_ports: list[int] = []
    try:
        for number in range(3):
            bus_ports.append(free_port())
            bus = ("--cluster-enabled", "yes", "--cluster-port", str(bus_ports[-1]))
            node = ValkeyProcess(folder / str(number), *bus, "--cluster-node-timeout", "30000")
            nodes.append(node)
            node.start()
        for number, node in enumerate(nodes):
            with node.client as client:
                first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number:
                    meet = ("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, bus_ports[0])
                    client.execute_command(*meet)
        wait_until(lambda: all(_knows_all(node) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _knows_all(node: ValkeyProcess) -> bool:
    with node.client as client:
        info = client.cluster("info")
        return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3"


def connected_replicas(primary: ValkeyProcess) -> int:
    """Replicas that are in step and have said so lately."""
    with primary.client as client:
        return int(client.info("replication").get("min_slaves_good_slaves", 0))


def wait_until(condition: Callable[[], bool], within_s: float = START_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
