"""One real sidecar as a pod: restricted, without a service account's token, engines on the CPU."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import OwnCluster
from support.sidecar_pods import PORT, READY_TIMEOUT_S, sidecar_pod

from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def ledger_url(own_cluster: OwnCluster, tmp_path: Path) -> Iterator[str]:
    """A Valkey of this machine, as pods reach it."""
    port = free_port()
    valkey = EmbeddedValkey(tmp_path / "ledger", port=port)
    valkey.start()
    try:
        with own_cluster.forward(port, tmp_path) as address:
            yield f"redis://{address}/0"
    finally:
        valkey.stop()


def test_a_sidecar_becomes_ready(own_cluster: OwnCluster, namespace: str, ledger_url: str) -> None:
    pod = sidecar_pod(own_cluster, namespace, "sidecar", ledger_url)
    own_cluster.create(pod.manifest(), namespace)
    own_cluster.await_ready("sidecar", namespace, READY_TIMEOUT_S)
    with (
        own_cluster.port_forward("pod/sidecar", PORT, namespace) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer,
    ):
        assert json.load(answer)["ready"]
