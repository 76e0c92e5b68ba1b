"""Every queue has its turn, whoever else has news."""

from dataclasses import dataclass, field

import pytest

from duplex_operator.decide.placement import Waiting
from duplex_operator.fleet import Fleet, PodFeed
from duplex_operator.objects import ObjectKey, read_pod
from duplex_operator.placements import PlacementBoard
from duplex_operator.placer import PERIOD_S, Placer
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit

QUIET, NOISY = ObjectKey("default", "quiet"), ObjectKey("default", "noisy")
GRUDGE_S = 2.0


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rig:
    """One pod of the quiet pool, and a placer over it."""

    clock: Clock = field(default_factory=Clock)
    store: Store = field(default_factory=Store)
    board: PlacementBoard = field(default_factory=PlacementBoard)

    def __post_init__(self) -> None:
        dirty = DirtySet(self.clock)
        fleet = _Fleet(self.store, dirty)
        self.placer = Placer(self.store, fleet, self.board, dirty, self.clock)
        pod = read_pod(
            {
                "metadata": {
                    "name": "pod-a",
                    "namespace": "default",
                    "uid": "uid-a",
                    "resourceVersion": "1",
                    "labels": {"duplex.dev/pool": "quiet"},
                }
            }
        )
        assert pod is not None
        self.store.pods.put(pod)


class _Fleet(Fleet):
    """Each pod is ready and has one slot."""

    def pod(self, pod_uid: str) -> PodFeed:
        key = ObjectKey("default", "pod-a")
        return PodFeed(pod_uid, key, QUIET, connected=True, listed=True, ready=True, slots=1)


def test_a_quiet_pool_does_not_starve_beside_a_noisy_one() -> None:
    rig = Rig()
    rig.board.ask(QUIET, Waiting("a", 0, 1))
    rig.board.refuse("uid-a", until_s=GRUDGE_S)
    rig.placer.poke(QUIET)
    rig.placer.turn()
    assert rig.board.promised("a") is None
    while rig.clock.now_s < GRUDGE_S + PERIOD_S:
        # The other pool has news all the time, so nobody ever waits a whole period for some.
        rig.clock.now_s += PERIOD_S / 4
        rig.placer.poke(NOISY)
        rig.placer.turn()
    promise = rig.board.promised("a")
    assert promise is not None
    assert promise.pod == "pod-a"


def test_news_are_served_at_once() -> None:
    rig = Rig()
    rig.placer.turn()
    rig.board.ask(QUIET, Waiting("a", 0, 1))
    rig.placer.turn()
    assert rig.board.promised("a") is None
    rig.placer.poke(QUIET)
    rig.placer.turn()
    assert rig.board.promised("a") is not None
