"""A release of the chart on this machine's own cluster, and what it needs there to run real
conversations: images without a registry, a pool whose pods run this checkout."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import yaml
from redis import Redis
from support.clusters import OwnCluster
from support.kube import Json, Kube, until
from support.sidecar_pods import (
    READY_TIMEOUT_S,
    load_sidecar_image,
    mount_program,
    share_checkpoint,
    share_program,
)

from duplex_sidecar.ledger.embedded import server_binary
from duplex_sidecar.ledger.keys import session_keys
from scripts.cluster import ROOT

CONTROL_IMAGE = "duplex-control:0.1.0"
LEDGER_IMAGE = "duplex-test-ledger:1"
CHARTS = ROOT / "charts"
EXAMPLES = ROOT / "examples"
LEDGER_DOCKERFILE = ROOT / "tests" / "cluster" / "ledger.Dockerfile"
INSTALL_TIMEOUT_S = 300
GONE_TIMEOUT_S = 150
"""An operator erases a ledger for 30 s at most before it lets a session go."""
RELEASE = "talk"
SIDECARS = "app.kubernetes.io/component=sidecar"


@dataclass(frozen=True, slots=True)
class Voice:
    """A release that serves the whole cluster, and a pool in its namespace, which enforces Pod
    Security `restricted`."""

    cluster: OwnCluster
    namespace: str
    pool: str

    def await_free(self, slots: int) -> None:
        """Until that many sessions would be placed at once."""
        until(lambda: self.free_slots() >= slots, f"{slots} free slots", READY_TIMEOUT_S)

    def free_slots(self) -> int:
        pool = self.cluster.get("dxp", self.pool, self.namespace)
        return pool.get("status", {}).get("freeSlots", 0)

    def pod_of(self, session: str) -> str:
        """The pod that runs it; empty while none does."""
        status: Json = self.cluster.get("dxs", session, self.namespace).get("status", {})
        return status.get("placement", {}).get("pod", "")


@contextmanager
def running_voice(
    cluster: OwnCluster, pods: int = 2, resources: Mapping[str, Mapping[str, str]] | None = None
) -> Generator[Voice]:
    """Of that many pods with one slot each. Begins when they take sessions. resources: requests
    and limits of each sidecar that are different from the example's."""
    load_images(cluster)
    install_kinds(cluster)
    with cluster.namespace("voice") as namespace:
        install(cluster, namespace)
        try:
            pool = cpu_pool(cluster, namespace, replicas=pods, slots=1)
            (sidecar,) = pool["spec"]["template"]["spec"]["containers"]
            for kind, amounts in (resources or {}).items():
                sidecar["resources"][kind] |= amounts
            cluster.apply(pool, namespace)
            voice = Voice(cluster, namespace, pool["metadata"]["name"])
            voice.await_free(pods)
            yield voice
        finally:
            uninstall(cluster, namespace)


# --- installing ----------------------------------------------------------------------------------


def load_images(cluster: OwnCluster) -> None:
    """Operator and gateway from their Dockerfile, a Valkey, the sidecar: into each node."""
    cluster.build_image(CONTROL_IMAGE, ROOT / "docker" / "control.Dockerfile", ROOT)
    cluster.build_image(LEDGER_IMAGE, LEDGER_DOCKERFILE, server_binary().parent)
    load_sidecar_image(cluster)


def install_kinds(cluster: OwnCluster) -> None:
    """The chart of the kinds, also where they are already."""
    cluster.helm(
        *("upgrade", "--install", "duplex-crds", str(CHARTS / "duplex-crds")),
        *("-n", "default", "--take-ownership"),
    )
    cluster.await_kinds()


def install(cluster: OwnCluster, namespace: str, values: Sequence[str] = ()) -> None:
    """The chart, with a trial ledger. values: more for `--set`, one NAME=VALUE each."""
    given = (f"trialLedger.image={LEDGER_IMAGE}", *values)
    cluster.helm(
        *("install", RELEASE, str(CHARTS / "duplex"), "-n", namespace, "--wait"),
        f"--timeout={INSTALL_TIMEOUT_S}s",
        *(part for value in given for part in ("--set", value)),
        timeout_s=INSTALL_TIMEOUT_S + 10,
    )


def uninstall(cluster: OwnCluster, namespace: str) -> None:
    command = ("uninstall", RELEASE, "-n", namespace, "--wait")
    cluster.helm(*command, timeout_s=INSTALL_TIMEOUT_S)


def example(name: str) -> Json:
    """A manifest of examples/, as it is there."""
    return yaml.safe_load((EXAMPLES / name).read_text())


def named(name: str, **spec: object) -> Json:
    """examples/session.yaml under another name."""
    session = example("session.yaml")
    session["metadata"]["name"] = name
    session["spec"] |= spec
    return session


def delete_and_wait(voice: Voice, *what: str, namespace: str | None = None) -> None:
    """what: arguments of `kubectl delete`. Returns when it is gone."""
    arguments = ("delete", *what, f"--timeout={GONE_TIMEOUT_S}s")
    voice.cluster.kubectl(*arguments, namespace=namespace, timeout_s=GONE_TIMEOUT_S + 10)


@contextmanager
def applied(voice: Voice, *sessions: Json, namespace: str = "") -> Generator[None]:
    """Gone at the end, and their slots free."""
    where = namespace or voice.namespace
    voice.cluster.apply(list(sessions), where)
    try:
        yield
    finally:
        names = [f"dxs/{session['metadata']['name']}" for session in sessions]
        delete_and_wait(voice, *names, "--ignore-not-found", namespace=where)


@asynccontextmanager
async def applied_beside(voice: Voice, *sessions: Json) -> AsyncGenerator[None]:
    """As `applied`, while a client of the same loop talks on."""
    context = applied(voice, *sessions)
    await asyncio.to_thread(context.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def cpu_pool(cluster: OwnCluster, namespace: str, **spec: Any) -> Json:
    """examples/pool-cpu.yaml, with the sidecar's program mounted instead of in its image.

    spec: fields that are different. Shares the folders that its pods need.
    """
    pool = example("pool-cpu.yaml")
    share_checkpoint(cluster, namespace, pool["spec"]["checkpoint"]["pvc"]["claimName"])
    mount_program(pool["spec"]["template"], share_program(cluster, namespace))
    pool["spec"] |= {"image": load_sidecar_image(cluster), **spec}
    return pool


# --- the ledger ----------------------------------------------------------------------------------


@contextmanager
def ledger_of(cluster: Kube, namespace: str) -> Generator[Redis]:
    """A connection to the release's trial ledger."""
    name = f"{RELEASE}-ledger"
    password = cluster.secret(name, namespace)["password"].decode()
    with (
        cluster.port_forward(f"service/{name}", 6379, namespace) as port,
        Redis(host="127.0.0.1", port=port, password=password, protocol=2) as redis,
    ):
        yield redis


def left_of(redis: Redis, uid: str) -> list[str]:
    """What the ledger still has of a session, but for the mark that it was erased."""
    meta = session_keys(uid).meta
    erased = redis.hget(meta, "phase") == b"erased"
    keys = sorted(key.decode() for key in redis.scan_iter(match=f"*{uid}*"))
    return [key for key in keys if not (erased and key == meta)]
