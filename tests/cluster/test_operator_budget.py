"""Who may be evicted from a pool, as Kubernetes' own controller counts it."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from support.api_servers import ApiServer
from support.kube import KubeError
from support.pool_rig import PoolRig, pool_rig

from duplex_operator.objects import PodObject
from duplex_operator.resources.budgets import budget_name

pytestmark = pytest.mark.cluster

COUNTED_S = 120.0
"""The controller looks for new kinds every 30 s, and counts nothing before that."""
POLL_S = 0.2
SCALED = {"minReplicas": 4, "maxReplicas": 8, "spareSlots": 0}


@pytest.fixture
async def rig(api_server: ApiServer, api_namespace: str) -> AsyncIterator[PoolRig]:
    async with pool_rig(api_server, api_namespace) as made:
        yield made


async def counted(rig: PoolRig, healthy: int) -> None:
    """Returns when the controller has found so many occupied pods to be well."""
    name, status = budget_name("demo"), {}
    for _ in range(round(COUNTED_S / POLL_S)):
        found = await asyncio.to_thread(rig.server.get, "pdb", name, rig.namespace)
        status = found.get("status", {})
        current = status.get("observedGeneration") == found["metadata"]["generation"]
        if current and status.get("currentHealthy") == healthy:
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"not counted: {status}")


async def evict(rig: PoolRig, pod: PodObject) -> None:
    name = pod.meta.key.name
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": rig.namespace},
    }
    path = f"/api/v1/namespaces/{rig.namespace}/pods/{name}/eviction"
    await asyncio.to_thread(
        rig.server.kubectl, "create", "--raw", path, "-f", "-", stdin=json.dumps(body)
    )


async def test_no_occupied_pod_is_evicted_however_many_there_are(rig: PoolRig) -> None:
    """More of them than `spec.replicas` says, which an autoscaled pool leaves at 1. One of them
    waits for the ledger and is not ready."""
    await rig.apply_pool(scaling=SCALED)
    await rig.look()
    await rig.all_ready()
    *occupied, empty = rig.pods()
    for number, pod in enumerate(occupied):
        await rig.place(f"talk-{number}", pod)
    await rig.look()
    await rig.pod_status(occupied[0], {"phase": "Running"}, ready=False)
    await counted(rig, 2)
    for pod in occupied:
        with pytest.raises(KubeError, match=r"disruption budget"):
            await evict(rig, pod)
    await evict(rig, empty)


async def test_the_budget_of_an_earlier_release_is_made_the_same(rig: PoolRig) -> None:
    await rig.apply_pool(scaling=SCALED)
    await rig.look()
    old = {"spec": {"minAvailable": None, "maxUnavailable": 0}}
    patch = ("patch", "pdb", budget_name("demo"), "--type=merge", "-p", json.dumps(old))
    await rig.kubectl(*patch)
    rig.start_operator()
    await rig.look()
    await rig.all_ready()
    for number, pod in enumerate(rig.pods()):
        await rig.place(f"talk-{number}", pod)
    await rig.look()
    assert "BudgetRefused" not in await rig.event_reasons()
    await counted(rig, 4)
    with pytest.raises(KubeError, match=r"disruption budget"):
        await evict(rig, rig.pods()[0])
