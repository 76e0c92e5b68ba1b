"""What the chart runs before an uninstall: no session stays, with an operator or without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.api_servers import ApiServer
from support.kube import Json, until

from duplex_operator.names import SESSION_FINALIZER

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
ENDED_WITHIN_S = 110.0
"""Less than the 120 s that it waits when nobody says how long."""


def session(name: str, *finalizers: str) -> Json:
    return {
        "apiVersion": "duplex.dev/v1alpha1",
        "kind": "DuplexSession",
        "metadata": {"name": name, "finalizers": list(finalizers)},
        "spec": {"poolRef": {"name": "demo"}},
    }


def ending(server: ApiServer, namespaces: str, timeout_s: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        (sys.executable, "-m", "duplex_operator", "end-all", "--timeout", str(timeout_s)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "KUBECONFIG": str(server.kubeconfig),
            "DUPLEX_NAMESPACE": "default",
            "DUPLEX_REDIS_URL": "redis://nobody.invalid:6379/0",
            "DUPLEX_WATCH_NAMESPACES": namespaces,
        },
    )


def ended(server: ApiServer, namespaces: str, timeout_s: float) -> tuple[int, str]:
    with ending(server, namespaces, timeout_s) as process:
        said, _ = process.communicate(timeout=ENDED_WITHIN_S)
    return process.returncode, said


def names(server: ApiServer, namespace: str) -> list[str]:
    return [each["metadata"]["name"] for each in server.items("duplexsessions", namespace)]


def test_with_nothing_to_end_it_says_so(api_server: ApiServer, api_namespace: str) -> None:
    assert ended(api_server, api_namespace, 5) == (0, "0 sessions to end\nno session is left\n")


@pytest.mark.long
def test_without_an_operator_sessions_are_let_go_after_the_bound(
    api_server: ApiServer, api_namespace: str
) -> None:
    for number in range(30):
        api_server.create(session(f"s{number}", SESSION_FINALIZER), api_namespace)
    status, said = ended(api_server, api_namespace, 2)
    assert status == 0, said
    assert "30 not over after 2 s: let go by force" in said
    assert names(api_server, api_namespace) == []


def test_a_namespace_deleted_without_an_operator_hangs_until_its_sessions_are_let_go(
    api_server: ApiServer, api_namespace: str
) -> None:
    """As docs/install.md says, from anywhere with the rights of who deleted it."""
    with api_server.namespace() as leaving:
        for namespace in (leaving, api_namespace):
            api_server.create(session("held", SESSION_FINALIZER), namespace)
        api_server.create(session("free"), leaving)
        api_server.kubectl("delete", "namespace", leaving, "--wait=false")

        def hangs() -> bool:
            status = api_server.get("namespace", leaving)["status"]
            told = {each["type"]: each for each in status.get("conditions", ())}
            rest = told.get("NamespaceFinalizersRemaining", {"status": "False", "message": ""})
            named = f"{SESSION_FINALIZER} in 1 resource instances" in rest["message"]
            return status["phase"] == "Terminating" and rest["status"] == "True" and named

        until(hangs, "a namespace that waits for the session's finalizer")
        assert names(api_server, leaving) == ["held"]
        status, said = ended(api_server, leaving, 0)
        assert status == 0, said
        assert "1 not over after 0 s: let go by force" in said
        until(lambda: api_server.find("namespace", leaving) is None, "the namespace gone")
    assert names(api_server, api_namespace) == ["held"]
    ended(api_server, api_namespace, 0)


def test_an_operator_gets_its_time(api_server: ApiServer, api_namespace: str) -> None:
    """Somebody else takes the finalizer off, as an operator does once a ledger is erased."""
    api_server.create(session("s", SESSION_FINALIZER), api_namespace)
    with ending(api_server, api_namespace, 100) as process:

        def deleting() -> bool:
            found = api_server.get("duplexsession", "s", api_namespace)
            return "deletionTimestamp" in found["metadata"]

        until(deleting, "the deletion")
        change: Json = {"metadata": {"finalizers": None}}
        api_server.patch("duplexsession", "s", change, api_namespace)
        said, _ = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 0
    assert "by force" not in said


@pytest.mark.long
def test_what_another_controller_holds_stays_and_fails(
    api_server: ApiServer, api_namespace: str
) -> None:
    api_server.create(session("held", SESSION_FINALIZER, "example.dev/other"), api_namespace)
    status, said = ended(api_server, api_namespace, 1)
    assert status == 1
    assert said.endswith("1 sessions are left\n")
    left = api_server.get("duplexsession", "held", api_namespace)["metadata"]
    assert left["finalizers"] == ["example.dev/other"]
    api_server.kubectl(
        *("patch", "duplexsession", "held", "--type=merge"),
        *("-p", json.dumps({"metadata": {"finalizers": None}})),
        namespace=api_namespace,
    )


@pytest.mark.long
def test_other_namespaces_are_left_alone(api_server: ApiServer, api_namespace: str) -> None:
    with api_server.namespace() as other:
        for namespace in (api_namespace, other):
            api_server.create(session("s"), namespace)
        assert ended(api_server, api_namespace, 5)[0] == 0
        assert names(api_server, api_namespace) == []
        assert names(api_server, other) == ["s"]


def test_wrong_arguments_are_refused(api_server: ApiServer) -> None:
    status, said = ended(api_server, "default", -1)
    assert status == 2
    assert "--timeout must be between" in said
