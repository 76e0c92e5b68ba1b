"""What is gathered of one session, where nobody has to be asked."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from duplex_operator.context import Context
from duplex_operator.decide.facts import PodHealth
from duplex_operator.fleet import Fleet, PodFeed
from duplex_operator.objects import read_pod, read_session
from duplex_operator.observe import Known, Observer
from duplex_operator.placements import PlacementBoard
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit


def named(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "resourceVersion": "1",
    } | more


@pytest.mark.parametrize(
    ("pool", "health", "reason"),
    [("mine", PodHealth.UNHEARD, ""), ("theirs", PodHealth.DEAD, "ForeignPod")],
)
async def test_a_placement_on_another_pools_pod_is_none(
    pool: str, health: PodHealth, reason: str
) -> None:
    """Who may write a session's status could name any pod there."""
    store, dirty = Store(), DirtySet()
    fleet = Fleet(store, dirty)
    placement = {"pod": "pod-a", "podUID": "uid-pod-a", "fence": 1}
    session = read_session(
        {
            "metadata": named("talk"),
            "spec": {"poolRef": {"name": "mine"}},
            "status": {"phase": "Queued", "placement": placement},
        }
    )
    pod = read_pod(
        {
            "metadata": named("pod-a", labels={"duplex.dev/pool": pool}),
            "status": {"phase": "Running"},
        }
    )
    assert session is not None
    assert pod is not None
    store.sessions.put(session)
    store.pods.put(pod)
    context = SimpleNamespace(
        settings=OperatorSettings("redis://ledger", "duplex", "test"),
        store=store,
        fleet=fleet,
        board=PlacementBoard(),
        routes=None,
        now_ms=lambda: 1,
    )
    facts = await Observer(cast("Context", context)).facts(session, Known())
    assert facts.pod is not None
    assert (facts.pod.health, facts.pod.reason, facts.pod.proven) == (health, reason, False)
    await fleet.close()


@pytest.mark.parametrize(
    ("restarts", "health", "reason"),
    [(1, PodHealth.UNHEARD, ""), (2, PodHealth.DEAD, "SidecarEnded")],
)
async def test_a_container_that_has_ended_is_looked_at_by_its_number(
    restarts: int, health: PodHealth, reason: str
) -> None:
    """The sidecar was last heard of as the second restart: the object may tell of the first."""
    placement = {"pod": "pod-a", "podUID": "uid-pod-a", "fence": 1}
    session = read_session(
        {
            "metadata": named("talk"),
            "spec": {"poolRef": {"name": "mine"}},
            "status": {"phase": "Queued", "placement": placement},
        }
    )
    ended = {"terminated": {"reason": "Error"}}
    container = {"name": "duplex-sidecar", "restartCount": restarts, "state": ended}
    pod = read_pod(
        {
            "metadata": named("pod-a", labels={"duplex.dev/pool": "mine"}),
            "status": {"phase": "Running", "containerStatuses": [container]},
        }
    )
    assert session is not None
    assert pod is not None
    store = Store()
    store.sessions.put(session)
    store.pods.put(pod)
    feed = PodFeed("uid-pod-a", pod.meta.key, pod.pool, replica="uid-pod-a-2", restarts=2)
    context = SimpleNamespace(
        settings=OperatorSettings("redis://ledger", "duplex", "test"),
        store=store,
        fleet=SimpleNamespace(pod=lambda _: feed, session=lambda *_: None),
        board=PlacementBoard(),
        routes=None,
        now_ms=lambda: 1,
    )
    facts = await Observer(cast("Context", context)).facts(session, Known())
    assert facts.pod is not None
    assert (facts.pod.health, facts.pod.reason) == (health, reason)
