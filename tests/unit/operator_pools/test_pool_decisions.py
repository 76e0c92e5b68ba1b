"""Why a pod has to go, how many a pool wants, and what its status says."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden_pools import LEAST

from duplex_api.pool import PoolSpec, PoolStatus
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.decide.drain import LeaveReason, leaving
from duplex_operator.decide.pods import Mark, PodState, PodView
from duplex_operator.decide.pool_status import PoolFacts, Trouble, pool_status
from duplex_operator.decide.scaling import Demand, Wanted, wanted_pods
from duplex_operator.objects import PodObject, read_node, read_pod

pytestmark = pytest.mark.unit

NOW_MS = 1_795_995_000_000


def pod(**status: Any) -> PodObject:
    raw = {
        "metadata": {"name": "demo-a", "namespace": "talk", "labels": {"duplex.dev/pool": "demo"}},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", **status},
    }
    found = read_pod(raw)
    assert found is not None
    return found


READY = pod(conditions=[{"type": "Ready", "status": "True"}])


def node(*taints: str, cordoned: bool = False) -> Any:
    listed = [{"key": key, "effect": "NoSchedule"} for key in taints]
    return read_node(
        {"metadata": {"name": "n1"}, "spec": {"unschedulable": cordoned, "taints": listed}}
    )


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (None, None),
        (node(), None),
        (node("example.com/other"), None),
        (node(cordoned=True), LeaveReason.NODE_CORDONED),
        (node("ToBeDeletedByClusterAutoscaler"), LeaveReason.NODE_GOING),
        (node("karpenter.sh/disrupted"), LeaveReason.NODE_GOING),
        (node("karpenter.sh/disrupted", cordoned=True), LeaveReason.NODE_GOING),
        # Ready pods of a node that is only late with its word stay.
        (node("node.kubernetes.io/unreachable"), None),
    ],
)
def test_what_a_node_says_about_a_ready_pod(where: Any, reason: LeaveReason | None) -> None:
    leave = leaving(READY, where)
    assert (leave.reason if leave else None) == reason


def test_a_pod_that_starts_on_a_node_not_quite_ready_is_not_lost() -> None:
    assert leaving(pod(), node("node.kubernetes.io/not-ready")) is None


def test_a_pod_on_a_silent_node_is_lost_and_an_evicted_one_leaves() -> None:
    lost = leaving(pod(), node("node.kubernetes.io/unreachable", cordoned=True))
    assert lost is not None
    assert lost.reason is LeaveReason.NODE_LOST
    assert lost.message == "node n1 does not answer"
    evicted = pod(conditions=[{"type": "DisruptionTarget", "status": "True"}])
    leave = leaving(evicted, None)
    assert leave is not None
    assert leave.reason is LeaveReason.EVICTED


def spec(**fields: Any) -> Any:
    return resolve_pool(PoolSpec.model_validate({**LEAST, **fields}))


@pytest.mark.parametrize(
    ("taken", "queued", "pods"),
    [(0, 0, 1), (2, 0, 1), (3, 0, 2), (4, 0, 2), (4, 3, 3), (8, 8, 4), (100, 100, 4)],
)
def test_scaling_counts_slots_queue_and_spare(taken: int, queued: int, pods: int) -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 4, "spareSlots": 2}
    wanted = wanted_pods(spec(scaling=scaling, replicas=9), Demand(taken, queued))
    assert wanted.pods == pods
    assert wanted.only_empty


def test_without_scaling_the_number_is_the_users() -> None:
    wanted = wanted_pods(spec(replicas=3), Demand(100, 100))
    assert (wanted.pods, wanted.only_empty) == (3, False)


@given(
    slots=st.integers(1, 256),
    low=st.integers(0, 20),
    more=st.integers(1, 20),
    spare=st.integers(0, 50),
    taken=st.integers(0, 5_000),
    queued=st.integers(0, 5_000),
)
def test_scaling_keeps_its_bounds_and_has_room_where_it_may(
    slots: int, low: int, more: int, spare: int, taken: int, queued: int
) -> None:
    scaling = {"minReplicas": low, "maxReplicas": low + more, "spareSlots": spare}
    pods = wanted_pods(spec(slots=slots, scaling=scaling), Demand(taken, queued)).pods
    assert low <= pods <= low + more
    needed = taken + queued + spare
    assert pods * slots >= needed or pods == low + more
    assert (pods - 1) * slots < needed or pods == low


# Status


def view(name: str, state: PodState = PodState.READY, **fields: Any) -> PodView:
    base = PodView(name, f"uid-{name}", state, "new", "c1", 4, 0, 0, 0, 0)
    return replace(base, **fields)


def facts(*views: PodView, wanted: int = 2, **fields: Any) -> PoolFacts:
    base = PoolFacts(
        generation=3,
        selector="a=b",
        wanted=Wanted(wanted, False, "because"),
        views=views,
        queued=0,
        old=0,
        without_ledger=0,
        waits=(),
        trouble=None,
    )
    return replace(base, **fields)


def answers(status: PoolStatus) -> dict[str, str]:
    return {c.type: f"{c.status} {c.reason}" for c in status.conditions or ()}


A, B = view("a", sessions=1), view("b")
STARTING = view("c", PodState.STARTING)
CASES: dict[str, tuple[PoolFacts, str, str, str]] = {
    "as wanted": (facts(A, B), "True PodsReady", "False AsWanted", "False AsWanted"),
    "growing": (facts(A), "True PodsReady", "True Growing", "False AsWanted"),
    "starting": (facts(A, STARTING), "True PodsReady", "True Starting", "False AsWanted"),
    "first start": (
        facts(STARTING, wanted=1),
        "False NoReadyPods",
        "True Starting",
        "False AsWanted",
    ),
    "none wanted": (facts(wanted=0), "True NoneWanted", "False AsWanted", "False AsWanted"),
    "shrinking": (
        facts(A, replace(B, mark=Mark.DRAINING), wanted=1),
        "True PodsReady",
        "True Shrinking",
        "False AsWanted",
    ),
    "rolling": (facts(A, B, old=1), "True PodsReady", "True RollingOut", "False AsWanted"),
    "broken": (
        facts(A, view("d", PodState.BROKEN)),
        "True PodsReady",
        "True Starting",
        "True PodsBroken",
    ),
    "lost": (
        facts(A, view("d", PodState.LOST)),
        "True PodsReady",
        "True Starting",
        "True NodesLost",
    ),
    "without the ledger": (
        facts(view("a", PodState.WAITING), view("b", PodState.WAITING), without_ledger=2),
        "False NoReadyPods",
        "True Starting",
        "True LedgerAway",
    ),
    "waiting": (
        facts(A, STARTING, waits=("ImagePullBackOff (1)",)),
        "True PodsReady",
        "True Starting",
        "True ContainersWait",
    ),
    "no room": (
        facts(A, replace(STARTING, unplaced=True)),
        "True PodsReady",
        "True Starting",
        "True NoRoom",
    ),
    "trouble": (
        facts(A, trouble=Trouble("PodRefused", "no")),
        "True PodsReady",
        "False PodRefused",
        "True PodRefused",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_conditions(case: str) -> None:
    given_facts, ready, progressing, degraded = CASES[case]
    status = pool_status(given_facts, PoolStatus(), NOW_MS)
    assert answers(status) == {"Ready": ready, "Progressing": progressing, "Degraded": degraded}
    assert all(c.observed_generation == 3 and c.message for c in status.conditions or ())


def test_numbers_are_of_pods_that_take_sessions() -> None:
    leaving_pod = view("d", sessions=2, mark=Mark.DRAINING)
    ended = view("e", PodState.ENDED)
    full = view("f", slots=2, sessions=3)
    status = pool_status(facts(A, B, STARTING, leaving_pod, ended, full), PoolStatus(), NOW_MS)
    assert (status.replicas, status.ready_replicas) == (5, 4)
    assert (status.slots, status.free_slots) == (10, 7)


def test_a_condition_keeps_its_time_until_its_answer_changes() -> None:
    first = pool_status(facts(A, B), PoolStatus(), NOW_MS)
    again = pool_status(facts(A, B), first, NOW_MS + 60_000)
    assert again == first
    later = pool_status(facts(A, STARTING), first, NOW_MS + 60_000)
    times = {
        before.type: before.last_transition_time == after.last_transition_time
        for before, after in zip(first.conditions or (), later.conditions or (), strict=True)
    }
    assert times == {"Ready": True, "Progressing": False, "Degraded": True}
