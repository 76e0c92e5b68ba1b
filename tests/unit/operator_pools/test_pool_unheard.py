"""Right after an operator's start, or a change of its credentials, no feed has spoken yet: what a
pod has is not known, and nothing is done that an empty pod alone may suffer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duplex_api.pool import CheckpointChange, PoolSpec
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.context import Context
from duplex_operator.decide.pods import (
    DeletePod,
    PodDecision,
    PodState,
    PodView,
    PoolPlan,
    decide_pods,
)
from duplex_operator.decide.scaling import Wanted
from duplex_operator.feed import FeedPhase, FeedSession
from duplex_operator.fleet import PodFeed
from duplex_operator.names import ANNOTATION_MARK, ANNOTATION_MARKED_AT, LABEL_OCCUPIED, LABEL_POOL
from duplex_operator.objects import ObjectKey, read_pod, timestamp
from duplex_operator.placements import PlacementBoard
from duplex_operator.pool_view import is_occupied, sessions_of, view_pods
from duplex_operator.store import Store

pytestmark = pytest.mark.unit

NOW_MS = 10_000_000
SPEC = resolve_pool(PoolSpec.model_validate({"checkpoint": {"path": "/m"}, "slots": 1}))
KEY = ObjectKey("default", "x")
HEARD = PodFeed("uid-a", ObjectKey("default", "a"), KEY, dialled=True)
"""Dialled just now."""


def context_of(
    feed: PodFeed | None, *sessions: str, mark: str = "", ready: bool = False
) -> Context:
    """One pod that is labelled occupied, and on which no placement is. sessions: by its feed."""
    store = Store()
    changed = timestamp(NOW_MS - 3_600_000)
    pod = read_pod(
        {
            "metadata": {
                "name": "a",
                "namespace": "default",
                "uid": "uid-a",
                "resourceVersion": "1",
                "labels": {LABEL_POOL: "x", LABEL_OCCUPIED: "true"},
                "annotations": {ANNOTATION_MARK: mark, ANNOTATION_MARKED_AT: timestamp(NOW_MS)},
            },
            "status": {
                "phase": "Running",
                "conditions": [
                    {"type": "Ready", "status": str(ready), "lastTransitionTime": changed},
                ],
            },
        }
    )
    assert pod is not None
    store.pods.put(pod)
    said = {uid: FeedSession(session=uid, phase=FeedPhase.ACTIVE) for uid in sessions}
    fleet = SimpleNamespace(pod=lambda _: feed, sessions_on=lambda _: said)
    found: Any = SimpleNamespace(
        store=store, fleet=fleet, board=PlacementBoard(), now_ms=lambda: NOW_MS
    )
    return cast("Context", found)


def view(context: Context) -> PodView:
    pod = context.store.pod_by_uid("uid-a")
    assert pod is not None
    (found,) = view_pods(context, SPEC, [pod], ())
    return found


def decided(context: Context, template_hash: str) -> PodDecision:
    plan = PoolPlan(
        wanted=Wanted(2, only_empty=False, message="two"),
        template_hash=template_hash,
        checkpoint_hash="",
        checkpoint_change=CheckpointChange.FINISH,
        max_surge=0,
        drain_bound_ms=60_000,
    )
    return decide_pods(plan, [view(context)], NOW_MS)


def deleted(decision: PodDecision) -> bool:
    return any(isinstance(action, DeletePod) for action in decision.actions)


def test_it_keeps_its_label_until_it_has_told_of_its_sessions() -> None:
    assert is_occupied(context_of(HEARD), "uid-a")
    greeted = replace(HEARD, connected=True, draining=True)
    assert is_occupied(context_of(greeted), "uid-a")
    listed = replace(greeted, listed=True)
    assert is_occupied(context_of(listed, "talk"), "uid-a")
    assert not is_occupied(context_of(listed), "uid-a")
    assert not is_occupied(context_of(replace(HEARD, suspect=True)), "uid-a")
    assert not is_occupied(context_of(None), "uid-a")


def test_its_last_words_count_until_it_is_suspect() -> None:
    """Its feed is dialled anew with other credentials."""
    assert sessions_of(context_of(HEARD, "talk"), "uid-a") == {"talk"}
    assert sessions_of(context_of(replace(HEARD, suspect=True), "talk"), "uid-a") == set()


@pytest.mark.parametrize("mark", ["draining", "finishing"])
def test_a_marked_pod_is_not_deleted_before_it_has_told_of_its_sessions(mark: str) -> None:
    """With the ledger away it is not ready, and the session that it gives away is placed elsewhere
    already."""
    assert not deleted(decided(context_of(HEARD, mark=mark), ""))
    greeted = replace(HEARD, connected=True, draining=True, ready=True)
    assert not deleted(decided(context_of(greeted, mark=mark), ""))
    told = replace(greeted, listed=True)
    assert not deleted(decided(context_of(told, "talk", mark=mark), ""))
    assert deleted(decided(context_of(told, mark=mark), ""))


def test_a_roll_out_does_not_begin_with_pods_that_may_only_wait_for_the_ledger() -> None:
    assert view(context_of(HEARD)).state is PodState.WAITING
    assert not deleted(decided(context_of(HEARD), "new"))
    silent = context_of(replace(HEARD, suspect=True))
    assert view(silent).state is PodState.STARTING
    assert deleted(decided(silent, "new"))
