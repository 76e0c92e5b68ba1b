"""A release of the chart on this machine's own cluster, and what it needs there to run real
conversations: images without a registry, a pool whose pods run this checkout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.clusters import OwnCluster
from support.kube import Json, Kube
from support.sidecar_pods import (
    load_sidecar_image,
    mount_program,
    share_checkpoint,
    share_program,
)

from duplex_sidecar.ledger.embedded import server_binary
from scripts.cluster import ROOT

CONTROL_IMAGE = "duplex-control:0.1.0"
LEDGER_IMAGE = "duplex-test-ledger:1"
CHARTS = ROOT / "charts"
EXAMPLES = ROOT / "examples"
LEDGER_DOCKERFILE = ROOT / "tests" / "cluster" / "ledger.Dockerfile"
INSTALL_TIMEOUT_S = 180
RELEASE = "talk"


def load_images(cluster: OwnCluster) -> None:
    """Operator and gateway from their Dockerfile, a Valkey, the sidecar: into each node."""
    cluster.build_image(CONTROL_IMAGE, ROOT / "docker" / "control.Dockerfile", ROOT)
    cluster.build_image(LEDGER_IMAGE, LEDGER_DOCKERFILE, server_binary().parent)
    load_sidecar_image(cluster)


def install(cluster: OwnCluster, namespace: str, values: Sequence[str] = ()) -> None:
    """The chart, with a trial ledger. values: more of `--set`, one NAME=VALUE each."""
    given = (f"trialLedger.image={LEDGER_IMAGE}", *values)
    cluster.helm(
        *("install", RELEASE, str(CHARTS / "duplex"), "-n", namespace, "--wait"),
        f"--timeout={INSTALL_TIMEOUT_S}s",
        *(part for value in given for part in ("--set", value)),
        timeout_s=INSTALL_TIMEOUT_S + 10,
    )


def uninstall(cluster: OwnCluster, namespace: str) -> None:
    cluster.helm(
        *("uninstall", RELEASE, "-n", namespace, "--wait"), timeout_s=INSTALL_TIMEOUT_S + 10
    )


def example(name: str) -> Json:
    """A manifest of examples/, as it is there."""
    return yaml.safe_load((EXAMPLES / name).read_text())


def cpu_pool(cluster: OwnCluster, namespace: str, **spec: Any) -> Json:
    """examples/pool-cpu.yaml, with the sidecar's program mounted instead of in its image.

    spec: fields that are different. Shares the folders that its pods need.
    """
    pool = example("pool-cpu.yaml")
    claim: str = pool["spec"]["checkpoint"]["pvc"]["claimName"]
    share_checkpoint(cluster, namespace, claim)
    mount_program(pool["spec"]["template"], share_program(cluster, namespace))
    pool["spec"] |= {"image": load_sidecar_image(cluster), **spec}
    return pool


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a client dials a session with. uid: the session's id at the gateway and in the ledger."""

    uid: str
    token: str


def ticket(kube: Kube, name: str, namespace: str) -> Ticket:
    """Of a session that was placed once: its token is in the Secret that its status names."""
    status: Json = kube.get("dxs", name, namespace)["status"]
    named: Json = status["tokenSecret"]
    token = kube.secret(named["name"], namespace)[named["key"]]
    return Ticket(status["ledgerId"], token.decode())


def pod_of(kube: Kube, name: str, namespace: str) -> str:
    """The pod that runs a session; empty while none does."""
    status: Json = kube.get("dxs", name, namespace).get("status", {})
    return status.get("placement", {}).get("pod", "")
