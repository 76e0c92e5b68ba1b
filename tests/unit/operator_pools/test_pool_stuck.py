"""Which pods count as stuck, and which as waiting: none is sent away only because the ledger is, or
was, away for all of them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from duplex_api.pool import PoolSpec
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.context import Context
from duplex_operator.decide.pods import PodState
from duplex_operator.fleet import PodFeed
from duplex_operator.objects import ObjectKey, PodObject, read_pod, timestamp
from duplex_operator.placements import PlacementBoard
from duplex_operator.pool_view import STUCK_MARGIN_MS, stuck_before, view_pods, without_ledger
from duplex_operator.store import Store

pytestmark = pytest.mark.unit

NOW_MS = 10_000_000
START_MS = 300_000


class Pod:
    """What this rule looks at."""

    def __init__(self, ready: bool, changed_ago_ms: int) -> None:
        self.ready = ready
        self.readiness_changed_ms = NOW_MS - changed_ago_ms


@pytest.mark.parametrize(
    ("pods", "stuck"),
    [
        ((), False),
        ((Pod(False, 3_600_000), Pod(False, 3_600_000)), False),
        # The ledger is back after an hour, and one pod has seen it first.
        ((Pod(False, 3_600_000), Pod(True, 1_000)), False),
        ((Pod(False, 3_600_000), Pod(True, STUCK_MARGIN_MS)), True),
    ],
)
def test_a_pod_is_stuck_only_while_others_have_long_been_ready(
    pods: tuple[Pod, ...], stuck: bool
) -> None:
    before_ms = stuck_before(cast("tuple[PodObject, ...]", pods), START_MS, NOW_MS)
    assert before_ms == (NOW_MS - START_MS - STUCK_MARGIN_MS if stuck else 0)


SPEC = resolve_pool(PoolSpec.model_validate({"checkpoint": {"path": "/m"}, "slots": 1}))
KEY = ObjectKey("default", "x")


def seen(name: str, *, ready: bool, feed: dict[str, Any] | None, changed_ago_ms: int) -> PodState:
    """The state of a running pod. feed: what its sidecar says; None: nothing yet."""
    changed = timestamp(NOW_MS - changed_ago_ms)
    answer = str(ready)
    pod = read_pod(
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                "resourceVersion": "1",
                "labels": {"duplex.dev/pool": "x"},
            },
            "status": {
                "phase": "Running",
                "conditions": [
                    {"type": "Ready", "status": answer, "lastTransitionTime": changed},
                ],
            },
        }
    )
    assert pod is not None
    told = None if feed is None else PodFeed(pod.meta.uid, pod.meta.key, KEY, True, True, **feed)
    fleet = SimpleNamespace(pod=lambda _: told, sessions_on=lambda _: {})
    context = cast(
        "Context",
        SimpleNamespace(store=Store(), fleet=fleet, board=PlacementBoard(), now_ms=lambda: NOW_MS),
    )
    away = told is not None and told.ledger_away and not told.suspect
    assert without_ledger(context, [pod]) == away
    (found,) = view_pods(context, SPEC, [pod], ())
    return found.state


@pytest.mark.parametrize(
    ("ready", "feed", "state"),
    [
        (True, {"ready": True}, PodState.READY),
        (True, {"ledger_away": True}, PodState.READY),  # the kubelet has not seen it yet
        (False, {"ledger_away": True}, PodState.WAITING),
        (False, {"ready": True}, PodState.WAITING),  # nor that it is back
        (False, {}, PodState.STARTING),  # a stage, say
        (False, {"ledger_away": True, "suspect": True}, PodState.STARTING),
        (False, None, PodState.STARTING),
    ],
)
def test_a_pod_without_the_ledger_waits(
    ready: bool, feed: dict[str, Any] | None, state: PodState
) -> None:
    assert seen("a", ready=ready, feed=feed, changed_ago_ms=3_600_000) is state
