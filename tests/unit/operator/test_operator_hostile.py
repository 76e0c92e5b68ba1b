"""Objects as somebody writes them who means the operator no good, or does not know better."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_operator.context import Context
from duplex_operator.decide.placement import Waiting
from duplex_operator.fleet import Fleet
from duplex_operator.intake import Intake
from duplex_operator.json_text import MOST_DEPTH, decoded, shallow
from duplex_operator.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_MARK,
    COMPONENT_SIDECAR,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_POOL,
)
from duplex_operator.objects import Kind, ObjectKey, RawObject, read_meta, read_session
from duplex_operator.occupancy import Occupancy
from duplex_operator.placements import PlacementBoard
from duplex_operator.reconcile_session import SessionReconciler
from duplex_operator.routes import Routes
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit

POOL = ObjectKey("default", "pool")
SETTINGS = OperatorSettings("redis://ledger", "duplex", "test")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[]\n\u2028'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('x"\\{['), inner),
)


@given(JSON)
def test_what_is_not_too_deep_is_read_as_it_is(value: Any) -> None:
    text = json.dumps(value).encode()
    assert shallow(text) == text


@given(JSON, st.integers(MOST_DEPTH - 2, MOST_DEPTH + 20))
def test_what_is_too_deep_is_null_and_nothing_beside_it_is(value: Any, depth: int) -> None:
    beside = json.dumps(value)
    text = f'[{beside},{{"a":' * depth + "[]" + f"}},{beside}]" * depth
    found = json.loads(shallow(text.encode()))
    levels = 0
    while found:
        left, found, right = found[0], found[1], found[2]
        if levels < (MOST_DEPTH - 6) // 2 and MOST_DEPTH - 2 * levels > 40:
            assert left == value
            assert right == value
        found = found and found["a"]
        levels += 1
    assert levels == min(depth, -(-MOST_DEPTH // 2))


@pytest.mark.parametrize("depth", [90, 900, 1_100, 9_900])
def test_any_depth_can_be_read(depth: int) -> None:
    deep = '{"f:a":' * depth + "{}" + "}" * depth
    found = decoded(f'{{"name":"odd","managedFields":{deep},"uid":"u"}}'.encode())
    assert (found["name"], found["uid"]) == ("odd", "u")


def test_of_what_users_write_on_an_object_little_is_kept() -> None:
    """A namespace of sessions with 256 KiB of annotations each must not fill the memory."""
    annotations = {"example.dev/diary": "x" * 200_000, ANNOTATION_MARK: "draining"}
    meta = read_meta(
        {"metadata": {"annotations": annotations, "labels": {"a": "b", LABEL_POOL: "p"}}}
    )
    assert meta.annotations == {ANNOTATION_MARK: "draining"}
    assert meta.labels == {LABEL_POOL: "p"}
    endless = {ANNOTATION_ATTEMPT: "9" * 5_000, ANNOTATION_MARK: None}
    meta = read_meta({"metadata": {"annotations": endless}})
    assert ANNOTATION_ATTEMPT not in meta.annotations


def pod(version: int, **labels: str) -> RawObject:
    own = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_COMPONENT: COMPONENT_SIDECAR}
    return {
        "metadata": {
            "name": "pod-a",
            "namespace": "default",
            "uid": "uid-a",
            "resourceVersion": str(version),
            "labels": own | labels,
        },
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize("relisted", [False, True], ids=["watched", "relisted"])
def test_a_pod_that_lost_its_labels_for_a_while_is_back_with_them(relisted: bool) -> None:
    """A watch tells of what leaves its selection as of what is deleted."""
    store = Store()
    intake = Intake(SETTINGS, store, DirtySet(), None)  # type: ignore[arg-type]
    intake.take(Kind.POD, "ADDED", pod(5, **{LABEL_POOL: "pool"}))
    if relisted:
        store.pods.replace_all([], as_of="6")
    else:
        intake.take(Kind.POD, "DELETED", pod(6))
    assert store.pod_by_uid("uid-a") is None
    intake.take(Kind.POD, "MODIFIED", pod(6, **{LABEL_POOL: "pool"}))
    assert store.pod_by_uid("uid-a") is None
    intake.take(Kind.POD, "ADDED", pod(7, **{LABEL_POOL: "pool"}))
    assert store.pod_by_uid("uid-a") is not None
    store.pods.drop(ObjectKey("default", "pod-a"), "uid-a")
    store.pods.replace_all([], as_of="8")
    intake.take(Kind.POD, "ADDED", pod(9, **{LABEL_POOL: "pool"}))
    assert store.pod_by_uid("uid-a") is None


async def test_a_priority_that_changes_counts_for_who_waits_already() -> None:
    store, dirty, board = Store(), DirtySet(), PlacementBoard()
    fleet = Fleet(store, dirty)
    poked: list[ObjectKey] = []
    context = Context(
        SETTINGS,
        store,
        dirty,
        None,  # type: ignore[arg-type]
        fleet,
        board,
        Routes(SETTINGS.redis_url),
        Occupancy(store, None),  # type: ignore[arg-type]
    )
    _ = SessionReconciler(context, poked.append)

    def told(version: int, **spec: Any) -> None:
        metadata = {
            "name": "talk",
            "namespace": "default",
            "uid": "u",
            "resourceVersion": str(version),
            "generation": version,
        }
        found = read_session({"metadata": metadata, "spec": {"poolRef": {"name": "pool"}, **spec}})
        assert found is not None
        store.sessions.put(found)

    told(1)
    board.ask(POOL, Waiting("u", 0, 1))
    told(2, lifecycle={"retention": "1h"})
    assert poked == []
    told(3, priority=7)
    assert board.waiting_for(POOL)["u"].priority == 7
    assert poked == [POOL]
    board.leave("u")
    told(4, priority=9)
    assert board.waiting_for(POOL) == {}
    assert poked == [POOL]
    await context.routes.close()
