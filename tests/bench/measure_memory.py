"""Memory over many units in each window mode: does any process of the tree grow?

An engine's pool of cache blocks is there from the start, but a page of it counts only once it has
been written to, and blocks are used in turn. Rebuilds go round the pool quickest, so sessions of
those come first and are not judged: as many as it takes until nothing of the tree grows. A session
too fills what is bounded in it: its owner keeps what it wrote in the last half minute, for a ledger
that loses its tail. It is judged from then on.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.repair import KEPT_MS
from tests.bench.figures import Figure
from tests.bench.measure_start import memory_table, tree_figure
from tests.bench.processes import memory, memory_by_role
from tests.bench.rig import Rig, Scenario, root_process
from tests.bench.scenarios import BASIC, CONTEXT, OFF, Run, converse
from tests.bench.stats import fit_line, median_slope

FLAT_KIB_A_UNIT = 4.0
"""Steps of the allocator aside, below an eighth of one unit's PCM: nothing of a unit is kept."""
FILL_UNITS = 700
"""Of each session before the first that is judged: somewhat longer than what is judged of one."""
FULL_S = KEPT_MS / 1000 + 5
"""A session of this age has filled what is bounded in it."""
JUDGED_UNITS, UNTIL_FULL_UNITS = 600, 400
OFF_UNITS = 2_000
"""Sessions without a window end at the model's length: only the last third of each is judged."""
LOOKS = 5
"""A look may fall into the middle of a unit and see what that unit works in (20 MiB in a vocoder);
what a process keeps is the least of so many."""
MAX_FILLS = 6
"""What has not come to rest after these is judged as it is."""


Look = tuple[int, Mapping[str, int], int]
"""The unit, `Memory.own_kib` by role, that of the ledger's server."""


@dataclass
class Track:
    """What each process kept at each of `units`, by role."""

    units: list[int] = field(default_factory=list[int])
    own_kib: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    ledger_kib: list[int] = field(default_factory=list[int])

    def add(self, looks: Sequence[Look]) -> None:
        """One point of it: of each process the least of these looks."""
        self.units.append(looks[-1][0])
        for role in looks[0][1]:
            self.own_kib.setdefault(role, []).append(
                min(seen[role] for _, seen, _ in looks if role in seen)
            )
        self.ledger_kib.append(min(kib for _, _, kib in looks))


def measure_memory(rig: Rig, sidecar: LocalSidecar) -> tuple[list[Figure], dict[str, object]]:
    """Raises Broken."""
    units, full_s, every = (
        (60, 1.5, 1) if rig.quick else (UNTIL_FULL_UNITS + JUDGED_UNITS, FULL_S, 3)
    )
    figures: list[Figure] = []
    fills = [] if rig.quick else _fill(rig, sidecar)
    data: dict[str, object] = {
        "fill_units": FILL_UNITS,
        "fills_own_kib": fills,
        "units": units,
        "judged_from_s": full_s,
    }
    for scenario in (CONTEXT, BASIC, OFF):
        long = scenario is OFF and not rig.quick
        track, run = _follow(rig, sidecar, scenario, OFF_UNITS if long else units, full_s, every)
        figures += _slopes(scenario.name, track, judge_stages=bool(fills))
        if scenario is OFF:
            kept = "off: the sidecar keeps of the window"
            figures += [
                Figure(f"{kept}, units", float(run.retained_units), "", 0.0),
                Figure(f"{kept}, bytes of rows", float(run.retained_row_bytes), "", 0.0),
            ]
        data[scenario.name] = {
            "units": track.units,
            "own_kib": track.own_kib,
            "ledger_own_kib": track.ledger_kib,
            "sessions": run.sessions,
            "retained_units": run.retained_units,
            "retained_row_bytes": run.retained_row_bytes,
        }
    table = memory_by_role(root_process(sidecar))
    figures.append(tree_figure("process tree after all of this, PSS", table))
    data["after"] = memory_table(table)
    return figures, data


def _fill(rig: Rig, sidecar: LocalSidecar) -> list[dict[str, int]]:
    """Sessions until the processes have come to rest. Returns `Memory.own_kib` by role before the
    first and after each."""
    root = root_process(sidecar)

    def own_kib() -> dict[str, int]:
        return {role: one.own_kib for role, one in memory_by_role(root).items()}

    seen = [own_kib()]
    while len(seen) <= MAX_FILLS and not at_rest(seen):
        converse(rig, sidecar, CONTEXT, FILL_UNITS)
        seen.append(own_kib())
    return seen


def at_rest(own_kib: Sequence[Mapping[str, int]]) -> bool:
    """Whether no process has grown by more than is allowed from the last but one look, FILL_UNITS
    ago, to the last one. Pure."""
    if len(own_kib) < 2:
        return False
    before, now = own_kib[-2:]
    return all(
        kib - before.get(role, 0) <= FLAT_KIB_A_UNIT * FILL_UNITS for role, kib in now.items()
    )


def _follow(
    rig: Rig, sidecar: LocalSidecar, scenario: Scenario, units: int, full_s: float, every: int
) -> tuple[Track, Run]:
    """Memory at every few units of a session that is full_s old, the least of `LOOKS` looks each,
    and the conversation itself."""
    root = root_process(sidecar)
    track = Track()
    began_s = 0.0

    def look(number: int, seq: int) -> None:
        nonlocal began_s
        began_s = time.monotonic() if seq == 1 else began_s
        if time.monotonic() - began_s < full_s or number % every:
            return
        seen = {role: one.own_kib for role, one in memory_by_role(root).items()}
        ledger_kib = 0 if rig.valkey.pid is None else memory(rig.valkey.pid).own_kib
        looks.append((number, seen, ledger_kib))
        if len(looks) == LOOKS:
            track.add(looks)
            looks.clear()

    looks: list[Look] = []
    return track, converse(rig, sidecar, scenario, units, on_unit=look)


def _slopes(mode: str, track: Track, judge_stages: bool) -> list[Figure]:
    """KiB that a process grows by with each unit: the sidecar and each stage with its engine.
    judge_stages: their pools are full, so that they have to be flat too."""
    figures: list[Figure] = []
    xs = [float(unit) for unit in track.units]
    for role, values in track.own_kib.items():
        ys = [float(value) for value in values]
        if role.endswith("helper") or len(ys) != len(xs):
            continue
        line = fit_line(xs, ys)
        note = "" if line is None else f"least squares {line.low:.1f} to {line.high:.1f}"
        grown = f"{ys[0] / 1024:.0f} to {ys[-1] / 1024:.0f} MiB"
        figures.append(
            Figure(
                f"{mode}: {role} grows by, each unit",
                median_slope(xs, ys),
                "KiB",
                FLAT_KIB_A_UNIT if judge_stages or role == "sidecar" else None,
                ", ".join(part for part in (grown, note) if part),
            )
        )
    return figures
