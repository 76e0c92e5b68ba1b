"""Memory over many units in each window mode: does any process of the tree grow?"""

from dataclasses import dataclass, field

from duplex_sidecar.client.local_sidecar import LocalSidecar
from tests.bench.figures import Figure
from tests.bench.measure_start import memory_table, tree_figure
from tests.bench.processes import memory, memory_by_role
from tests.bench.rig import Rig, Scenario, root_process
from tests.bench.scenarios import BASIC, CONTEXT, OFF, converse
from tests.bench.stats import fit_line, median_slope

FLAT_KIB_A_UNIT = 4.0
"""Steps of the allocator aside, below an eighth of one unit's PCM: nothing of a unit is kept."""


@dataclass
class _Track:
    """PSS in KiB by role, at each of `units`."""

    units: list[int] = field(default_factory=list[int])
    pss_kib: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    ledger_kib: list[int] = field(default_factory=list[int])


def measure_memory(rig: Rig, sidecar: LocalSidecar) -> tuple[list[Figure], dict[str, object]]:
    """Raises Broken."""
    units, warm_up, every = (80, 30, 5) if rig.quick else (600, 150, 15)
    figures: list[Figure] = []
    data: dict[str, object] = {"units": units, "warm_up": warm_up}
    for scenario in (OFF, BASIC, CONTEXT):
        track, retained, sessions = _follow(rig, sidecar, scenario, units, warm_up, every)
        figures += _slopes(scenario.name, track)
        if scenario is OFF:
            name = "off: units that the sidecar keeps of the window"
            figures.append(Figure(name, float(retained), "units", 0.0))
        data[scenario.name] = {
            "units": track.units,
            "pss_kib": track.pss_kib,
            "ledger_pss_kib": track.ledger_kib,
            "sessions": sessions,
        }
    table = memory_by_role(root_process(sidecar))
    figures.append(tree_figure("process tree after all of this, PSS", table))
    data["after"] = memory_table(table)
    return figures, data


def _follow(
    rig: Rig, sidecar: LocalSidecar, scenario: Scenario, units: int, warm_up: int, every: int
) -> tuple[_Track, int, int]:
    """(memory at every few units after the warm-up, retained units, sessions)."""
    root = root_process(sidecar)
    track = _Track()

    def look(number: int) -> None:
        if number < warm_up or number % every:
            return
        track.units.append(number)
        for role, one in memory_by_role(root).items():
            track.pss_kib.setdefault(role, []).append(one.pss_kib)
        if (pid := rig.valkey.pid) is not None:
            track.ledger_kib.append(memory(pid).pss_kib)

    run = converse(rig, sidecar, scenario, units, on_unit=look)
    return track, run.retained_units, run.sessions


def _slopes(mode: str, track: _Track) -> list[Figure]:
    """KiB that a process grows by with each unit: the sidecar and each stage with its engine."""
    figures: list[Figure] = []
    xs = [float(unit) for unit in track.units]
    for role, values in track.pss_kib.items():
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
                FLAT_KIB_A_UNIT,
                ", ".join(part for part in (grown, note) if part),
            )
        )
    return figures
