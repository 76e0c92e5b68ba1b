"""The cluster itself: what the other tests of this tier stand on."""

import json
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from support.clusters import Cluster, Mounts, OwnCluster, Pod, python_folders, scratch
from support.kube import KubeError, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
SERVER = (
    "import http.server as h; h.test(h.SimpleHTTPRequestHandler, h.ThreadingHTTPServer, port=8000)"
)


def test_two_nodes_are_ready(own_cluster: OwnCluster) -> None:
    own_cluster.wait("node/node1", "condition=Ready")
    own_cluster.wait("node/node2", "condition=Ready")
    version = json.loads(own_cluster.kubectl("version", "-o", "json"))["serverVersion"]
    assert version["gitVersion"] == "v1.36.3"


def test_a_restricted_pod_runs(cluster: Cluster, namespace: str) -> None:
    program = "id -u; touch /x 2>/dev/null || echo read-only; grep Seccomp: /proc/self/status"
    printed = cluster.run(Pod("plain", ("sh", "-c", program)), namespace)
    assert printed.split() == ["65532", "read-only", "Seccomp:", "2"]


def test_a_pod_that_is_not_restricted_is_refused(cluster: Cluster, namespace: str) -> None:
    root = Pod("root", ("id",), spec={"securityContext": {}})
    with pytest.raises(KubeError, match="violates PodSecurity"):
        cluster.create(root.manifest(), namespace)
    host = Pod("host", ("id",), Mounts(({"name": "host", "hostPath": {"path": "/etc"}},)))
    with pytest.raises(KubeError, match="hostPath"):
        cluster.create(host.manifest(), namespace)


def test_a_pod_uses_this_machines_environment(own_cluster: OwnCluster, namespace: str) -> None:
    """The checkout and its virtual environment, through claims, as an ordinary user."""
    program = (
        "import sys, duplex_sidecar, redis; print('vllm' in sys.modules, duplex_sidecar.__file__)"
    )
    mounts = own_cluster.share(namespace, python_folders())
    printed = own_cluster.run(Pod("venv", (str(PYTHON), "-c", program), mounts), namespace)
    assert printed.split() == ["False", str(ROOT / "sidecar" / "duplex_sidecar" / "__init__.py")]


def test_shared_folders_are_read_only(own_cluster: OwnCluster, namespace: str) -> None:
    mounts = own_cluster.share(namespace, python_folders())
    program = f"touch {ROOT}/written-by-a-pod 2>&1 | grep -o 'Read-only file system'"
    printed = own_cluster.run(Pod("writer", ("sh", "-c", program), mounts), namespace)
    assert printed.strip() == "Read-only file system"


def test_a_port_of_this_machine_is_carried_in(
    own_cluster: OwnCluster, namespace: str, tmp_path: Path
) -> None:
    class Greeting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"from the machine")

    with ThreadingHTTPServer(("127.0.0.1", 0), Greeting) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with own_cluster.forward(server.server_port, tmp_path) as address:
            program = f"import urllib.request as u; print(u.urlopen('http://{address}').read())"
            pod = Pod("caller", ("python3", "-c", program))
            assert own_cluster.run(pod, namespace) == "b'from the machine'\n"
        server.shutdown()


def test_a_port_of_a_service_is_carried_out(cluster: Cluster, namespace: str) -> None:
    pod = Pod(
        "web",
        ("python3", "-u", "-c", SERVER),
        container={
            "workingDir": "/srv",
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        },
        mounts=scratch("/srv"),
        labels={"app": "web"},
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    cluster.apply([pod.manifest(), service], namespace)
    cluster.wait("pod/web", "condition=Ready", namespace)
    cluster.execute("web", namespace, "sh", "-c", "echo hello >/srv/page")
    with (
        cluster.port_forward("service/web", 80, namespace) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/page", timeout=60) as answer,
    ):
        assert answer.read() == b"hello\n"
    # The kubelet's file of what was printed is a moment behind the answer.
    until(lambda: "GET /page" in cluster.logs("web", namespace), "the line about the request")


def test_the_kinds_install_with_helm(cluster: Cluster) -> None:
    chart = str(ROOT / "charts" / "duplex-crds")
    where = ("--namespace", "default", "--take-ownership")
    cluster.helm("upgrade", "--install", "duplex-crds", chart, *where)
    cluster.await_kinds()
    assert "live two-way speech conversation" in cluster.kubectl("explain", "dxs")
    assert "poolRef" in cluster.kubectl("explain", "dxs.spec")


def test_an_image_is_built_and_loaded(
    own_cluster: OwnCluster, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nCOPY greeting /greeting\nUSER 65532\n"
    )
    (tmp_path / "greeting").write_text("built here\n")
    own_cluster.build_image("duplex.test/greeting:1", tmp_path / "Dockerfile", tmp_path)
    pod = Pod("greeting", ("cat", "/greeting"), image="duplex.test/greeting:1")
    assert own_cluster.run(pod, namespace) == "built here\n"
