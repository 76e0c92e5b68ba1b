"""What every rendering of the chart keeps to, read off the golden manifests.

That those are what Helm renders today is checked where there is a Helm: in the cluster tier.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from duplex_api.constants import API_GROUP
from duplex_gateway.settings import GatewaySettings, settings_from
from duplex_operator.names import (
    ADMIN_PORT,
    COMPONENT_SIDECAR,
    LABEL_COMPONENT,
    LABEL_NAME,
    PRODUCT,
)
from duplex_operator.settings import OperatorSettings

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parent
SETS = sorted(path.stem for path in (FOLDER / "values").glob("*.yaml"))
Manifest = dict[str, Any]

every_set = pytest.mark.parametrize("name", SETS)


class PodOf(NamedTuple):
    owner: str
    labels: dict[str, str]
    spec: Manifest


@cache
def rendered(name: str) -> list[Manifest]:
    text = (FOLDER / "golden" / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def of_kind(name: str, *kinds: str) -> list[Manifest]:
    return [found for found in rendered(name) if found["kind"] in kinds]


def pods(name: str) -> list[PodOf]:
    found: list[PodOf] = []
    for each in of_kind(name, "Pod", "Deployment", "Job"):
        pod = each if each["kind"] == "Pod" else each["spec"]["template"]
        found.append(PodOf(each["metadata"]["name"], pod["metadata"]["labels"], pod["spec"]))
    return found


def pod_named(name: str, owner: str) -> Manifest:
    [found] = [pod.spec for pod in pods(name) if pod.owner == owner]
    return found


def environment(pod: Manifest) -> dict[str, Any]:
    [container] = pod["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def rules(roles: list[Manifest]) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(group, resource, verb, names)."""
    for role in roles:
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        yield group, resource, verb, tuple(rule.get("resourceNames", ()))


def test_every_set_of_values_has_a_golden_manifest() -> None:
    assert sorted(path.stem for path in (FOLDER / "golden").glob("*.yaml")) == SETS


@every_set
def test_every_pod_is_restricted(name: str) -> None:
    found = pods(name)
    assert found
    for pod in found:
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        allowed = {"configMap", "emptyDir", "secret"}
        assert {kind for each in pod.spec.get("volumes", ()) for kind in each} <= allowed | {"name"}
        for container in pod.spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"]["limits"]["memory"]


@every_set
def test_only_who_speaks_with_the_api_server_has_a_token(name: str) -> None:
    for pod in pods(name):
        needed = pod.labels["app.kubernetes.io/component"] in ("operator", "job")
        assert pod.spec["automountServiceAccountToken"] is needed, pod.owner


@every_set
def test_our_own_kinds_come_by_hooks_alone(name: str) -> None:
    for found in rendered(name):
        if found["apiVersion"].startswith(f"{API_GROUP}/"):
            assert found["metadata"]["annotations"]["helm.sh/hook"] == "post-install"


@every_set
def test_a_selector_finds_its_own_pods_alone(name: str) -> None:
    labelled = {pod.owner: pod.labels for pod in pods(name)}
    for each in of_kind(name, "Deployment", "PodDisruptionBudget"):
        wanted = each["spec"]["selector"]["matchLabels"].items()
        owner = each["metadata"]["name"]
        assert [other for other, labels in labelled.items() if wanted <= labels.items()] == [owner]
    for service in of_kind(name, "Service"):
        wanted = service["spec"]["selector"].items()
        assert [other for other, labels in labelled.items() if wanted <= labels.items()] == [
            service["metadata"]["name"]
        ]


@every_set
def test_a_port_that_is_named_exists(name: str) -> None:
    for pod in pods(name):
        for container in pod.spec["containers"]:
            ports = {port["name"] for port in container.get("ports", ())}
            probes = (container.get(kind) for kind in ("livenessProbe", "readinessProbe"))
            for probe in filter(None, probes):
                [(_, how)] = [item for item in probe.items() if item[0] in ("httpGet", "tcpSocket")]
                assert how["port"] in ports


@every_set
def test_every_secret_that_is_named_is_made_or_given(name: str) -> None:
    given = {"ledger", "voice-tls"} if name == "everything" else set[str]()
    made = {found["metadata"]["name"] for found in of_kind(name, "Secret")}
    for pod in pods(name):
        volumes = [
            each["secret"]["secretName"] for each in pod.spec.get("volumes", ()) if "secret" in each
        ]
        variables = [
            each["valueFrom"]["secretKeyRef"]["name"]
            for each in pod.spec["containers"][0].get("env", ())
            if "secretKeyRef" in each.get("valueFrom", {})
        ]
        assert {*volumes, *variables} <= made | given


# --- rights --------------------------------------------------------------------------------------


def test_with_watched_namespaces_nothing_reaches_the_cluster() -> None:
    assert of_kind("namespaced", "ClusterRole", "ClusterRoleBinding") == []
    roles = of_kind("namespaced", "Role")
    names = {role["metadata"]["name"] for role in roles}
    operator = [role for role in roles if role["metadata"]["name"] == "talk-operator"]
    assert {role["metadata"]["namespace"] for role in operator} == {"voice", "lab"}
    assert names == {"talk-operator", "talk-operator-leases", "talk-test"}
    assert "nodes" not in {resource for _, resource, _, _ in rules(roles)}


def test_the_operator_may_the_same_with_one_role_or_many() -> None:
    [cluster] = [
        r for r in of_kind("defaults", "ClusterRole") if r["metadata"]["name"].endswith(":operator")
    ]
    role = next(
        r for r in of_kind("namespaced", "Role") if r["metadata"]["name"] == "talk-operator"
    )
    more = set(rules([cluster])) - set(rules([role]))
    assert {resource for _, resource, _, _ in more} == {"nodes"}
    assert set(rules([role])) <= set(rules([cluster]))


@every_set
def test_no_right_is_unbounded(name: str) -> None:
    for group, resource, verb, _ in rules(of_kind(name, "Role", "ClusterRole")):
        assert "*" not in (group, resource, verb)
        assert verb not in ("escalate", "bind", "impersonate")
        assert resource not in ("pods/exec", "serviceaccounts/token")


def aggregated(name: str) -> dict[str, Manifest]:
    return {
        role["metadata"]["name"].rpartition(":")[2]: role
        for role in of_kind(name, "ClusterRole")
        if not role["metadata"]["name"].endswith(":operator")
    }


CHANGES = {"create", "delete", "patch", "update", "deletecollection"}


def test_who_administers_a_namespace_makes_no_pools_unless_told() -> None:
    """A pool's pods run an image of its maker's choice and get the ledger's address."""
    roles = aggregated("defaults")
    assert set(roles) == {"edit", "view"}
    assert not {v for _, r, v, _ in rules([*roles.values()]) if r == "duplexpools"} & CHANGES
    asked = aggregated("everything")["admin"]
    assert {v for _, r, v, _ in rules([asked]) if r == "duplexpools"} == CHANGES


def test_view_edit_and_admin_reach_no_secret() -> None:
    roles = aggregated("everything")
    assert set(roles) == {"admin", "edit", "view"}
    for part, role in roles.items():
        label = f"rbac.authorization.k8s.io/aggregate-to-{part}"
        assert role["metadata"]["labels"][label] == "true"
        assert {group for group, _, _, _ in rules([role])} == {API_GROUP}
    assert {verb for _, _, verb, _ in rules([roles["view"]])} == {"get", "list", "watch"}
    assert not {v for _, r, v, _ in rules([roles["edit"]]) if r == "duplexpools"} & CHANGES


@every_set
def test_a_lease_and_the_tests_objects_are_named(name: str) -> None:
    leases = [rule for rule in rules(of_kind(name, "Role")) if rule[1] == "leases"]
    lease = OperatorSettings(redis_url="", namespace="", identity="").lease_name
    assert {names for _, _, verb, names in leases if verb != "create"} == {(lease,)}
    test = [role for role in of_kind(name, "Role") if role["metadata"]["name"] == "talk-test"]
    for _, resource, verb, names in rules(test):
        assert names or (resource, verb) in (("duplexpools", "list"), ("duplexsessions", "create"))


# --- what the programs are told ------------------------------------------------------------------


@every_set
def test_the_operator_can_read_its_environment(name: str) -> None:
    told = environment(pod_named(name, "talk-operator"))
    told["DUPLEX_REDIS_URL"], told["DUPLEX_NAMESPACE"] = "redis://ledger", "duplex-system"
    settings = OperatorSettings.from_environment(told)
    assert settings.sidecar_image
    assert settings.gateway_endpoint.startswith(("ws://", "wss://"))
    assert settings.gateway_endpoint.endswith("/v1/realtime")
    durability = "replicated" if name == "everything" else ""
    assert settings.ledger_durability == durability
    assert settings.watch_namespaces == (("lab", "voice") if name == "namespaced" else ())
    assert settings.log_level == "INFO"


@every_set
def test_the_gateway_can_read_its_environment(name: str) -> None:
    told = environment(pod_named(name, "talk-gateway")) | {"DUPLEX_REDIS_URL": "redis://ledger"}
    files = {variable for variable in told if variable.endswith("_FILE")}
    settings = settings_from({key: value for key, value in told.items() if key not in files})
    [container] = pod_named(name, "talk-gateway")["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"realtime": settings.port, "health": settings.health_port}
    assert settings.log_level == "INFO"
    memory = container["resources"]["limits"]["memory"]
    allowed_bytes = int(memory.removesuffix("Gi")) * 2**30
    assert settings.max_held_bytes <= allowed_bytes // 2
    known = {f"DUPLEX_{field.upper()}" for field in GatewaySettings.__struct_fields__}
    assert set(told) <= known


def test_a_certificate_reaches_the_gateway_and_the_test() -> None:
    gateway = environment(pod_named("everything", "talk-gateway"))
    assert gateway["DUPLEX_PORT"] == "8443"
    assert gateway["DUPLEX_TLS_CERT_FILE"] == "/etc/duplex/tls/tls.crt"
    test = environment(pod_named("everything", "talk-test"))
    assert test["TEST_SERVER_NAME"] == "voice.example"
    assert test["TEST_GATEWAY_URL"].startswith("wss://")
    assert "DUPLEX_TLS_CERT_FILE" not in environment(pod_named("defaults", "talk-gateway"))


@every_set
def test_a_gateway_has_time_to_send_its_clients_on(name: str) -> None:
    pod = pod_named(name, "talk-gateway")
    grace_s = float(environment(pod)["DUPLEX_DRAIN_GRACE_S"])
    assert pod["terminationGracePeriodSeconds"] >= grace_s + 10


# --- where things live ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "home"),
    [("defaults", "duplex-system"), ("namespaced", "voice"), ("everything", "voice")],
)
def test_pool_and_test_live_where_policies_close_pods_off(name: str, home: str) -> None:
    made = [*of_kind(name, "DuplexPool"), *of_kind(name, "Role", "RoleBinding")]
    found = {
        each["metadata"]["namespace"]
        for each in made
        if each["metadata"]["name"] == "talk-test" or each["kind"] == "DuplexPool"
    }
    closed = {
        each["metadata"]["namespace"]
        for each in of_kind(name, "NetworkPolicy")
        if each["metadata"]["name"] == "talk-sidecar"
    }
    assert found == {home}
    assert home in closed


# --- who may speak with whom ---------------------------------------------------------------------


def ports_from(policy: Manifest, component: str) -> set[int]:
    """Ports that pods of the component may dial."""
    return {
        port["port"]
        for rule in policy["spec"]["ingress"]
        for peer in rule.get("from", ())
        if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
        == component
        for port in rule["ports"]
    }


@pytest.mark.parametrize("name", sorted(set(SETS) - {"bare"}))
def test_a_pools_pods_are_reached_by_gateway_and_operator_alone(name: str) -> None:
    policies = [
        found
        for found in of_kind(name, "NetworkPolicy")
        if found["metadata"]["name"] == "talk-sidecar"
    ]
    wanted = {"duplex-system"} if name == "defaults" else {"voice", "lab"}
    assert {policy["metadata"]["namespace"] for policy in policies} == wanted
    for policy in policies:
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert ports_from(policy, "operator") == {ADMIN_PORT}
        assert ports_from(policy, "gateway") == {8765}
        assert all(rule.get("from") for rule in policy["spec"]["ingress"])


@pytest.mark.parametrize("name", sorted(set(SETS) - {"bare"}))
def test_the_gateway_cannot_dial_the_api_server_or_an_admin_port(name: str) -> None:
    [policy] = [
        p for p in of_kind(name, "NetworkPolicy") if p["metadata"]["name"] == "talk-gateway"
    ]
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    ledger = 6380 if name == "everything" else 6379
    assert ports == {53, ledger, 8765}


def test_policies_name_pods_as_the_operator_labels_them() -> None:
    [policy] = [
        p for p in of_kind("defaults", "NetworkPolicy") if p["metadata"]["name"] == "talk-sidecar"
    ]
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        LABEL_NAME: PRODUCT,
        LABEL_COMPONENT: COMPONENT_SIDECAR,
    }


def test_nothing_optional_is_there_unasked() -> None:
    kinds = {found["kind"] for found in rendered("defaults")}
    assert not kinds & {"Ingress", "PodMonitor", "DuplexPool"}
    assert "NetworkPolicy" not in {found["kind"] for found in rendered("bare")}
    assert not {found["kind"] for found in rendered("bare")} & {"Job", "Pod", "PodDisruptionBudget"}
