"""A soak in which too little happened, or whose memory nobody could judge, is none."""

import pytest
from support.soak_judge import (
    FLAT_KIB_A_UNIT,
    JUDGED_FROM_MINUTES,
    LEDGER,
    WARM_UP_UNITS,
    Life,
    least_cells,
    memory_faults,
    minimums,
    pooled_slope,
)

from duplex_sidecar.history.verdict import Counts

pytestmark = pytest.mark.unit
CELL_UNITS = 36
WARM_UP_CELLS = WARM_UP_UNITS // CELL_UNITS


def life(cells: int, kib_a_unit: float = 0.0, *, step_kib: float = 9_000.0) -> Life:
    """cells: behind its warm-up, in which it takes its step; noise of 300 KiB up and down."""
    found = Life()
    for cell in range(WARM_UP_CELLS + cells):
        units = CELL_UNITS * (cell + 1)
        warm = min(1.0, units / WARM_UP_UNITS)
        kib = 70_000 + step_kib * warm + kib_a_unit * units
        found.look(units, kib + 300 * (-1) ** cell)
    return found


def test_flat_processes_are_flat_whatever_they_took_at_first() -> None:
    lives = {"real-1": life(6), "real-2": life(14), LEDGER: life(20, step_kib=0.0)}
    assert memory_faults(lives, JUDGED_FROM_MINUTES) == []


@pytest.mark.parametrize("who", ["sidecars", LEDGER])
def test_what_keeps_a_part_of_each_unit_is_found(who: str) -> None:
    grows = 3 * FLAT_KIB_A_UNIT
    sidecars = grows if who == "sidecars" else 0.0
    lives = {f"real-{n}": life(n, sidecars) for n in range(8)}
    lives[LEDGER] = life(40, grows if who == LEDGER else 0.0)
    faults = memory_faults(lives, JUDGED_FROM_MINUTES)
    assert [fault.partition(":")[0] for fault in faults] == [
        "all sidecars together" if who == "sidecars" else LEDGER
    ]


def test_one_that_grows_among_others_is_found_when_it_lives_long() -> None:
    lives = {f"real-{n}": life(7) for n in range(6)} | {LEDGER: life(40)}
    lives["real-6"] = life(12, 5 * FLAT_KIB_A_UNIT)
    faults = memory_faults(lives, JUDGED_FROM_MINUTES)
    assert [fault.partition(":")[0] for fault in faults] == ["real-6"]


def test_a_long_soak_in_which_nobody_was_judged_is_a_failure_and_a_short_one_is_not() -> None:
    lives = {"real-1": life(1), "real-2": life(0), LEDGER: life(2)}
    assert pooled_slope(lives.values()) is None
    assert memory_faults(lives, JUDGED_FROM_MINUTES - 1) == []
    assert len(memory_faults(lives, JUDGED_FROM_MINUTES)) == 2
    assert len(memory_faults({}, JUDGED_FROM_MINUTES)) == 2


def test_one_that_only_stands_ready_is_not_judged() -> None:
    idle = Life()
    for _ in range(30):
        idle.look(WARM_UP_UNITS, 70_000)
    assert not idle.is_judged
    assert pooled_slope([idle]) is None


def test_what_must_happen_grows_with_the_soak() -> None:
    nothing = Counts()
    seen = Counts(
        acknowledged_units=683,
        events=2_000,
        takeovers=13,
        refused_zombie_writes=15,
        redos=5,
        resends=5,
    )
    assert minimums(19, 684).missing(seen) == []
    assert len(minimums(19, 684).missing(nothing)) == 6
    assert len(minimums(400, 14_400).missing(seen)) == 6
    assert (least_cells(0.1), least_cells(120.0)) == (1, 120)
