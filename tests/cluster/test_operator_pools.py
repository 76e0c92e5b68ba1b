"""Pools on a real API server: what is made, accepted, rolled, scaled, drained and removed."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from support.api_servers import ApiServer
from support.golden_pools import POOLS
from support.kube import KubeError, until
from support.pool_rig import PoolRig, decoded, pool_rig

from duplex_operator.decide.pods import Mark
from duplex_operator.names import ANNOTATION_SERVED_BY, LABEL_OCCUPIED
from duplex_operator.objects import PodObject, timestamp
from duplex_operator.resources.budgets import MORE_THAN_ANY_POOL
from duplex_operator.resources.pool_secrets import TOKEN_LIFE_MS

pytestmark = pytest.mark.cluster

DAY_MS = 86_400_000
MOST_LOOKS = 200
COLLECTED_S = 120.0
"""Kubernetes' garbage collector looks for new kinds every 30 s."""


@pytest.fixture
async def rig(api_server: ApiServer, api_namespace: str) -> AsyncIterator[PoolRig]:
    async with pool_rig(api_server, api_namespace) as made:
        yield made


def of_name(rig: PoolRig, name: str) -> PodObject:
    (found,) = (pod for pod in rig.pods() if pod.meta.key.name == name)
    return found


async def test_a_pool_gets_its_pods_its_secret_and_its_budget(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=2)
    await rig.look()
    pool = await rig.pool()
    assert len(rig.pods()) == 2
    for pod in rig.pods():
        assert pod.owner_uid == pool["metadata"]["uid"]
        assert pod.occupied is False
    secret = await rig.secret()
    assert secret.token
    assert secret.redis_url == rig.context.settings.redis_url
    budget = yaml.safe_load(await rig.kubectl("get", "pdb", "demo-occupied", "-o", "yaml"))
    assert budget["spec"]["minAvailable"] == MORE_THAN_ANY_POOL
    assert pool["status"]["replicas"] == 2
    assert pool["status"]["selector"].endswith("duplex.dev/pool=demo")
    assert (await rig.conditions())["Ready"] == ("False", "NoReadyPods")
    assert (await rig.event_reasons()).count("PodCreated") == 2
    before = rig.api.connection.requests.total()
    await rig.look()
    # Four lists are the rig's own.
    assert rig.api.connection.requests.total() - before == 8


@pytest.mark.parametrize("name", POOLS)
async def test_a_restricted_namespace_takes_every_golden_pod(rig: PoolRig, name: str) -> None:
    await rig.apply_pool(**POOLS[name])
    await rig.look()
    assert len(rig.pods()) == 1
    assert (await rig.conditions())["Degraded"] == ("False", "AsWanted")


async def test_ready_pods_make_a_ready_pool(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=2)
    await rig.look()
    await rig.all_ready()
    await rig.look()
    status = (await rig.pool())["status"]
    assert (status["readyReplicas"], status["slots"], status["freeSlots"]) == (2, 8, 8)
    assert (await rig.conditions())["Ready"] == ("True", "PodsReady")
    assert (await rig.conditions())["Progressing"] == ("False", "AsWanted")
    printed = await rig.kubectl("get", "dxp", "demo", "--no-headers")
    assert printed.split()[:5] == ["demo", "2", "2", "8", "8"]


async def test_a_decision_on_an_old_view_makes_no_pod_twice(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=2)
    await rig.look()
    names = rig.names()
    rig.start_operator()
    # A watch that has told of the pool and not yet of its pods.
    await rig.refresh()
    for pod in rig.pods():
        rig.context.store.pods.drop(pod.meta.key, "another uid")
        rig.context.store.pods._objects.clear()
    rig.context.store._pods_of_pool.clear()
    await rig.reconciler.reconcile(rig.key)
    await rig.look(2)
    assert rig.names() == names


async def test_the_scale_subresource_scales_and_empty_pods_go_first(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    assert (await rig.kubectl("scale", "dxp/demo", "--replicas=3")).strip().endswith("scaled")
    await rig.look()
    await rig.all_ready()
    occupied = rig.pods()[1]
    await rig.place("talk", occupied)
    await rig.look()
    assert of_name(rig, occupied.meta.key.name).occupied is True
    await rig.kubectl("scale", "dxp/demo", "--replicas=1")
    await rig.look_until(lambda: len(rig.pods()) == 1, "scale-down")
    assert rig.names() == {occupied.meta.key.name}
    assert rig.admins[occupied.meta.uid].graces_s == []
    assert (await rig.pool())["spec"]["replicas"] == 1
    drained = [admin for uid, admin in rig.admins.items() if uid != occupied.meta.uid]
    assert [admin.draining for admin in drained] == [True, True]


async def test_an_occupied_pod_goes_when_its_session_has_left(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    await rig.place("talk", pod)
    await rig.look()
    await rig.kubectl("scale", "dxp/demo", "--replicas=0")
    await rig.look(3)
    assert rig.pods()[0].mark == Mark.DRAINING
    assert rig.admins[pod.meta.uid].draining
    await rig.unplace("talk")
    await rig.look_until(lambda: not rig.pods(), "the deletion")
    assert "Drained" in await rig.event_reasons()


async def test_a_drain_whose_bound_has_passed_is_over(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1, drain={"grace": "5s"})
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    await rig.place("talk", pod)
    rig.admins[pod.meta.uid].answers = False
    await rig.kubectl("scale", "dxp/demo", "--replicas=0")
    await rig.look(2)
    assert len(rig.pods()) == 1
    rig.late_ms = 56_000
    await rig.look()
    assert rig.pods() == []
    assert "DrainBoundPassed" in await rig.event_reasons()


async def test_an_operator_that_restarts_goes_on_with_a_drain(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    await rig.place("talk", pod)
    await rig.kubectl("scale", "dxp/demo", "--replicas=0")
    await rig.refresh()
    rig.admins[pod.meta.uid].answers = False
    await rig.look()
    rig.start_operator()
    rig.admins[pod.meta.uid].answers = True
    await rig.look_until(lambda: rig.admins[pod.meta.uid].draining, "the drain")
    await rig.unplace("talk")
    await rig.look_until(lambda: not rig.pods(), "the deletion")


async def test_a_new_template_rolls_pod_by_pod(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=2, upgrade={"maxSurge": 0})
    await rig.look()
    await rig.all_ready()
    before = rig.names()
    talking = rig.pods()[0]
    await rig.place("talk", talking)
    await rig.apply_pool(replicas=2, upgrade={"maxSurge": 0}, image="duplex/sidecar:2")
    fewest = 2
    for _ in range(MOST_LOOKS):
        await rig.look()
        await asyncio.sleep(0.02)
        fewest = min(fewest, sum(not pod.mark for pod in rig.pods()))
        assert len(rig.pods()) <= 2
        await rig.all_ready()
        if rig.admins[talking.meta.uid].draining:
            await rig.unplace("talk")
        if not rig.names() & before and len(rig.pods()) == 2:
            break
    assert not rig.names() & before
    assert fewest == 1
    await rig.look()
    assert (await rig.conditions())["Progressing"] == ("False", "AsWanted")


async def test_a_new_checkpoint_ends_conversations_only_if_told_so(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    uid = await rig.place("talk", pod)
    admin = rig.admins[pod.meta.uid]
    admin.sessions[uid] = "active"
    await admin.tell()
    moved = {"checkpoint": {"path": "/models/other"}}
    await rig.apply_pool(**moved)
    await rig.look(2)
    for other in rig.pods():
        if other.meta.uid != pod.meta.uid:
            await rig.make_ready(other)
    await rig.look(2)
    assert of_name(rig, pod.meta.key.name).mark == Mark.FINISHING
    assert admin.ended == []
    assert not admin.draining
    await rig.unplace("talk")
    await admin.end(uid)
    await rig.look_until(lambda: len(rig.pods()) == 1, "the end of the old pod")
    assert rig.pods()[0].meta.uid != pod.meta.uid

    (second,) = rig.pods()
    uid = await rig.place("again", second)
    admin = rig.admins[second.meta.uid]
    admin.sessions[uid] = "active"
    await admin.tell()
    await rig.apply_pool(checkpointChange="End", upgrade={"maxSurge": 0})
    await rig.look_until(lambda: bool(admin.ended), "the end of the conversation")
    assert admin.ended[0] == (uid, "checkpoint_changed")


async def test_a_cordon_drains_and_replaces(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    (pod,) = rig.pods()
    node = f"node-{rig.namespace}"
    await rig.add_node(node)
    await rig.bind(pod, node)
    await rig.make_ready(pod)
    await rig.place("talk", pod)
    await rig.look()
    with pytest.raises(KubeError, match=r"disruption budget|429"):
        await evict(rig, pod)
    await rig.kubectl("cordon", node)
    await rig.look()
    assert of_name(rig, pod.meta.key.name).mark == Mark.DRAINING
    assert len(rig.pods()) == 2
    assert "NodeCordoned" in await rig.event_reasons()
    await rig.unplace("talk")
    await rig.look_until(lambda: len(rig.pods()) == 1, "the deletion")


async def test_nobody_goes_because_the_ledger_is_away(rig: PoolRig) -> None:
    """All pods cease to be ready at once, in the middle of a roll-out: what is there stays, no
    eviction is let through, and afterwards the roll-out goes on one by one."""
    await rig.apply_pool(replicas=2, upgrade={"maxSurge": 0})
    await rig.look()
    await rig.all_ready()
    talking, empty = rig.pods()
    await rig.place("talk", talking)
    await rig.look()
    for admin in rig.admins.values():
        admin.ledger_away = True
        await admin.tell()
    for pod in rig.pods():
        await rig.pod_status(pod, {"phase": "Running"}, ready=False)
    pods = rig.context.fleet.pods
    await rig.until(lambda: all(feed.ledger_away for feed in pods()), "the news")
    await rig.apply_pool(replicas=2, upgrade={"maxSurge": 0}, sharedMemory="2Gi")
    rig.late_ms = 3_600_000
    await rig.look(3)
    assert {pod.meta.uid for pod in rig.pods()} == {talking.meta.uid, empty.meta.uid}
    assert [pod.mark for pod in rig.pods()] == ["", ""]
    assert (await rig.conditions())["Degraded"] == ("True", "LedgerAway")
    with pytest.raises(KubeError, match=r"disruption budget|429"):
        await evict(rig, talking)
    # Back: the feeds know it first, the kubelet of one pod before the other.
    for admin in rig.admins.values():
        admin.ledger_away = False
        await admin.tell()
    await rig.until(lambda: not any(feed.ledger_away for feed in pods()), "the good news")
    await rig.look(3)
    assert [pod.mark for pod in rig.pods()] == ["", ""]
    for pod in rig.pods():
        await rig.pod_status(pod, {"phase": "Running"})
    gone = empty.meta.key.name
    await rig.look_until(lambda: gone not in rig.names(), "the next step of the roll-out")
    assert of_name(rig, talking.meta.key.name).mark == ""
    assert (await rig.conditions())["Degraded"][1] != "LedgerAway"


@pytest.mark.parametrize("taint", ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"])
async def test_a_taint_of_an_autoscaler_drains_and_replaces(rig: PoolRig, taint: str) -> None:
    """What an autoscaler says before it takes a node away; the eviction that it tries meanwhile is
    refused and leaves no trace on the pod."""
    await rig.apply_pool(replicas=1)
    await rig.look()
    (pod,) = rig.pods()
    node = f"node-{rig.namespace}"
    await rig.add_node(node)
    await rig.bind(pod, node)
    await rig.make_ready(pod)
    await rig.place("talk", pod)
    await rig.look()
    with pytest.raises(KubeError, match=r"disruption budget|429"):
        await evict(rig, pod)
    await rig.look()
    assert not of_name(rig, pod.meta.key.name).disrupted
    assert len(rig.pods()) == 1
    await rig.kubectl("taint", "node", node, f"{taint}:NoSchedule")
    await rig.look()
    assert of_name(rig, pod.meta.key.name).mark == Mark.DRAINING
    assert rig.admins[pod.meta.uid].draining
    assert len(rig.pods()) == 2
    assert "NodeGoing" in await rig.event_reasons()
    await rig.unplace("talk")
    await rig.look_until(lambda: len(rig.pods()) == 1, "the deletion")


async def test_a_disruption_target_drains_and_replaces(rig: PoolRig) -> None:
    """The condition by which a scheduler that preempts, a taint manager and a kubelet say that a
    pod is about to go, written as they do."""
    await rig.apply_pool(replicas=1)
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    await rig.place("talk", pod)
    await rig.look()
    now = timestamp(rig.context.now_ms())
    told = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    ready = {"type": "Ready", "status": "True"}
    conditions = [{**each, "lastTransitionTime": now} for each in (ready, told)]
    await rig.pod_status(pod, {"conditions": conditions})
    await rig.look()
    assert of_name(rig, pod.meta.key.name).mark == Mark.DRAINING
    assert rig.admins[pod.meta.uid].draining
    assert len(rig.pods()) == 2
    assert "Evicted" in await rig.event_reasons()
    await rig.unplace("talk")
    await rig.look_until(lambda: len(rig.pods()) == 1, "the deletion")
    # An eviction that is granted says the same by itself, while the pod still has to end.
    (other,) = rig.pods()
    node = f"node-{rig.namespace}"
    await rig.add_node(node)
    await rig.bind(other, node)
    await evict(rig, other)
    await rig.look()
    (going,) = (each for each in rig.context.store.pods_of(rig.key) if each.meta.deleting)
    assert (going.meta.uid, going.disrupted) == (other.meta.uid, True)
    assert len(rig.pods()) == 1


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


async def test_an_empty_pod_can_be_evicted_and_is_replaced(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    (pod,) = rig.pods()
    await evict(rig, pod)
    await rig.look(2)
    assert [found.meta.uid == pod.meta.uid for found in rig.pods()] == [False]


async def test_failed_pods_are_replaced_with_growing_pauses(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()
    seen: set[str] = set()
    for _ in range(2):
        (pod,) = rig.pods()
        seen.add(pod.meta.uid)
        await rig.pod_status(pod, {"phase": "Failed"}, ready=False)
        await rig.look()
    (pod,) = rig.pods()
    assert pod.meta.uid in seen  # the second one waits
    assert (await rig.conditions())["Degraded"] == ("True", "PodsBroken")
    rig.late_ms = 11_000
    await rig.look()
    (pod,) = rig.pods()
    assert pod.meta.uid not in seen


async def test_a_pod_that_the_server_refuses_is_told_of_and_tried_again(rig: PoolRig) -> None:
    bad = {"spec": {"tolerations": [{"key": "gpu", "operator": "Sometimes"}]}}
    await rig.apply_pool(template=bad)
    await rig.look(2)
    assert rig.pods() == []
    assert (await rig.conditions())["Degraded"] == ("True", "PodRefused")
    assert (await rig.event_reasons()).count("PodRefused") == 1
    await rig.apply_pool(template={"spec": {}})
    await rig.look()
    assert len(rig.pods()) == 1
    assert (await rig.conditions())["Degraded"] == ("False", "AsWanted")


async def test_a_refused_template_leaves_what_runs_alone(rig: PoolRig) -> None:
    await rig.apply_pool()
    await rig.look()
    names = rig.names()
    await rig.apply_pool(template={"spec": {"hostNetwork": True}})
    await rig.look(2)
    assert rig.names() == names
    assert not any(pod.mark for pod in rig.pods())
    pool = await rig.pool()
    (degraded,) = (c for c in pool["status"]["conditions"] if c["type"] == "Degraded")
    assert degraded["reason"] == "TemplateRefused"
    assert "spec.template.spec.hostNetwork" in degraded["message"]


async def test_a_secret_of_somebody_else_is_not_touched(rig: PoolRig) -> None:
    await rig.kubectl("create", "secret", "generic", "demo-admin", "--from-literal=token=mine")
    await rig.apply_pool()
    await rig.look()
    raw = await asyncio.to_thread(rig.server.get, "secret", "demo-admin", rig.namespace)
    assert decoded(raw["data"], "token") == "mine"
    assert list(raw["data"]) == ["token"]
    assert (await rig.conditions())["Degraded"] == ("True", "SecretTaken")


async def test_a_pool_of_another_release_is_left_alone_until_its_mark_is_removed(
    rig: PoolRig,
) -> None:
    await rig.apply_pool(replicas=1)
    await rig.look()

    async def written() -> tuple[Any, ...]:
        secret = await asyncio.to_thread(rig.server.get, "secret", "demo-admin", rig.namespace)
        pool = await asyncio.to_thread(rig.server.get, "dxp", "demo", rig.namespace)
        versions = [found["metadata"]["resourceVersion"] for found in (secret, pool)]
        return decoded(secret["data"], "redis-url"), secret["data"]["token"], versions

    def serves() -> bool:
        return rig.context.claims.serves(rig.key)

    before, pods = await written(), rig.names()
    assert serves()
    rig.start_operator("other", "redis://other:6379/0")
    for _ in range(3):
        await rig.look()
        rig.late_ms += 31_000
    assert not serves()
    assert (await written(), rig.names()) == (before, pods)
    fleet = rig.context.fleet
    assert [feed.pod for feed in fleet.pods() if fleet.client(feed.pod_uid) is not None] == []
    assert (await rig.event_reasons()).count("ServedByOther") == 1
    # The first one goes on, also after a restart.
    rig.start_operator()
    await rig.look()
    assert serves()
    assert await written() == before
    # Somebody who knows that it is gone hands its pool over.
    await rig.kubectl("annotate", "secret", "demo-admin", f"{ANNOTATION_SERVED_BY}-")
    rig.start_operator("other", "redis://other:6379/0")
    await rig.look()
    assert serves()
    after = await written()
    assert (after[0], after[1]) == ("redis://other:6379/0", before[1])
    assert "PoolAdopted" in await rig.event_reasons()
    rig.start_operator()
    await rig.look()
    assert not serves()
    assert (await written())[0] == after[0]


async def test_the_token_rotates_with_overlap(rig: PoolRig) -> None:
    await rig.apply_pool()
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    first = await rig.secret()
    rig.late_ms = TOKEN_LIFE_MS + DAY_MS
    await rig.look()
    second = await rig.secret()
    assert second.previous_token == first.token != second.token
    # The pod has not seen it yet, and still is reached.
    await rig.context.fleet.drain(pod.meta.uid, 1.0)
    rig.admins[pod.meta.uid].tokens = {first.token, second.token}
    rig.late_ms += 200_000
    await rig.look()
    rig.admins[pod.meta.uid].tokens = {second.token}
    await rig.context.fleet.drain(pod.meta.uid, 1.0)
    rig.late_ms += 200_000
    await rig.look()
    assert (await rig.secret()).previous_token == ""
    reasons = await rig.event_reasons()
    assert {"AdminTokenRotated", "PreviousAdminTokenDropped"} <= set(reasons)


async def test_autoscaling_follows_sessions_and_never_writes_replicas(rig: PoolRig) -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 3, "spareSlots": 1}
    await rig.apply_pool(slots=1, scaling=scaling)
    await rig.look()
    assert len(rig.pods()) == 1  # one spare slot
    await rig.all_ready()
    await rig.place("talk", rig.pods()[0])
    await rig.look()
    assert len(rig.pods()) == 2
    await rig.all_ready()
    await rig.unplace("talk")
    await rig.look(2)
    assert len(rig.pods()) == 2  # not at once
    rig.late_ms = 400_000
    await rig.look_until(lambda: len(rig.pods()) == 1, "scale-down")
    assert (await rig.pool())["spec"]["replicas"] == 1


async def test_everything_goes_with_the_pool(rig: PoolRig) -> None:
    await rig.apply_pool(replicas=2)
    await rig.look()
    await rig.kubectl("delete", "dxp", "demo")
    await rig.look()

    def left() -> list[str]:
        kinds = ("pods", "secrets", "pdb")
        return [
            one["metadata"]["name"]
            for kind in kinds
            for one in rig.server.items(kind, rig.namespace)
        ]

    await asyncio.to_thread(until, lambda: not left(), "an empty namespace", COLLECTED_S)


async def test_the_label_follows_the_sessions(rig: PoolRig) -> None:
    await rig.apply_pool()
    await rig.look()
    await rig.all_ready()
    (pod,) = rig.pods()
    await rig.place("talk", pod)
    await rig.look()
    selector = f"{LABEL_OCCUPIED}=true"
    assert len(await asyncio.to_thread(rig.server.items, "pods", rig.namespace, selector)) == 1
    await rig.unplace("talk")
    await rig.look()
    assert await asyncio.to_thread(rig.server.items, "pods", rig.namespace, selector) == []
