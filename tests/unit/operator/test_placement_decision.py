"""Who gets which slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_operator.decide.placement import PodSlots, Waiting, WaitReason, place

pytestmark = pytest.mark.unit

POOL = "default/x"


def pod(uid: str, slots: int, used: int, *, takes: bool = True) -> PodSlots:
    return PodSlots(uid=uid, name=f"pod-{uid}", slots=slots, used=used, takes=takes)


def waiting(uid: str, arrived_ms: int, priority: int = 0, last_pod: str = "") -> Waiting:
    return Waiting(uid=uid, priority=priority, arrived_ms=arrived_ms, last_pod=last_pod)


def test_first_come_first_served_within_a_priority() -> None:
    queue = [waiting("c", 3), waiting("a", 1), waiting("vip", 9, priority=1), waiting("b", 2)]
    placed = place(POOL, queue, [pod("p", 2, 0)])
    assert set(placed.assigned) == {"vip", "a"}
    assert [(uid, placed.waits[uid].position) for uid in ("b", "c")] == [("b", 1), ("c", 2)]


def test_the_pod_that_last_held_the_session_is_preferred() -> None:
    pods = [pod("full", 4, 3), pod("own", 4, 0)]
    placed = place(POOL, [waiting("a", 1, last_pod="own"), waiting("b", 2)], pods)
    assert placed.assigned["a"].pod_uid == "own"
    assert placed.assigned["b"].pod_uid == "full"


@pytest.mark.parametrize(
    ("pods", "reason", "sentence"),
    [
        ([], WaitReason.NO_PODS, "pool default/x has no pods"),
        (
            [pod("a", 4, 0, takes=False)],
            WaitReason.NO_READY_PODS,
            "none of the 1 pod of pool default/x takes sessions now",
        ),
        (
            [pod("a", 4, 4), pod("b", 4, 4), pod("c", 4, 0, takes=False)],
            WaitReason.NO_FREE_SLOTS,
            "2 pods of pool default/x are full (8 of 8 slots)",
        ),
    ],
)
def test_whoever_waits_is_told_why(pods: list[PodSlots], reason: WaitReason, sentence: str) -> None:
    wait = place(POOL, [waiting("a", 1)], pods).waits["a"]
    assert (wait.reason, wait.sentence, wait.position) == (reason, sentence, 1)


queues = st.lists(
    st.builds(
        Waiting,
        uid=st.integers(0, 10_000).map(str),
        priority=st.integers(-2, 2),
        arrived_ms=st.integers(0, 5),
        last_pod=st.sampled_from(["", "0", "1", "9"]),
    ),
    max_size=20,
    unique_by=lambda found: found.uid,
)
pools = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), max_size=5).map(
    lambda rows: [
        pod(str(index), slots, used, takes=takes) for index, (slots, used, takes) in enumerate(rows)
    ]
)


@given(queues, pools)
def test_no_pod_gets_more_than_it_has(queue: list[Waiting], pods: list[PodSlots]) -> None:
    placed = place(POOL, queue, pods)
    for one in pods:
        got = sum(found.pod_uid == one.uid for found in placed.assigned.values())
        assert got <= one.free
    assert set(placed.assigned) | set(placed.waits) == {found.uid for found in queue}
    assert not set(placed.assigned) & set(placed.waits)


@given(queues, pools)
def test_nobody_waits_while_somebody_behind_is_served(
    queue: list[Waiting], pods: list[PodSlots]
) -> None:
    placed = place(POOL, queue, pods)
    served = [found.rank for found in queue if found.uid in placed.assigned]
    left = sorted(
        (found.rank, placed.waits[found.uid].position)
        for found in queue
        if found.uid in placed.waits
    )
    assert not left or not served or max(served) < left[0][0]
    assert [position for _, position in left] == list(range(1, len(left) + 1))
    # No slot stays free while somebody waits.
    assert not left or len(served) == sum(one.free for one in pods)


@given(queues, pools)
def test_the_queue_drains(queue: list[Waiting], pods: list[PodSlots]) -> None:
    """Slots that come free serve everybody in the end: nobody starves."""
    rounds = 0
    while queue and sum(one.slots for one in pods if one.takes):
        emptied = [pod(one.uid, one.slots, 0, takes=one.takes) for one in pods]
        placed = place(POOL, queue, emptied)
        assert placed.assigned
        queue = [found for found in queue if found.uid not in placed.assigned]
        rounds += 1
    assert rounds <= 20
