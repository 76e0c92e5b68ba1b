"""Two operators as processes of their own: one leads, the other takes over."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from support.api_servers import ApiServer
from support.kube import until
from support.operator_processes import operator

from duplex_api.constants import API_VERSION
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TAKEOVER_S = 90.0
"""Up to 19 s of it are the lease's, by design."""


def session(name: str) -> dict[str, object]:
    return {
        "apiVersion": API_VERSION,
        "kind": "DuplexSession",
        "metadata": {"name": name},
        "spec": {"poolRef": {"name": "nowhere"}},
    }


def test_the_second_operator_takes_over(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> None:
    def told(name: str) -> bool:
        found = api_server.get("dxs", name, api_namespace)
        return found.get("status", {}).get("reason") == "PoolNotFound"

    with ExitStack() as stack:
        first = stack.enter_context(operator(api_server, api_namespace, valkey.url))
        until(first.leads, "the first leads", 60)
        until(lambda: first.page("/readyz"), "the first is ready", 60)
        assert first.page("/healthz")
        second = stack.enter_context(operator(api_server, api_namespace, valkey.url))
        until(lambda: second.page("/readyz"), "the second stands by", 60)
        api_server.create(session("one"), api_namespace)
        until(lambda: told("one"), "the first works")
        assert not second.leads()

        os.kill(first.process.pid, signal.SIGKILL)
        api_server.create(session("two"), api_namespace)
        until(lambda: told("two"), "the second works", TAKEOVER_S)

        third = stack.enter_context(operator(api_server, api_namespace, valkey.url))
        until(lambda: third.page("/readyz"), "the third stands by", 60)
        second.process.terminate()
        assert second.process.wait(60) == 0
        # It has given the lease back: the third need not wait until it has run out.
        lease = api_server.get("lease", "duplex-operator", api_namespace)["spec"]
        identity = f"{socket.gethostname()}-{second.process.pid}"
        assert lease.get("holderIdentity", "") != identity
        until(third.leads, "the third leads")


def test_an_operator_without_rights_is_never_ready(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    """It lives, waits, and counts for nobody as available."""
    config = yaml.safe_load(api_server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": "of-nobody"}
    stranger = tmp_path / "kubeconfig"
    stranger.write_text(yaml.safe_dump(config))
    with operator(api_server, api_namespace, valkey.url, KUBECONFIG=str(stranger)) as process:
        until(lambda: process.page("/healthz"), "it lives", 60)
        until(lambda: 'verb="get",resource="leases"' in process.page("/metrics"), "it asks", 60)
        assert not process.page("/readyz")


def test_a_missing_setting_is_named() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DUPLEX_")}
    done = subprocess.run(
        (sys.executable, "-m", "duplex_operator"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "duplex-operator: DUPLEX_NAMESPACE is not set\n"
