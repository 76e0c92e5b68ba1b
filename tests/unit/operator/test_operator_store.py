"""The shelves keep the newest of each object, and their indexes agree with them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_operator.objects import (
    NodeObject,
    ObjectKey,
    SessionObject,
    read_node,
    read_pod,
    read_pool,
    read_session,
    timestamp,
    timestamp_ms,
)
from duplex_operator.store import Change, Store

pytestmark = pytest.mark.unit

KEY = ObjectKey("default", "talk")


def raw_session(version: int, uid: str = "u1", pod_uid: str | None = None) -> dict[str, Any]:
    placement = {"pod": "pod-a", "podUID": pod_uid, "fence": 1}
    return {
        "metadata": {
            "name": "talk",
            "namespace": "default",
            "uid": uid,
            "resourceVersion": str(version),
            "generation": 1,
            "creationTimestamp": "2026-01-02T03:04:05Z",
        },
        "spec": {"poolRef": {"name": "x"}, "aFieldOfTheNextRelease": 1},
        "status": {"placement": placement} if pod_uid else {},
    }


def session(version: int, uid: str = "u1", pod_uid: str | None = None) -> SessionObject:
    found = read_session(raw_session(version, uid, pod_uid))
    assert found is not None
    return found


def test_an_older_version_changes_nothing() -> None:
    store = Store()
    seen: list[Change[SessionObject]] = []
    store.listeners.session.append(seen.append)
    assert store.sessions.put(session(5, pod_uid="p"))
    assert not store.sessions.put(session(4))
    assert not store.sessions.put(session(5))
    assert store.sessions.put(session(10))
    assert [change.after.meta.version for change in seen if change.after] == ["5", "10"]


def test_what_is_gone_stays_gone() -> None:
    store = Store()
    store.sessions.put(session(5, pod_uid="p"))
    assert store.sessions.drop(KEY, "u1")
    assert not store.sessions.put(session(6))
    assert store.placed_on("p") == ()
    assert store.sessions.put(session(7, uid="u2"))
    assert not store.sessions.drop(KEY, "u1")
    assert store.session_by_uid("u2") is not None


def test_a_full_list_drops_what_it_lacks_but_not_what_is_newer() -> None:
    store = Store()
    store.sessions.put(session(5))
    store.sessions.replace_all([], as_of="4")
    assert len(store.sessions) == 1
    store.sessions.replace_all([], as_of="9", namespace="other")
    assert len(store.sessions) == 1
    store.sessions.replace_all([], as_of="9")
    assert len(store.sessions) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.sampled_from(["u1", "u2"]), st.sampled_from([None, "p", "q"])
        ),
        max_size=30,
    )
)
def test_the_indexes_agree_with_the_shelf(rows: list[tuple[int, str, str | None]]) -> None:
    store = Store()
    for version, uid, pod in rows:
        if version == 9:
            store.sessions.drop(KEY, uid)
        else:
            store.sessions.put(session(version, uid, pod))
        found = store.sessions.get(KEY)
        placed = {one.meta.uid for name in ("p", "q") for one in store.placed_on(name)}
        expected = {found.meta.uid} if found is not None and found.status.placement else set()
        assert placed == expected
        assert len(store.sessions_of(ObjectKey("default", "x"))) == len(store.sessions)


def test_equal_conditions_are_kept_once() -> None:
    placed = {
        "type": "Placed",
        "status": "True",
        "reason": "Placed",
        "message": "on pod pod-a with fence 1",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "observedGeneration": 1,
    }
    found: list[SessionObject] = []
    for uid, message in (("u1", placed["message"]), ("u2", placed["message"]), ("u3", "x")):
        raw = raw_session(3, uid) | {"status": {"conditions": [placed | {"message": message}]}}
        session = read_session(raw)
        assert session is not None
        found.append(session)
    first, second, third = ((one.status.conditions or ())[0] for one in found)
    assert first is second
    assert first != third


def test_objects_are_read_as_far_as_decisions_look() -> None:
    assert read_session({"metadata": {"name": "a"}, "spec": {"poolRef": 1}}) is None
    assert read_pool({"metadata": {"name": "a"}, "spec": {}}) is None
    assert read_pod({"metadata": {"name": "a"}}) is None
    pod = read_pod(
        {
            "metadata": {
                "name": "p",
                "namespace": "default",
                "labels": {"duplex.dev/pool": "x", "duplex.dev/occupied": "true"},
            },
            "spec": {"nodeName": "n"},
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "DisruptionTarget", "status": "True"},
                ],
                "containerStatuses": [
                    {
                        "name": "duplex-sidecar",
                        "restartCount": 2,
                        "state": {"terminated": {"reason": "OOMKilled"}},
                    }
                ],
            },
        }
    )
    assert pod is not None
    assert (pod.ready, pod.disrupted, pod.occupied, pod.sidecar_terminated) == (
        True,
        True,
        True,
        "OOMKilled",
    )
    node: NodeObject = read_node(
        {
            "metadata": {"name": "n"},
            "spec": {
                "unschedulable": True,
                "taints": [
                    {"key": "a", "effect": "NoSchedule"},
                    {"key": "b", "effect": "PreferNoSchedule"},
                ],
            },
        }
    )
    assert (node.unschedulable, node.taints, node.ready) == (True, ("a",), False)


@given(st.integers(0, 4_000_000_000))
def test_timestamps_come_back(second: int) -> None:
    assert timestamp_ms(timestamp(second * 1000)) == second * 1000


def test_no_timestamp_is_zero() -> None:
    assert timestamp_ms("") == timestamp_ms("yesterday") == 0
