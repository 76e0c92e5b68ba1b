"""The charts on a real API server without nodes: what is admitted, who may what, what stays.

Nothing runs here: that operator and gateway work in their pods is tested on a cluster of nodes.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.api_servers import ApiServer
from support.kube import Json, Kube, KubeError, until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
CHART, CRDS = ROOT / "charts" / "duplex", ROOT / "charts" / "duplex-crds"
VALUES = ROOT / "tests" / "unit" / "charts" / "values"
POOL = {"checkpoint": {"path": "/checkpoint"}, "slots": 2}
WITH_POOL = (
    *("--set", "defaultPool.enabled=true", "--set", "defaultPool.name=demo"),
    *("--set", "defaultPool.spec.checkpoint.path=/checkpoint"),
)
KINDS = (
    "clusterroles,clusterrolebindings,configmaps,deployments,networkpolicies,poddisruptionbudgets,"
    "roles,rolebindings,secrets,services,serviceaccounts"
)


PRIORITY: Json = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "high"},
    "value": 1000,
}


@contextmanager
def installed(kube: Kube, namespace: str, *arguments: str, release: str = "talk") -> Iterator[str]:
    """A release; what it prints. It goes without its hooks: there is nobody to run a Job."""
    said = kube.helm("install", release, str(CHART), "-n", namespace, *arguments)
    try:
        yield said
    finally:
        kube.helm("uninstall", release, "-n", namespace, "--no-hooks")


def of_release(kube: Kube, namespace: str) -> list[str]:
    """Objects of the release `talk` of this namespace, cluster-wide ones included."""
    found = kube.items(KINDS, namespace, selector="app.kubernetes.io/instance=talk")
    mine = [each for each in found if namespace in each["metadata"].get("namespace", namespace)]
    return sorted(
        f"{each['kind']}/{each['metadata']['name']}"
        for each in mine
        if "namespace" in each["metadata"] or f":{namespace}:" in each["metadata"]["name"]
    )


def account(namespace: str, name: str) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


# --- the kinds -----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_kinds_are_taken_over_from_kubectl_and_outlive_their_chart(
    api_server: ApiServer, api_namespace: str
) -> None:
    install = ("install", "duplex-crds", str(CRDS), "-n", api_namespace)
    with pytest.raises(KubeError, match="invalid ownership metadata"):
        api_server.helm(*install)
    api_server.helm(*install, "--take-ownership", "--replace")
    pool: Json = {
        "apiVersion": "duplex.dev/v1alpha1",
        "kind": "DuplexPool",
        "metadata": {"name": "kept"},
        "spec": POOL,
    }
    api_server.apply(pool, api_namespace)
    api_server.helm("uninstall", "duplex-crds", "-n", api_namespace)
    assert api_server.get("duplexpool", "kept", api_namespace)["spec"]["slots"] == 2
    # And a later install finds them again.
    api_server.helm(*install, "--take-ownership")
    api_server.helm("uninstall", "duplex-crds", "-n", api_namespace)
    assert api_server.find("crd", "duplexsessions.duplex.dev") is not None


# --- what is admitted ----------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["defaults", "everything", "bare"])
def test_every_pod_is_admitted_to_a_restricted_namespace(
    api_server: ApiServer, api_namespace: str, values: str
) -> None:
    rendered = api_server.helm(
        *("template", "talk", str(CHART), "-n", api_namespace),
        *("--api-versions", "duplex.dev/v1alpha1/DuplexPool"),
        *("--values", str(VALUES / f"{values}.yaml")),
    )
    accounts = ("operator", "gateway", "test")
    for name in accounts:
        api_server.kubectl("create", "serviceaccount", f"talk-{name}", namespace=api_namespace)
    api_server.apply(PRIORITY)
    for found in yaml.safe_load_all(rendered):
        if found and found["kind"] in ("Deployment", "Job", "Pod"):
            template = found if found["kind"] == "Pod" else found["spec"]["template"]
            pod: dict[str, Any] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": found["metadata"]["name"],
                    "labels": template["metadata"]["labels"],
                },
                "spec": template["spec"],
            }
            api_server.kubectl(
                *("create", "--dry-run=server", "-f", "-"),
                namespace=api_namespace,
                stdin=yaml.safe_dump(pod),
            )


@pytest.mark.parametrize("name", ["claim-tiny", "claims"])
def test_what_fills_claims_is_admitted_as_it_is_written(
    api_server: ApiServer, api_namespace: str, name: str
) -> None:
    file = str(ROOT / "examples" / f"{name}.yaml")
    command = ("create", "--dry-run=server", "--validate=strict", "-f", file)
    said = api_server.kubectl(*command, namespace=api_namespace)
    assert said.count("created") == len(list(yaml.safe_load_all(Path(file).read_text())))


def test_a_release_comes_and_goes_without_a_trace(
    api_server: ApiServer, api_namespace: str
) -> None:
    with installed(api_server, api_namespace):
        made = of_release(api_server, api_namespace)
        assert "Deployment/talk-operator" in made
        assert f"ClusterRole/duplex:{api_namespace}:talk:view" in made
        assert "NetworkPolicy/talk-sidecar" in made
    assert of_release(api_server, api_namespace) == []


@pytest.mark.long
def test_two_releases_of_one_name_stand_side_by_side(
    api_server: ApiServer, api_namespace: str
) -> None:
    with api_server.namespace() as other, installed(api_server, api_namespace):
        with installed(api_server, other):
            assert of_release(api_server, other)
        assert of_release(api_server, other) == []
        assert f"ClusterRole/duplex:{api_namespace}:talk:view" in of_release(
            api_server, api_namespace
        )


def test_the_notes_are_three_commands(api_server: ApiServer, api_namespace: str) -> None:
    with installed(api_server, api_namespace) as said:
        commands = said.split("Next:\n")[1].strip().splitlines()
    assert len(commands) == 3
    assert [command.split()[0] for command in commands] == ["kubectl", "kubectl", "helm"]
    assert "does not know DuplexSession" not in said


# --- upgrade -------------------------------------------------------------------------------------


def password(kube: Kube, namespace: str) -> bytes:
    return base64.b64decode(kube.get("secret", "talk-ledger", namespace)["data"]["password"])


def test_the_trial_ledgers_password_outlives_upgrade_and_rollback(
    api_server: ApiServer, api_namespace: str
) -> None:
    with installed(api_server, api_namespace):
        first = password(api_server, api_namespace)
        assert len(first) == 40
        upgrade = ("upgrade", "talk", str(CHART), "-n", api_namespace)
        api_server.helm(*upgrade, "--set", "gateway.replicas=3")
        assert password(api_server, api_namespace) == first
        gateway = api_server.get("deployment", "talk-gateway", api_namespace)
        assert gateway["spec"]["replicas"] == 3
        api_server.helm("rollback", "talk", "1", "-n", api_namespace)
        assert password(api_server, api_namespace) == first
        gateway = api_server.get("deployment", "talk-gateway", api_namespace)
        assert gateway["spec"]["replicas"] == 2


@pytest.mark.long
def test_the_default_pool_is_made_once(api_server: ApiServer, api_namespace: str) -> None:
    with installed(api_server, api_namespace, *WITH_POOL, "--set", "defaultPool.spec.slots=2"):
        made = api_server.get("duplexpool", "demo", api_namespace)
        assert made["spec"]["slots"] == 2
        upgrade = ("upgrade", "talk", str(CHART), "-n", api_namespace)
        api_server.helm(*upgrade, *WITH_POOL, "--set", "defaultPool.spec.slots=4")
        kept = api_server.get("duplexpool", "demo", api_namespace)
        assert (kept["metadata"]["uid"], kept["spec"]) == (made["metadata"]["uid"], made["spec"])
    # It outlives its release, and the next one takes it as it is.
    with installed(api_server, api_namespace, *WITH_POOL, "--set", "defaultPool.spec.slots=4"):
        kept = api_server.get("duplexpool", "demo", api_namespace)
        assert (kept["metadata"]["uid"], kept["spec"]) == (made["metadata"]["uid"], made["spec"])


# --- who may what --------------------------------------------------------------------------------


SEE = frozenset(("get duplexsessions", "list duplexpools"))
TALK = SEE | {"create duplexsessions", "delete duplexsessions", "get secrets"}
ALL = TALK | {"create duplexpools", "delete duplexpools"}
ASKED = ALL | {"patch duplexsessions/status", "patch duplexpools/status"}
ROLES = {"view": SEE, "edit": TALK, "admin": ALL}


def allowed_to(kube: Kube, user: str, namespace: str) -> frozenset[str]:
    """What of ASKED this user may."""
    found: set[str] = set()
    for action in ASKED:
        verb, _, resource = action.partition(" ")
        plural, _, subresource = resource.partition("/")
        group = "" if plural == "secrets" else ".duplex.dev"
        more = (f"--subresource={subresource}",) if subresource else ()
        if kube.may(user, verb, plural + group, namespace, *more):
            found.add(action)
    return frozenset(found)


@pytest.mark.parametrize(
    ("role", "pools"),
    [
        ("edit", "false"),
        *(
            pytest.param(role, pools, marks=pytest.mark.long)
            for role in ROLES
            for pools in ("true", "false")
            if (role, pools) != ("edit", "false")
        ),
    ],
)
def test_the_clusters_own_roles_reach_our_kinds(
    api_server: ApiServer, api_namespace: str, role: str, pools: str
) -> None:
    """Who may make pools reads every conversation of the installation: not by default."""
    wanted = ROLES[role] if pools == "true" else ROLES[role] & TALK
    bind = ("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}-user")
    with installed(api_server, api_namespace, "--set", f"rbac.aggregatePools={pools}"):
        api_server.kubectl(*bind, namespace=api_namespace)
        # The controller gathers the rules a moment later.
        until(
            lambda: allowed_to(api_server, f"{role}-user", api_namespace) == wanted,
            f"what {role} may",
        )
        assert allowed_to(api_server, f"{role}-user", "default") == frozenset()


def test_an_operator_of_two_namespaces_reaches_no_third(
    api_server: ApiServer, api_namespace: str
) -> None:
    with api_server.namespace() as voice, api_server.namespace() as other:
        watched = ("--set", f"watchNamespaces={{{voice}}}")
        with installed(api_server, api_namespace, *watched):
            operator = account(api_namespace, "talk-operator")
            for verb, resource in (("create", "pods"), ("patch", "secrets"), ("list", "secrets")):
                api_server.await_right(operator, verb, resource, voice)
                assert not api_server.may(operator, verb, resource, other)
                assert not api_server.may(operator, verb, resource, api_namespace)
            assert not api_server.may(operator, "list", "nodes", voice)
            lease = "leases/duplex-operator"
            api_server.await_right(operator, "patch", lease, api_namespace)
            assert not api_server.may(operator, "patch", "leases/other", api_namespace)
            assert [
                made for made in of_release(api_server, api_namespace) if "Cluster" in made
            ] == []


def test_the_test_pod_reads_one_secret(api_server: ApiServer, api_namespace: str) -> None:
    with installed(api_server, api_namespace):
        tester = account(api_namespace, "talk-test")
        api_server.await_right(tester, "get", "secrets/talk-test-token", api_namespace)
        for refused in ("secrets/talk-ledger", "secrets"):
            assert not api_server.may(tester, "get", refused, api_namespace)
        gateway = account(api_namespace, "talk-gateway")
        assert not api_server.may(gateway, "get", "duplexsessions.duplex.dev", api_namespace)
