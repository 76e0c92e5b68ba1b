"""Objects as somebody writes them who means the operator no good, or does not know better."""

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_operator import sweep
from duplex_operator.claims import Claims
from duplex_operator.context import Context
from duplex_operator.decide.actions import RETRY_S
from duplex_operator.decide.placement import Waiting
from duplex_operator.fleet import Fleet
from duplex_operator.intake import Intake
from duplex_operator.kube.errors import ConflictError
from duplex_operator.kube.json_text import MOST_DEPTH, decoded, shallow
from duplex_operator.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_MARK,
    COMPONENT_SIDECAR,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_POOL,
    SESSION_FINALIZER,
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
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[]\n\u2028', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('x"\\{[', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_what_is_not_too_deep_is_read_as_it_is(value: Any) -> None:
    text = json.dumps(value).encode()
    assert shallow(text) == text


@given(JSON, st.integers(MOST_DEPTH, MOST_DEPTH + 20), st.sampled_from(["1", "[]", '"]{"']))
def test_what_is_too_deep_is_null_and_nothing_beside_it_is(
    value: Any, depth: int, inmost: str
) -> None:
    beside, deep = json.dumps(value), '{"a":' * depth + inmost + "}" * depth
    left, found, right = json.loads(shallow(f"[{beside},{deep},{beside}]".encode()))
    assert (left, right) == (value, value)
    levels = 0
    while found is not None:
        found, levels = found["a"], levels + 1
    assert levels == MOST_DEPTH - 1  # the list around it is one


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


async def test_what_nobody_foresaw_in_a_sweep_ends_no_reign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it in a look at the tokens: both stand beside everything else an operator does."""
    rounds: list[str] = []
    twice = asyncio.Event()

    async def odd(*_: Any) -> int:
        rounds.append("round")
        if len(rounds) == 4:
            twice.set()
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(sweep, "SWEEP_PERIOD_S", 0)
    monkeypatch.setattr(sweep, "sweep_once", odd)
    monkeypatch.setattr(sweep, "check_tokens", odd)
    context = context_of(Store(), PlacementBoard())
    soon = replace(context, settings=replace(SETTINGS, secrets_period_s=0))
    sessions = SessionReconciler(soon, lambda _: None)
    work = [
        asyncio.ensure_future(each)
        for each in (sweep.sweep_ledgers(soon), sweep.watch_tokens(soon, sessions))
    ]
    async with asyncio.timeout(60):
        await twice.wait()
    assert not any(each.done() for each in work)
    for each in work:
        each.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    await context.routes.close()


def later_release(version: int, **meta: Any) -> RawObject:
    """As a newer release with a newer kind has it: after a rollback, or while the kinds are newer
    than the operator, as they are in each upgrade."""
    return {
        "metadata": {
            "name": "talk",
            "namespace": "default",
            "uid": "u",
            "resourceVersion": str(version),
            "finalizers": [SESSION_FINALIZER],
            **meta,
        },
        "spec": {"poolRef": {"name": "pool"}, "desiredState": "Dreaming"},
        "status": {
            "phase": "Dreaming",
            "units": 5,
            "placement": {"pod": "pod-a", "podUID": "uid-a", "fence": 3},
        },
    }


def test_a_session_that_cannot_be_read_can_be_deleted() -> None:
    """Else its finalizer would hold it, and its namespace, for ever."""
    assert read_session(later_release(5)) is None
    found = read_session(later_release(6, deletionTimestamp="2026-01-02T03:04:05Z"))
    assert found is not None
    assert found.meta.deleting
    assert found.pool_key == POOL
    assert found.status.placement is not None
    assert (found.status.placement.fence, found.status.phase) == (3, None)
    worse = {**later_release(6, deletionTimestamp="2026-01-02T03:04:05Z"), "spec": {"poolRef": 5}}
    assert read_session(worse) is not None


@dataclass
class Refusing:
    """Whoever writes is late, and what is there instead cannot be read."""

    asked: int = 0

    async def patch(self, *_: Any, **__: Any) -> RawObject:
        self.asked += 1
        raise ConflictError(409, "Conflict", "the object has been modified")

    async def get(self, *_: Any) -> RawObject:
        self.asked += 1
        return later_release(9)


async def test_what_cannot_be_read_is_not_asked_for_again_and_again() -> None:
    store, api = Store(), Refusing()
    context = context_of(store, PlacementBoard(), api)
    sessions = SessionReconciler(context, lambda _: None)
    metadata = {"name": "talk", "namespace": "default", "uid": "u", "resourceVersion": "5"}
    found = read_session({"metadata": metadata, "spec": {"poolRef": {"name": "pool"}}})
    assert found is not None
    store.sessions.put(found)
    assert await sessions(found.meta.key) == RETRY_S
    assert api.asked == 2
    await context.routes.close()


def context_of(store: Store, board: PlacementBoard, api: Any = None) -> Context:
    dirty = DirtySet()
    return Context(
        SETTINGS,
        store,
        dirty,
        api,
        Fleet(store, dirty),
        board,
        Routes(SETTINGS.redis_url),
        Occupancy(store, api),
        Claims(store, SETTINGS.watches),
    )


async def test_a_priority_that_changes_counts_for_who_waits_already() -> None:
    store, board = Store(), PlacementBoard()
    poked: list[ObjectKey] = []
    context = context_of(store, board)
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
