"""Faults at random, one after another, on whole sidecars with real engines, for a set time: nothing
is lost or said twice, and neither a sidecar nor the ledger's server grows.

    make soak SOAK_MINUTES=5     (all of the soak)
    SOAK_MINUTES=5 python -m pytest -p scripts.tiers tests/soak/test_fault_soak.py

Every cell of the matrix has its turn before any comes again; which comes when is drawn, with
SOAK_SEED. In the last third no sidecar is ended, so that memory can be judged. `last_soak.json`
beside this file says what happened, `last_failure.jsonl` what was seen of a cell that failed (for
`duplex history check`). With DUPLEX_KEEP_RUN=NAME the report is also kept as
`results/NAME.json`. What must have happened grows with the length, and from 30 minutes on memory
must have been judged (`support/soak_judge.py`).
"""

import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support import last_run
from support.sidecars import make_bed
from support.soak_judge import (
    LEDGER,
    UNHURT_SHARE,
    Life,
    least_cells,
    memory_faults,
    minimums,
    pooled_slope,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from support.fault_table import FAULTS, MOMENTS, Fault, Moment
from support.real_grounds import UNITS, Fleet, undisturbed_tokens

from duplex_sidecar.history.verdict import Counts, Report
from tests.bench.processes import memory

MINUTES = float(os.environ.get("SOAK_MINUTES") or 120)
SEED = int(os.environ.get("SOAK_SEED") or 1)
LONGEST_CELL_S = 600
ENDS_A_SIDECAR = frozenset({"sigkill", "sigterm"})
"""Names of faults."""
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(MINUTES * 60 + 4 * LONGEST_CELL_S),
]
REPORT = Path(__file__).with_name("last_soak.json")
HISTORY = Path(__file__).with_name("last_failure.jsonl")
"""Of the cell that failed: what it costs to see it again is more than it is large."""


@dataclass
class Soak:
    """What happened so far. longest_silence_s: of any client in any cell."""

    cells: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    reports: list[Report] = field(default_factory=list[Report])
    failed: list[str] = field(default_factory=list[str])
    lives: dict[str, Life] = field(default_factory=dict[str, Life])
    served: Counter[str] = field(default_factory=Counter[str])
    """Units that each replica has committed."""
    units: int = 0

    @property
    def counts(self) -> Counts:
        counts = Counts()
        for report in self.reports:
            counts = counts.plus(report.counts)
        return counts

    def look(self, fleet: Fleet) -> None:
        """Sidecars by what is their own; the server by what it says that it uses."""
        for host in fleet.hosts:
            process = host.sidecar.process
            if not host.gone and process is not None:
                kib = float(memory(process.pid).own_kib)
                self.lives.setdefault(host.name, Life()).look(self.served[host.name], kib)
        with Redis.from_url(fleet.bed.valkey.url) as client:
            used: Any = client.info("memory")
        self.lives.setdefault(LEDGER, Life()).look(self.units, used["used_memory"] / 1024)

    def write(self, minutes: float) -> None:
        counts = self.counts
        slopes = {
            name: {
                "samples": len(life.kib),
                "units": life.units,
                "kib": [round(kib) for kib in life.kib],
                "kib_a_unit": life.slope,
            }
            for name, life in self.lives.items()
        }
        sidecars = [life for name, life in self.lives.items() if name != LEDGER]
        whole: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "conditions": last_run.run_conditions(),
            "minutes": round(minutes, 1),
            "seed": SEED,
            "cells_held": len(self.reports),
            "cells": self.cells,
            "failed": self.failed,
            "units": self.units,
            "acknowledged_units": counts.acknowledged_units,
            "redos": counts.redos,
            "resends": counts.resends,
            "takeovers": counts.takeovers,
            "refused_zombie_writes": counts.refused_zombie_writes,
            "lost": sum(report.lost for report in self.reports),
            "duplicated": sum(report.duplicated for report in self.reports),
            "sidecars_judged": sum(life.is_judged for life in sidecars),
            "sidecars_kib_a_unit": pooled_slope(sidecars),
            "memory": slopes,
        }
        last_run.write_report(REPORT.parent, REPORT, whole)


def drawn(chance: random.Random, *, unhurt: bool) -> list[tuple[Fault, Moment]]:
    """Every cell once, in an order that is drawn. unhurt: but those that end a sidecar."""
    left_out = ENDS_A_SIDECAR if unhurt else frozenset[str]()
    faults = [one for one in FAULTS if not one.needs_replica and one.name not in left_out]
    cells = [(fault, moment) for fault in faults for moment in MOMENTS]
    chance.shuffle(cells)
    return cells


async def one_cell(soak: Soak, fleet: Fleet, fault: Fault, moment: Moment, seed: int) -> None:
    name = f"soak-{len(soak.reports)}"
    try:
        grounds = await fleet.hold(name, fault, moment, seed)
    except (AssertionError, TimeoutError) as error:
        soak.failed.append(f"{fault.name}-{moment.name}: {type(error).__name__}: {error}"[:300])
        raise
    report = grounds.report()
    soak.reports.append(report)
    soak.units += 2 * UNITS
    soak.served += grounds.served()
    of_fault = soak.cells.setdefault(fault.name, {})
    of_fault[moment.name] = of_fault.get(moment.name, 0) + 1
    if report.violations:
        file = grounds.observer.write(HISTORY)
        soak.failed.append(f"{fault.name}-{moment.name}: {file}")
        raise AssertionError(f"{report.violations[:3]}: {file}")


async def test_faults_at_random(tiny_checkpoint: Path) -> None:
    chance, soak = random.Random(SEED), Soak()
    bed = make_bed(tiny_checkpoint)
    began_s = time.monotonic()
    try:
        bed.valkey.start()
        async with Fleet(bed) as fleet:
            fleet.tokens = await undisturbed_tokens(fleet)
            began_s = time.monotonic()
            cells: list[tuple[Fault, Moment]] = []
            unhurt = False
            while (passed_s := time.monotonic() - began_s) < MINUTES * 60:
                if not unhurt and passed_s >= MINUTES * 60 * (1 - UNHURT_SHARE):
                    unhurt, cells = True, []
                cells = cells or drawn(chance, unhurt=unhurt)
                await one_cell(soak, fleet, *cells.pop(), chance.randrange(1 << 16))
                soak.look(fleet)
    finally:
        soak.write((time.monotonic() - began_s) / 60)
        bed.close()
    cells = len(soak.reports)
    assert cells >= least_cells(MINUTES), REPORT
    assert minimums(cells, soak.units).missing(soak.counts) == [], REPORT
    assert memory_faults(soak.lives, MINUTES) == [], REPORT
