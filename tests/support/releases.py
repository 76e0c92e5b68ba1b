"""A release of the chart, and what it needs to run real conversations.

On this machine's own cluster: images without a registry, a pool whose pods run this checkout.
Elsewhere: what somebody has told (`Told`).
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from redis import Redis
from support.api_servers import make_identity
from support.clusters import Cluster, OwnCluster
from support.kube import Json, Kube, until
from support.sidecar_pods import (
    FAKE_RESOURCES,
    READY_TIMEOUT_S,
    Stages,
    load_sidecar_image,
    mount_program,
    share_checkpoint,
    share_program,
)

from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.checkpoint.voice import seeded_voice, write_voice
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.ledger.embedded import server_binary
from duplex_sidecar.ledger.keys import session_keys
from scripts.cluster import ROOT

CONTROL_IMAGE = "duplex-control:0.1.0"
LEDGER_IMAGE = "duplex-test-ledger:1"
CHARTS = ROOT / "charts"
EXAMPLES = ROOT / "examples"
LEDGER_DOCKERFILE = ROOT / "tests" / "cluster" / "ledger.Dockerfile"
INSTALL_TIMEOUT_S = 300
PULL_TIMEOUT_S = 800
"""Elsewhere images are pulled and a claim may have to be filled first."""
VALUES_VARIABLE, POOL_VARIABLE = "DUPLEX_TEST_VALUES", "DUPLEX_TEST_POOL"
GONE_TIMEOUT_S = 150
"""An operator erases a ledger for 30 s at most before it lets a session go."""
RELEASE = "talk"
TLS_SECRET = "voice-tls"
VOICES_CLAIM = "voices"
VOLUME_VOICE = "partner"
SIDECARS = "app.kubernetes.io/component=sidecar"


@dataclass(frozen=True, slots=True)
class Charts:
    """Folders or packages, as Helm takes them."""

    kinds: Path = CHARTS / "duplex-crds"
    release: Path = CHARTS / "duplex"


@dataclass(frozen=True, slots=True)
class Voice:
    """A release that serves the whole cluster, and a pool in its namespace, which enforces Pod
    Security `restricted`."""

    cluster: Cluster
    namespace: str
    pool: str
    authority: str = ""
    """Who signed the gateway's certificate, in PEM; empty: it speaks no TLS."""

    def await_free(self, slots: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until that many sessions would be placed at once."""
        until(lambda: self.free_slots() >= slots, f"{slots} free slots", timeout_s)

    def free_slots(self) -> int:
        pool = self.cluster.get("dxp", self.pool, self.namespace)
        return pool.get("status", {}).get("freeSlots", 0)

    def pod_of(self, session: str) -> str:
        """The pod that runs it; empty while none does."""
        status: Json = self.cluster.get("dxs", session, self.namespace).get("status", {})
        return status.get("placement", {}).get("pod", "")


@contextmanager
def running_voice(
    cluster: OwnCluster,
    pods: int = 2,
    resources: Mapping[str, Mapping[str, str]] | None = None,
    *,
    tls: bool = False,
    voices: Path | None = None,
    charts: Charts | None = None,
    slots: int = 1,
    stages: Stages = Stages.REAL,
) -> Generator[Voice]:
    """Of that many pods with so many slots each. Begins when they take sessions.

    resources: requests and limits of each sidecar that are different from the example's. tls: of
    the gateway. voices: a folder that is the pool's volume of voices. charts: default: as they are
    in this checkout.
    """
    charts = charts or Charts()
    load_images(cluster, stages)
    install_kinds(cluster, charts)
    with cluster.namespace("voice") as namespace:
        authority = make_gateway_certificate(cluster, namespace) if tls else ""
        values = (f"gateway.tlsSecretName={TLS_SECRET}",) if tls else ()
        install(cluster, namespace, values, charts)
        try:
            pool = cpu_pool(cluster, namespace, stages, replicas=pods, slots=slots)
            if voices is not None:
                cluster.share(namespace, {VOICES_CLAIM: voices})
                pool["spec"]["voices"] = {"claimName": VOICES_CLAIM}
            (sidecar,) = pool["spec"]["template"]["spec"]["containers"]
            for kind, amounts in (resources or {}).items():
                sidecar["resources"][kind] |= amounts
            cluster.apply(pool, namespace)
            voice = Voice(cluster, namespace, pool["metadata"]["name"], authority)
            voice.await_free(pods * slots)
            yield voice
        finally:
            uninstall(cluster, namespace)


@dataclass(frozen=True, slots=True)
class Told:
    """What a release elsewhere cannot know: files that whoever installs one there has anyway.

    values: for Helm, with the names of the images. pool: manifests of one DuplexPool and of all
    that its pods need: claims, a job that fills them, a Secret to pull with.
    """

    values: Path
    pool: Path


def told(environment: Mapping[str, str] = os.environ) -> Told | None:
    """By VALUES_VARIABLE and POOL_VARIABLE; None unless both are given."""
    files = [environment.get(name, "") for name in (VALUES_VARIABLE, POOL_VARIABLE)]
    return Told(*map(Path, files)) if all(files) else None


@contextmanager
def voice_elsewhere(cluster: Cluster, told: Told, *, tls: bool = False) -> Generator[Voice]:
    """As `running_voice`, on a cluster that shares nothing with this machine. Of the pool all is as
    it is told, but for its name and its size: two pods with one slot each."""
    others, pool = told_pool(told)
    install_kinds(cluster)
    with cluster.namespace("voice") as namespace:
        authority = make_gateway_certificate(cluster, namespace) if tls else ""
        if others:
            cluster.apply(others, namespace)
        values = (f"gateway.tlsSecretName={TLS_SECRET}",) if tls else ()
        install(cluster, namespace, values, file=told.values)
        try:
            cluster.apply(pool, namespace)
            voice = Voice(cluster, namespace, pool["metadata"]["name"], authority)
            voice.await_free(2, PULL_TIMEOUT_S)
            yield voice
        finally:
            uninstall(cluster, namespace)


def told_pool(told: Told) -> tuple[list[Json], Json]:
    """What else is in the file, and the pool: under the name that examples/session.yaml asks for.
    Raises ValueError unless there is one."""
    found = [each for each in yaml.safe_load_all(told.pool.read_text()) if each]
    pools = [each for each in found if each["kind"] == "DuplexPool"]
    if len(pools) != 1:
        raise ValueError(f"{told.pool} has {len(pools)} pools, not one")
    (pool,) = pools
    name = example("session.yaml")["spec"]["poolRef"]["name"]
    pool["metadata"] = {**pool["metadata"], "name": name}
    pool["spec"] |= {"replicas": 2, "slots": 1}
    return [each for each in found if each is not pool], pool


# --- installing ----------------------------------------------------------------------------------


def load_images(cluster: OwnCluster, stages: Stages = Stages.REAL) -> None:
    """Operator and gateway from their Dockerfile, a Valkey, the sidecar: into each node."""
    cluster.build_image(CONTROL_IMAGE, ROOT / "docker" / "control.Dockerfile", ROOT)
    cluster.build_image(LEDGER_IMAGE, LEDGER_DOCKERFILE, server_binary().parent)
    load_sidecar_image(cluster, stages)


def install_kinds(cluster: Cluster, charts: Charts | None = None) -> None:
    """The chart of the kinds, also where they are already."""
    cluster.helm(
        *("upgrade", "--install", "duplex-crds", str((charts or Charts()).kinds)),
        *("-n", "default", "--take-ownership"),
    )
    cluster.await_kinds()


def install(
    cluster: Cluster,
    namespace: str,
    values: Sequence[str] = (),
    charts: Charts | None = None,
    file: Path | None = None,
) -> None:
    """The chart, with a trial ledger. values: more for `--set`, one NAME=VALUE each. file: values
    that say where the images are; without one the images are this machine's."""
    given = (*(() if file else (f"trialLedger.image={LEDGER_IMAGE}",)), *values)
    cluster.helm(
        *("install", RELEASE, str((charts or Charts()).release), "-n", namespace, "--wait"),
        f"--timeout={INSTALL_TIMEOUT_S}s",
        *(("--values", str(file)) if file else ()),
        *(part for value in given for part in ("--set", value)),
        timeout_s=INSTALL_TIMEOUT_S + 10,
    )


def make_gateway_certificate(cluster: Cluster, namespace: str) -> str:
    """The Secret TLS_SECRET, for the Service of the release and for loopback. Returns who signed
    it, in PEM."""
    authority = make_identity("voice-test-ca", None)
    host = f"{RELEASE}-gateway.{namespace}.svc"
    made = make_identity("gateway", authority, hosts=(host,))
    secret: Json = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": TLS_SECRET},
        "stringData": {
            "tls.crt": made.certificate_pem().decode(),
            "tls.key": made.key_pem().decode(),
        },
    }
    cluster.create(secret, namespace)
    return authority.certificate_pem().decode()


def uninstall(cluster: Cluster, namespace: str) -> None:
    """Also where it is gone already."""
    command = ("uninstall", RELEASE, "-n", namespace, "--wait", "--ignore-not-found")
    cluster.helm(*command, timeout_s=INSTALL_TIMEOUT_S)


def write_volume_voice(folder: Path) -> None:
    """The voice VOLUME_VOICE for a pool's volume. The checkpoint has none of that name."""
    make_tiny(default_checkpoint(), cache_dir=default_cache_dir())
    config = read_config(default_checkpoint()).token2wav
    path = folder / f"{VOLUME_VOICE}.safetensors"
    write_voice(path, seeded_voice(VOLUME_VOICE, 100, 11, config))


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


def cpu_pool(
    cluster: OwnCluster, namespace: str, stages: Stages = Stages.REAL, **spec: Any
) -> Json:
    """examples/pool-cpu.yaml, with the sidecar's program mounted instead of in its image.

    spec: fields that are different. Shares the folders that its pods need.
    """
    pool = example("pool-cpu.yaml")
    share_checkpoint(cluster, namespace, pool["spec"]["checkpoint"]["pvc"]["claimName"])
    mount_program(pool["spec"]["template"], share_program(cluster, namespace))
    if stages is Stages.FAKE:
        (sidecar,) = pool["spec"]["template"]["spec"]["containers"]
        sidecar["resources"] = FAKE_RESOURCES
    pool["spec"] |= {"image": load_sidecar_image(cluster, stages), **spec}
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
