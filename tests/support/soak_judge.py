"""What a soak has to come to, so that it says something: how much must have happened, and whether
any process has grown. Pure.

A sidecar is looked at between cells, when it has no session. What its sessions fill while they live
(an owner keeps what it wrote in the last half minute) and the most that any fault made it take at
once stay with its heap, some 20 MiB, which takes about twenty cells. From then on it has to be
flat: not by the clock, but by the units that it served itself, since one that only stands ready
stays as it is. Faults that end sidecars let hardly any of them come so far, so the last third of a
soak does without these. All lives that are long enough are judged together, the longest ones also
one by one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from duplex_sidecar.history.verdict import Minimums
from tests.bench.stats import median_slope, percentile

FLAT_KIB_A_UNIT = 4.0
"""An eighth of one unit's PCM: nothing of a unit is kept."""
WARM_UP_UNITS = 720
"""Of twenty cells; `make bench BENCH=memory` fills a sidecar with as many before it judges."""
UNHURT_SHARE = 1 / 3
"""The last part of a soak, in which no fault ends a sidecar."""
LEAST_UNITS, LEAST_LOOKS = 108, 4
"""Behind the warm-up, of a life that is judged."""
LONE_LOOKS = 10
"""So many looks behind the warm-up, and a life is judged by itself, too."""
JUDGED_FROM_MINUTES = 30.0
"""A soak of this length says whether memory is flat; a shorter one may."""
LEDGER = "ledger"


@dataclass
class Life:
    """Memory of one process at rest, after each cell that it lived through. units: served by it
    until then."""

    units: list[float] = field(default_factory=list[float])
    kib: list[float] = field(default_factory=list[float])

    def look(self, units: float, kib: float) -> None:
        self.units.append(units)
        self.kib.append(kib)

    @property
    def settled(self) -> "Life":
        """From the end of its warm-up."""
        looks = zip(self.units, self.kib, strict=True)
        kept = [(units, kib) for units, kib in looks if units >= WARM_UP_UNITS]
        return Life([units for units, _ in kept], [kib for _, kib in kept])

    @property
    def is_judged(self) -> bool:
        settled = self.settled
        if len(set(settled.units)) < LEAST_LOOKS:
            return False
        return settled.units[-1] - settled.units[0] >= LEAST_UNITS

    @property
    def slope(self) -> float | None:
        """KiB a unit behind the warm-up. None: too short a life."""
        settled = self.settled
        return median_slope(settled.units, settled.kib) if self.is_judged else None


def pooled_slope(lives: Iterable[Life]) -> float | None:
    """KiB a unit: the median of the slopes between all pairs of looks at the same process, over
    all that are judged. None when none is."""
    slopes: list[float] = []
    for life in (life.settled for life in lives if life.is_judged):
        looks = list(zip(life.units, life.kib, strict=True))
        slopes += [
            (later_kib - kib) / (later - units)
            for number, (units, kib) in enumerate(looks)
            for later, later_kib in looks[number + 1 :]
            if later != units
        ]
    return percentile(slopes, 0.5) if slopes else None


def minimums(cells: int, units: int) -> Minimums:
    """What so many cells, drawn from the whole matrix, lead to at the very least. About half of
    what was seen: of 19 cells 13 takeovers, 15 refused writes, 5 redos, 5 resends."""
    return Minimums(
        acknowledged_units=units * 9 // 10,
        events=units,
        takeovers=cells // 3,
        refused_zombie_writes=cells // 4,
        redos=cells // 10,
        resends=cells // 10,
    )


def least_cells(minutes: float) -> int:
    """A cell takes a quarter of a minute, and ten at the very most (`LONGEST_CELL_S`)."""
    return max(1, int(minutes))


def memory_faults(lives: Mapping[str, Life], minutes: float) -> list[str]:
    """Sentences about what has grown, or was not judged though the soak was long enough. lives: of
    the sidecars by name, and of the ledger's server as `LEDGER`."""
    faults: list[str] = []
    sidecars = {name: life for name, life in lives.items() if name != LEDGER}
    found = {"all sidecars together": pooled_slope(sidecars.values())}
    found[LEDGER] = lives[LEDGER].slope if LEDGER in lives else None
    for name, slope in found.items():
        if slope is None and minutes >= JUDGED_FROM_MINUTES:
            faults.append(f"{name}: no process lived long enough to be judged")
    found |= {
        name: life.slope for name, life in sidecars.items() if len(life.settled.units) >= LONE_LOOKS
    }
    faults += [
        f"{name}: grows by {slope:.1f} KiB a unit"
        for name, slope in found.items()
        if slope is not None and slope > FLAT_KIB_A_UNIT
    ]
    return faults
