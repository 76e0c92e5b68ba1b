"""The chart on a cluster with nodes: operator and gateway in their own image and pods, with the
rights of the chart and no others; upgraded, rolled back, removed with sessions still there.

It watches one namespace, so that other tests' sessions are none of its business.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import BASE_IMAGE, OwnCluster, python_folders
from support.kube import Json, KubeError, until

from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.ledger.embedded import server_binary

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "duplex"
CONTROL_IMAGE, LEDGER_IMAGE = "duplex-control:0.1.0", "duplex-test-ledger:1"
WITHIN_S = 300.0
POOL_READY_WITHIN_S = 400.0
VENV_BIN = ROOT / ".venv" / "bin"


def values(namespace: str) -> tuple[str, ...]:
    return (
        *("--set", f"watchNamespaces={{{namespace}}}"),
        *("--set", f"trialLedger.image={LEDGER_IMAGE}"),
    )


def helm(cluster: OwnCluster, verb: str, namespace: str, *arguments: str) -> str:
    """Waits until everything is ready."""
    chart = (str(CHART),) if verb in ("install", "upgrade") else ()
    command = (verb, "talk", *chart, "-n", namespace, *arguments, "--timeout", f"{WITHIN_S:.0f}s")
    return cluster.helm(*command, timeout_s=WITHIN_S + 30)


@pytest.fixture(scope="module")
def built(own_cluster: OwnCluster) -> None:
    """Both images on the nodes, and our kinds."""
    own_cluster.build_image(CONTROL_IMAGE, ROOT / "docker" / "control.Dockerfile", ROOT)
    binary = server_binary().parent
    own_cluster.build_image(LEDGER_IMAGE, Path(__file__).with_name("ledger.Dockerfile"), binary)
    own_cluster.install_crds()


@pytest.fixture
def released(own_cluster: OwnCluster, built: None, namespace: str) -> Iterator[str]:
    """A namespace with a release whose every pod is ready."""
    helm(own_cluster, "install", namespace, *values(namespace), "--wait")
    yield namespace
    if "talk" in own_cluster.helm("list", "-n", namespace, "-q"):
        helm(own_cluster, "uninstall", namespace)


def session(name: str) -> Json:
    return {
        "apiVersion": "duplex.dev/v1alpha1",
        "kind": "DuplexSession",
        "metadata": {"name": name},
        "spec": {"poolRef": {"name": "nowhere"}},
    }


def pool_of_this_machine(cluster: OwnCluster, namespace: str) -> Json:
    """A pool of one pod: the tiny checkpoint, and the program as it lies in this checkout."""
    make_tiny(default_checkpoint(), cache_dir=default_cache_dir())
    program = cluster.share(namespace, python_folders())
    cluster.share(namespace, {"checkpoint": default_checkpoint()})
    sidecar = {
        "name": "duplex-sidecar",
        "env": [
            {"name": "PATH", "value": f"{VENV_BIN}:/usr/bin:/bin"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "volumeMounts": list(program.mounts),
        "resources": {"requests": {"cpu": "1", "memory": "3Gi"}, "limits": {"memory": "6Gi"}},
    }
    return {
        "apiVersion": "duplex.dev/v1alpha1",
        "kind": "DuplexPool",
        "metadata": {"name": "demo"},
        "spec": {
            "checkpoint": {"pvc": {"claimName": "checkpoint"}},
            "image": BASE_IMAGE,
            "slots": 1,
            "sharedMemory": "256Mi",
            "startupTimeout": "5m",
            "template": {"spec": {"containers": [sidecar], "volumes": list(program.volumes)}},
        },
    }


def logs(cluster: OwnCluster, namespace: str, component: str) -> str:
    selector = f"--selector=app.kubernetes.io/component={component}"
    return cluster.kubectl("logs", selector, "--tail=-1", "--prefix", namespace=namespace)


def test_a_release_lives_and_goes_with_its_sessions(own_cluster: OwnCluster, released: str) -> None:
    """One long walk, since each install takes its time."""
    kube, namespace = own_cluster, released
    # One operator leads, and sees to a session that has no pool to go to.
    leader = kube.get("lease", "duplex-operator", namespace)["spec"]["holderIdentity"]
    assert leader.startswith("talk-operator-")
    kube.create(session("lost"), namespace)
    kube.wait("dxs/lost", "jsonpath={.status.reason}", namespace)
    status = kube.get("dxs", "lost", namespace)["status"]
    assert status["phase"] in ("Pending", "Queued")
    assert status["message"]
    # With exactly the rights of the chart.
    assert "orbidden" not in logs(kube, namespace, "operator")

    # Without a pool `helm test` says what is missing.
    with pytest.raises(KubeError):
        helm(kube, "test", namespace)
    assert "there is no DuplexPool" in kube.logs("talk-test", namespace)

    # Upgrade and rollback leave the session to its operator.
    uid = kube.get("dxs", "lost", namespace)["metadata"]["uid"]
    helm(kube, "upgrade", namespace, *values(namespace), "--set", "gateway.replicas=1", "--wait")
    kube.wait("deployment/talk-gateway", "jsonpath={.status.readyReplicas}=1", namespace)
    helm(kube, "rollback", namespace, "--wait")
    kube.wait("deployment/talk-gateway", "jsonpath={.status.readyReplicas}=2", namespace)
    kube.create(session("second"), namespace)
    kube.wait("dxs/second", "jsonpath={.status.reason}", namespace)
    assert kube.get("dxs", "lost", namespace)["metadata"]["uid"] == uid

    # Removed with two sessions still there.
    helm(kube, "uninstall", namespace, "--wait")
    assert kube.items("dxs", namespace) == []
    assert kube.items("deployments,jobs,services", namespace) == []
    until(
        lambda: not kube.items("pods", namespace, "app.kubernetes.io/component!=job"),
        "the end of the release's pods",
        WITHIN_S,
    )


def test_helm_test_holds_a_conversation(own_cluster: OwnCluster, released: str) -> None:
    kube, namespace = own_cluster, released
    kube.apply(pool_of_this_machine(kube, namespace), namespace)
    kube.wait("dxp/demo", "condition=Ready", namespace, POOL_READY_WITHIN_S)
    said = helm(kube, "test", namespace, "--logs")
    assert "A conversation was held: session ready after" in said
    assert kube.items("dxs", namespace) == []
    assert "orbidden" not in logs(kube, namespace, "operator")


def test_without_an_operator_the_uninstall_is_bounded(
    own_cluster: OwnCluster, released: str
) -> None:
    kube, namespace = own_cluster, released
    kube.create(session("stuck"), namespace)
    kube.wait("dxs/stuck", "jsonpath={.status.reason}", namespace)
    bound = ("--set", "uninstall.timeoutSeconds=10")
    helm(kube, "upgrade", namespace, *values(namespace), *bound, "--wait")
    kube.kubectl("scale", "deployment/talk-operator", "--replicas=0", namespace=namespace)
    until(
        lambda: not kube.items("pods", namespace, "app.kubernetes.io/component=operator"),
        "the operators' end",
        WITHIN_S,
    )
    helm(kube, "uninstall", namespace, "--wait")
    assert kube.items("dxs", namespace) == []
