"""The pod of a pool: golden files over a matrix, and what holds for every pool there can be.

    DUPLEX_WRITE_GOLDEN=1 python -m pytest -p scripts.tiers tests/unit/operator_pools

writes the files anew; read the difference before you keep it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.golden_pools import IDENTITY, LEAST, POOLS, beside, blueprint, pod_of, sidecar_says

from duplex_api.manifest import load_manifests
from duplex_api.pool import PoolSpec
from duplex_api.resolve_pool import ResolvedScaling, resolve_pool
from duplex_operator.names import ANNOTATION_ATTEMPT, SIDECAR_CONTAINER
from duplex_operator.resources.budgets import occupied_budget
from duplex_operator.resources.pod_template import TemplateError
from duplex_operator.resources.pod_volumes import CACHE_PATH, CHECKPOINT_PATH, RUNTIME_PATH
from duplex_operator.resources.pods import PoolIdentity, drain_bound_s, pod_name
from duplex_operator.settings import DURABILITIES
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.settings import MAX_DRAIN_GRACE_S, settings_from_environment

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str, document: dict[str, Any]) -> None:
    path = GOLDEN / f"{name}.yaml"
    text = yaml.safe_dump(document, sort_keys=True, width=100)
    if os.environ.get("DUPLEX_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("name", POOLS)
def test_pods_are_as_they_were(name: str) -> None:
    golden(f"pod_{name}", pod_of(POOLS[name]))


def test_the_budget_is_as_it_was() -> None:
    golden("budget", occupied_budget(IDENTITY))


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["spec"]["containers"]
    yield from pod["spec"].get("initContainers", ())


def sidecar(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = (c for c in pod["spec"]["containers"] if c["name"] == SIDECAR_CONTAINER)
    return found


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in sidecar(pod)["env"]}


@pytest.mark.parametrize("name", POOLS)
def test_every_pod_is_restricted(name: str) -> None:
    pod = pod_of(POOLS[name])
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert sidecar(pod)["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", POOLS)
def test_only_the_sidecar_has_the_admin_secret(name: str) -> None:
    pod = pod_of(POOLS[name])
    for container in containers(pod):
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        ours = container["name"] == SIDECAR_CONTAINER
        assert ("duplex-admin" in mounted) is ours
        assert ours or "demo-admin" not in str(container)


def test_the_kubelet_waits_longer_than_the_drain() -> None:
    pod = pod_of(POOLS["gpu"])
    grace_s = float(environment(pod)["DUPLEX_DRAIN_GRACE_S"])
    assert grace_s == 90
    assert pod["spec"]["terminationGracePeriodSeconds"] >= grace_s + 10


def test_the_start_probe_gives_the_whole_start_up_time() -> None:
    probe = sidecar(pod_of(POOLS["gpu"]))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 15 * 60
    # It is no fault of the pod that the ledger is away.
    assert probe["httpGet"]["path"] == "/readyz?ledger=any"


def test_the_checkpoint_is_where_the_sidecar_looks() -> None:
    places = {name: environment(pod_of(spec))["DUPLEX_CHECKPOINT"] for name, spec in POOLS.items()}
    assert places["least"] == "/models/tiny"
    assert places["gpu"] == CHECKPOINT_PATH
    assert places["image_and_claims"] == f"{CHECKPOINT_PATH}/weights"


def test_limits_of_the_template_lower_the_default_requests() -> None:
    assert sidecar(pod_of(POOLS["template"]))["resources"] == {
        "requests": {"cpu": "500m"},
        "limits": {"memory": "6Gi"},
    }


@pytest.mark.parametrize("name", POOLS)
def test_a_sidecar_takes_the_environment_of_its_pod(name: str) -> None:
    pod = pod_of(POOLS[name])
    known = {"status.podIP": "10.1.2.3", "metadata.uid": "uid-1", "metadata.name": "demo-abc234"}
    environ: dict[str, str] = {}
    for variable in sidecar(pod)["env"]:
        source = variable.get("valueFrom", {})
        field = source.get("fieldRef", {}).get("fieldPath")
        text = known[field] if field else variable.get("value", "redis://ledger")
        environ[variable["name"]] = text.replace("$(POD_IP)", environ.get("POD_IP", ""))
    settings = settings_from_environment(environ, {})
    spec = resolve_pool(PoolSpec.model_validate(POOLS[name]))
    assert settings.advertise == "10.1.2.3:8765"
    assert settings.replica.startswith("uid-1-")
    assert settings.slots == spec.slots
    assert settings.rebuild_seats == spec.rebuilds_at_once
    assert settings.drain_grace_s * 1000 == spec.drain_grace_ms
    assert settings.redis_url == "redis://ledger"
    mounts = {mount["mountPath"] for mount in sidecar(pod)["volumeMounts"]}
    for file in (settings.admin_token_file, settings.tls_cert_file, settings.tls_key_file):
        assert str(Path(file).parent) in mounts
    assert bool(settings.voices_dir) is (spec.voices_claim is not None)
    assert not settings.voices_dir or settings.voices_dir in mounts
    named = spec.trace_sample_ratio
    assert settings.trace_sample_ratio == (1.0 if named is None else named)


def test_pods_are_told_how_durable_the_ledger_is() -> None:
    name = "DUPLEX_LEDGER_DURABILITY"
    assert name not in environment(pod_of(LEAST))
    told = blueprint(LEAST, durability="fsync")
    assert environment(told.named("demo-abc234"))[name] == "fsync"
    assert told.template_hash != blueprint(LEAST).template_hash
    otherwise = sidecar_says(env=[{"name": name, "value": "memory"}])
    assert environment(blueprint(otherwise, durability="fsync").named("p"))[name] == "memory"
    assert {each.value for each in Durability} == set(DURABILITIES)


def test_a_grace_longer_than_a_sidecar_takes_is_no_pool() -> None:
    with pytest.raises(ValidationError, match="grace"):
        PoolSpec.model_validate({**LEAST, "drain": {"grace": "61m"}})
    longest = resolve_pool(PoolSpec.model_validate({**LEAST, "drain": {"grace": "1h"}}))
    assert longest.drain_grace_ms / 1000 == MAX_DRAIN_GRACE_S


def test_the_example_makes_a_pod() -> None:
    text = (Path(__file__).parents[3] / "examples" / "pool.yaml").read_text()
    (pool,) = load_manifests(text).pools
    golden("pod_example", pod_of(pool.spec.model_dump(mode="json", exclude_none=True)))


# What rolls pods and what does not.

ROLLS: list[dict[str, Any]] = [
    {"slots": 5},
    {"image": "example/duplex:2"},
    {"checkpoint": {"path": "/models/other"}},
    {"gpu": {"resourceName": "nvidia.com/gpu"}},
    {"sharedMemory": "1Gi"},
    {"startupTimeout": "5m"},
    {"telemetry": {"otlpEndpoint": "http://collector:4318"}},
    {"telemetry": {"sampleRatio": 0.5}},
    {"voices": {"claimName": "voices"}},
    {"template": {"metadata": {"labels": {"team": "voice"}}}},
    {"template": {"spec": {"nodeSelector": {"gpu": "h200"}}}},
]
STAYS: list[dict[str, Any]] = [
    {"replicas": 7},
    {"drain": {"grace": "5m"}},
    {"scaling": {"minReplicas": 1, "maxReplicas": 3}},
    {"upgrade": {"maxSurge": 0}},
    {"checkpointChange": "End"},
    {"windowPresets": {"long": {"mode": "basic"}}},
    {"template": {}},
]


@pytest.mark.parametrize("change", ROLLS, ids=str)
def test_what_a_running_pod_cannot_take_makes_new_pods(change: dict[str, Any]) -> None:
    before, after = blueprint(LEAST), blueprint({**LEAST, **change})
    assert before.template_hash != after.template_hash
    assert (before.checkpoint_hash != after.checkpoint_hash) is ("checkpoint" in change)


@pytest.mark.parametrize("change", STAYS, ids=str)
def test_what_concerns_the_pool_alone_makes_none(change: dict[str, Any]) -> None:
    assert blueprint(LEAST).template_hash == blueprint({**LEAST, **change}).template_hash


def test_the_attempt_is_on_the_pod_and_changes_no_hash() -> None:
    made = blueprint(LEAST)
    annotations = made.named("demo-a", attempt=3)["metadata"]["annotations"]
    assert annotations[ANNOTATION_ATTEMPT] == "3"
    assert ANNOTATION_ATTEMPT not in made.named("demo-b")["metadata"]["annotations"]


def test_names_differ_within_a_pool_between_templates_and_between_pools_of_one_name() -> None:
    other = PoolIdentity(IDENTITY.namespace, IDENTITY.name, "another-uid")
    names = {
        pod_name(pool, template, number)
        for pool in (IDENTITY, other)
        for template in ("a", "b")
        for number in range(200)
    }
    assert len(names) == 800
    assert all(name.startswith("demo-") and len(name) == len("demo-abcdef") for name in names)


# What a template may not say.

SECRET_ENV = {"name": "X", "valueFrom": {"secretKeyRef": {"name": "demo-admin", "key": "token"}}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "command": (sidecar_says(command=["sh"]), "containers[0].command"),
    "arguments": (sidecar_says(args=["-x"]), "containers[0].args"),
    "image": (sidecar_says(image="mine"), "containers[0].image"),
    "probe": (sidecar_says(livenessProbe={}), "containers[0].livenessProbe"),
    "sidecar security": (sidecar_says(securityContext={}), "containers[0].securityContext"),
    "sidecar envFrom": (sidecar_says(envFrom=[]), "containers[0].envFrom"),
    "our variable": (
        sidecar_says(env=[{"name": "DUPLEX_ADMIN_TOKEN_FILE", "value": "/x"}]),
        "containers[0].env[0]",
    ),
    "a token as a variable": (
        sidecar_says(env=[{"name": "DUPLEX_ADMIN_TOKEN", "value": "x"}]),
        "containers[0].env[0]",
    ),
    "mount over ours": (
        sidecar_says(volumeMounts=[{"name": "v", "mountPath": "/etc/duplex/admin"}]),
        "containers[0].volumeMounts[0].mountPath",
    ),
    "mount around ours": (
        sidecar_says(volumeMounts=[{"name": "v", "mountPath": "/etc/x/../"}]),
        "containers[0].volumeMounts[0].mountPath",
    ),
    "mount inside ours by another name": (
        sidecar_says(volumeMounts=[{"name": "v", "mountPath": f"/var{RUNTIME_PATH}/x"}]),
        "containers[0].volumeMounts[0].mountPath",
    ),
    "claims beside the pool's": (
        sidecar_says(resources={"claims": [{"name": "gpu"}]}),
        "containers[0].resources.claims",
    ),
    "our volume": (
        beside(volumeMounts=[{"name": "duplex-admin", "mountPath": "/a"}]),
        "containers[0].volumeMounts[0].name",
    ),
    "our secret": (beside(env=[SECRET_ENV]), "containers[0].env[0].valueFrom.secretKeyRef"),
    "our whole secret": (
        beside(envFrom=[{"secretRef": {"name": "demo-admin"}}]),
        "containers[0].envFrom[0]",
    ),
    "our name": (beside(name="duplex-other"), "containers[0].name"),
    "host port": (beside(ports=[{"hostPort": 80}]), "containers[0].ports[0].hostPort"),
    "privileged": (
        beside(securityContext={"privileged": True}),
        "containers[0].securityContext.privileged",
    ),
    "root": (beside(securityContext={"runAsUser": 0}), "containers[0].securityContext.runAsUser"),
    "capability": (
        beside(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        "containers[0].securityContext.capabilities.add",
    ),
    "unconfined": (
        beside(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        "containers[0].securityContext.seccompProfile.type",
    ),
}
POD_FIELDS = {
    "hostNetwork": True,
    "hostPID": True,
    "hostIPC": True,
    "shareProcessNamespace": True,
    "serviceAccountName": "boss",
    "automountServiceAccountToken": True,
    "nodeName": "n1",
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": 1,
    "ephemeralContainers": [],
}


def refusals(template: dict[str, Any]) -> list[str]:
    with pytest.raises(TemplateError) as raised:
        blueprint(template)
    return [problem.path for problem in raised.value.problems]


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_reaches_too_far_is_refused(case: str) -> None:
    spec, path = REFUSED[case]
    assert refusals(spec) == [f"spec.template.spec.{path}"]


@pytest.mark.parametrize("field", POD_FIELDS)
def test_fields_of_the_pod_that_are_not_listed_are_refused(field: str) -> None:
    spec = {**LEAST, "template": {"spec": {field: POD_FIELDS[field]}}}
    assert refusals(spec) == [f"spec.template.spec.{field}"]


@pytest.mark.parametrize(
    ("volume", "path"),
    [
        ({"name": "v", "hostPath": {"path": "/"}}, "volumes[0].hostPath"),
        ({"name": "v", "nfs": {}}, "volumes[0].nfs"),
        ({"name": "duplex-admin", "emptyDir": {}}, "volumes[0].name"),
        ({"name": "v", "secret": {"secretName": "demo-admin"}}, "volumes[0].secret.secretName"),
        (
            {"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
            "volumes[0].projected.sources[0].serviceAccountToken",
        ),
        (
            {"name": "v", "projected": {"sources": [{"secret": {"name": "demo-admin"}}]}},
            "volumes[0].projected.sources[0].secret",
        ),
        ({"name": "v"}, "volumes[0]"),
    ],
)
def test_volumes_that_reach_too_far_are_refused(volume: dict[str, Any], path: str) -> None:
    spec = {**LEAST, "template": {"spec": {"volumes": [volume]}}}
    assert refusals(spec) == [f"spec.template.spec.{path}"]


def test_every_problem_is_told_at_once() -> None:
    spec = {
        **LEAST,
        "template": {
            "metadata": {"labels": {"duplex.dev/pool": "x", "ok": "y"}, "name": "n"},
            "spec": {"hostNetwork": True, "containers": [{"name": "a"}, {"name": "duplex-b"}]},
        },
    }
    assert refusals(spec) == [
        "spec.template.metadata.name",
        "spec.template.metadata.labels[duplex.dev/pool]",
        "spec.template.spec.hostNetwork",
        "spec.template.spec.containers[1].name",
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "duplex-sidecar", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("name", "env", "envFrom", "valueFrom", "secretKeyRef", "secretRef"),
                    *("volumeMounts", "mountPath", "resources", "limits", "requests", "ports"),
                    *("securityContext", "capabilities", "add", "seccompProfile", "type"),
                    *("secret", "projected", "sources", "emptyDir"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
any_template = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(st.sampled_from(["labels", "annotations"]), json_values),
        "spec": st.dictionaries(
            st.sampled_from(["containers", "initContainers", "volumes", "securityContext"]),
            json_values | st.lists(json_values, max_size=3),
        ),
    },
)


@given(template=any_template)
def test_any_template_makes_a_pod_or_is_refused_in_words(template: dict[str, Any]) -> None:
    try:
        pod = pod_of({**LEAST, "template": template})
    except TemplateError as error:
        refused = error.problems
    else:
        refused = ()
    if refused:
        assert all(problem.path.startswith("spec.template") for problem in refused)
        return
    assert sidecar(pod)["command"] == ["duplex", "serve", "--from-environment"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    mounts = [mount["mountPath"] for mount in sidecar(pod)["volumeMounts"]]
    assert {RUNTIME_PATH, CACHE_PATH} <= set(mounts)


# Defaults.


def test_a_pool_that_says_nothing_gets_the_defaults() -> None:
    pool = resolve_pool(PoolSpec.model_validate(LEAST))
    assert pool.drain_grace_ms == 60_000
    assert pool.startup_timeout_ms == 600_000
    assert pool.rebuilds_at_once == 2
    assert pool.shared_memory == "8Gi"
    assert pool.max_surge == 1
    assert pool.scaling is None
    assert drain_bound_s(pool) == 90


def test_a_surge_of_none_is_kept() -> None:
    spec = {**LEAST, "upgrade": {"maxSurge": 0}, "scaling": {"minReplicas": 0, "maxReplicas": 2}}
    pool = resolve_pool(PoolSpec.model_validate(spec))
    assert pool.max_surge == 0
    assert pool.scaling == ResolvedScaling(0, 2, 0)
