"""What every reconciler is given. Made once, in `main`."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from duplex_operator.claims import Claims
from duplex_operator.fleet import Fleet
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.occupancy import Occupancy
from duplex_operator.placements import PlacementBoard
from duplex_operator.routes import Routes
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet


def wall_clock_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Context:
    """fleet: what the pods' sidecars say, and the calls to them. board: who waits for a slot.
    claims: which pools are another release's."""

    settings: OperatorSettings
    store: Store
    dirty: DirtySet
    api: KubernetesApi
    fleet: Fleet
    board: PlacementBoard
    routes: Routes
    occupancy: Occupancy
    claims: Claims
    now_ms: Callable[[], int] = wall_clock_ms
    monotonic_s: Callable[[], float] = time.monotonic
