"""How many evictions a pool's budget lets through, reckoned as Kubernetes' disruption controller
does (`pkg/controller/disruption/disruption.go`)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_operator.resources.budgets import occupied_budget
from duplex_operator.resources.pod_template import Manifest
from duplex_operator.resources.pods import PoolIdentity

pytestmark = pytest.mark.unit

SPEC: Manifest = occupied_budget(PoolIdentity("talk", "demo", "uid"))["spec"]


def desired_healthy(spec: Manifest, replicas: int) -> int:
    """replicas: of the scale subresource of whoever controls the pods."""
    if "maxUnavailable" in spec:
        return max(0, replicas - spec["maxUnavailable"])
    return int(spec["minAvailable"])


def allowed(spec: Manifest, replicas: int, healthy: int, unhealthy: int) -> int:
    expected = replicas if "maxUnavailable" in spec else healthy + unhealthy
    return max(0, healthy - desired_healthy(spec, replicas)) if expected > 0 else 0


def unhealthy_may_go(spec: Manifest, replicas: int, healthy: int) -> bool:
    """One that is not ready, by the policy IfHealthyBudget."""
    assert spec["unhealthyPodEvictionPolicy"] == "IfHealthyBudget"
    desired = desired_healthy(spec, replicas)
    return 0 < desired <= healthy


@given(st.integers(0, 1_000), st.integers(0, 5_000), st.integers(0, 5_000))
def test_it_lets_nobody_go_however_many_are_occupied(
    replicas: int, healthy: int, unhealthy: int
) -> None:
    """An autoscaled pool leaves `spec.replicas` at 1."""
    assert allowed(SPEC, replicas, healthy, unhealthy) == 0
    assert not unhealthy_may_go(SPEC, replicas, healthy)
