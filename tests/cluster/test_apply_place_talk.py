"""The thin path: two objects are applied, a real sidecar gets the session, a client talks to it
through the gateway. Everything is the product's own but the sidecar's image (see sidecar_pods)."""

import base64
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.clusters import OwnCluster
from support.kube import Json
from support.material import speech
from support.realtime import RealtimeClient
from support.sidecar_pods import (
    READY_TIMEOUT_S,
    load_sidecar_image,
    pool_template,
    share_checkpoint,
    share_program,
)
from websockets.asyncio.client import connect

from duplex_api.constants import API_VERSION, POOL_KIND, SESSION_KIND
from duplex_sidecar.ledger.embedded import server_binary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CONTROL_IMAGE, LEDGER_IMAGE = "duplex-control:0.1.0", "duplex-test-ledger:1"
INSTALL_TIMEOUT_S = 180.0
UNIT_TIMEOUT_S = 120.0
ONE_OF_EACH = ("--set", "operator.replicas=1", "--set", "gateway.replicas=1")


@pytest.fixture
def released(own_cluster: OwnCluster, namespace: str) -> Iterator[str]:
    """A namespace with a release that serves it alone."""
    own_cluster.build_image(CONTROL_IMAGE, ROOT / "docker" / "control.Dockerfile", ROOT)
    ledger = Path(__file__).with_name("ledger.Dockerfile")
    own_cluster.build_image(LEDGER_IMAGE, ledger, server_binary().parent)
    own_cluster.install_crds()
    chart = str(ROOT / "charts" / "duplex")
    own_cluster.helm(
        *("install", "talk", chart, "-n", namespace, "--wait", f"--timeout={INSTALL_TIMEOUT_S}s"),
        *("--set", f"watchNamespaces={{{namespace}}}", *ONE_OF_EACH),
        *("--set", f"trialLedger.image={LEDGER_IMAGE}"),
        timeout_s=INSTALL_TIMEOUT_S + 10,
    )
    yield namespace
    own_cluster.helm("uninstall", "talk", "-n", namespace, "--wait", timeout_s=INSTALL_TIMEOUT_S)


def pool(own_cluster: OwnCluster, namespace: str) -> Json:
    """One pod with one slot, on the CPU."""
    spec = {
        "checkpoint": {"pvc": {"claimName": share_checkpoint(own_cluster, namespace)}},
        "image": load_sidecar_image(own_cluster),
        "slots": 1,
        "sharedMemory": "64Mi",
        "startupTimeout": "5m",
        "replicas": 1,
        "drain": {"grace": "5s"},
        "template": pool_template(share_program(own_cluster, namespace)),
    }
    metadata = {"name": "demo"}
    return {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": metadata, "spec": spec}


SESSION: Json = {
    "apiVersion": API_VERSION,
    "kind": SESSION_KIND,
    "metadata": {"name": "hello"},
    "spec": {"poolRef": {"name": "demo"}, "sampling": {"greedy": True, "seed": 7}},
}


@asynccontextmanager
async def joined(port: int, session: str, token: str) -> AsyncGenerator[RealtimeClient]:
    """A client behind its first event, with 16 kHz input declared."""
    address = f"ws://127.0.0.1:{port}/v1/realtime?model=duplex&session={session}"
    headers = {"authorization": f"Bearer {token}"}
    async with connect(
        address, additional_headers=headers, compression=None, max_size=None
    ) as socket:
        client = RealtimeClient(socket, session)
        await client.until("session.created")
        await client.format()
        yield client


async def test_apply_place_talk(own_cluster: OwnCluster, released: str) -> None:
    kube, namespace = own_cluster, released
    kube.apply([pool(own_cluster, namespace), SESSION], namespace)
    kube.wait("dxs/hello", "jsonpath={.status.phase}=Ready", namespace, READY_TIMEOUT_S)

    status = kube.get("dxs", "hello", namespace)["status"]
    pod = kube.get("pod", status["placement"]["pod"], namespace)
    assert pod["metadata"]["uid"] == status["placement"]["podUID"]
    assert pod["metadata"]["labels"]["duplex.dev/occupied"] == "true"
    secret = kube.get("secret", status["tokenSecret"]["name"], namespace)
    token = base64.b64decode(secret["data"][status["tokenSecret"]["key"]]).decode()

    with kube.port_forward("service/talk-gateway", 80, namespace) as port:
        async with joined(port, status["ledgerId"], token) as client:
            await client.speak(speech(3))
            await client.until_unit(3, UNIT_TIMEOUT_S)
            client.heard.assert_whole()
            assert client.heard.errors == []
            kube.wait("dxs/hello", "jsonpath={.status.phase}=Active", namespace)
    kube.delete(SESSION, namespace)
    kube.wait("dxs/hello", "delete", namespace)
