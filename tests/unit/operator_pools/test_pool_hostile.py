"""Templates that the API server takes, since it does not know what is in them, and nobody means."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden_pools import beside, blueprint, sidecar_says, with_template

from duplex_operator.resources.pod_template import TemplateError

pytestmark = pytest.mark.unit

NAMES = (
    "name", "env", "envFrom", "valueFrom", "secretKeyRef", "secretRef", "securityContext", "add",
    "capabilities", "seccompProfile", "type", "runAsNonRoot", "runAsUser", "volumeMounts",
    "mountPath", "ports", "hostPort", "resources", "limits", "requests", "volumes", "secret",
    "secretName", "projected", "sources", "containers", "initContainers", "duplex-sidecar",
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-1, 1) | st.floats(0, 1) | st.sampled_from(NAMES)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
CONTAINER = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4).flatmap(
    lambda fields: st.sampled_from(["duplex-sidecar", "mine"]).map(lambda n: {**fields, "name": n})
)


def built(spec: dict[str, Any]) -> None:
    """Refused with its reasons, or a pod: nothing else."""
    refused: TemplateError | None = None
    try:
        pod = blueprint(spec)
    except TemplateError as error:
        refused = error
    else:
        json.dumps(pod.manifest)
        security = pod.manifest["spec"]["securityContext"]
        # What is of a wrong type there is refused by the API server.
        assert security["runAsNonRoot"] not in (None, False)
        assert security["runAsUser"] not in (None, 0)
    assert refused is None or (refused.problems and str(refused))


@given(ANYTHING, ANYTHING, st.lists(CONTAINER, max_size=2))
def test_every_template_makes_a_pod_or_says_why_not(
    security: Any, volumes: Any, containers: list[Any]
) -> None:
    built(with_template(securityContext=security, volumes=volumes, containers=containers))
    built(with_template(initContainers=containers))


@pytest.mark.parametrize("says", [sidecar_says, beside])
@pytest.mark.parametrize("name", [["a"], {}, None, 5])
def test_a_variable_has_a_name(says: Any, name: Any) -> None:
    with pytest.raises(TemplateError, match=r"env\[0\].name"):
        blueprint(says(env=[{"name": name, "value": "x"}]))


@pytest.mark.parametrize("field", ["runAsNonRoot", "runAsUser", "runAsGroup"])
def test_null_does_not_take_the_restriction_off(field: str) -> None:
    """Over the operator's own value it would, and then the image's user may be root."""
    with pytest.raises(TemplateError, match=rf"securityContext.{field}"):
        blueprint(with_template(securityContext={field: None}))
