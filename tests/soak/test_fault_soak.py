"""Faults at random, one after another, on whole sidecars with real engines, for a set time: nothing
is lost or said twice, and neither a sidecar nor the ledger's server grows.

    make soak SOAK_MINUTES=5     (all of the soak)
    SOAK_MINUTES=5 python -m pytest -p scripts.tiers tests/soak/test_fault_soak.py

Every cell of the matrix has its turn before any comes again; which comes when is drawn, with
SOAK_SEED. `last_soak.json` beside this file says what happened.
"""

import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.sidecars import make_bed

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from support.fault_table import FAULTS, MOMENTS, Fault, Moment
from support.real_grounds import UNITS, Fleet, undisturbed_tokens

from duplex_sidecar.history.verdict import Counts, Report
from tests.bench.processes import memory
from tests.bench.stats import median_slope

MINUTES = float(os.environ.get("SOAK_MINUTES") or 120)
SEED = int(os.environ.get("SOAK_SEED") or 1)
LONGEST_CELL_S = 600
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(MINUTES * 60 + 4 * LONGEST_CELL_S),
]
REPORT = Path(__file__).with_name("last_soak.json")
FLAT_KIB_A_UNIT = 4.0
"""An eighth of one unit's PCM: nothing of a unit is kept."""
WARM_UP_CELLS = 3
LEAST_SAMPLES = 8
"""Of one process; one that lived shorter is not judged."""


@dataclass
class Track:
    """Memory of one process after each cell that it lived through: units served, KiB."""

    units: list[float] = field(default_factory=list[float])
    kib: list[float] = field(default_factory=list[float])

    def look(self, units: int, kib: float) -> None:
        self.units.append(units)
        self.kib.append(kib)

    @property
    def slope(self) -> float | None:
        """KiB a unit. None: too short a life."""
        units, kib = self.units[WARM_UP_CELLS:], self.kib[WARM_UP_CELLS:]
        return median_slope(units, kib) if len(units) >= LEAST_SAMPLES else None


@dataclass
class Soak:
    """What happened so far. longest_silence_s: of any client in any cell."""

    cells: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    reports: list[Report] = field(default_factory=list[Report])
    failed: list[str] = field(default_factory=list[str])
    tracks: dict[str, Track] = field(default_factory=dict[str, Track])
    units: int = 0

    def look(self, fleet: Fleet) -> None:
        """Sidecars by what is their own; the server by what it says that it uses."""
        for host in fleet.hosts:
            process = host.sidecar.process
            if not host.gone and process is not None:
                kib = float(memory(process.pid).own_kib)
                self.tracks.setdefault(host.name, Track()).look(self.units, kib)
        with Redis.from_url(fleet.bed.valkey.url) as client:
            used: Any = client.info("memory")
        self.tracks.setdefault("ledger", Track()).look(self.units, used["used_memory"] / 1024)

    def write(self, minutes: float) -> None:
        counts = Counts()
        for report in self.reports:
            counts = counts.plus(report.counts)
        slopes = {
            name: {
                "samples": len(track.kib),
                "first_kib": round(track.kib[0]),
                "last_kib": round(track.kib[-1]),
                "kib_a_unit": track.slope,
            }
            for name, track in self.tracks.items()
        }
        whole = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "minutes": round(minutes, 1),
            "seed": SEED,
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
            "memory": slopes,
        }
        REPORT.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def drawn(chance: random.Random) -> list[tuple[Fault, Moment]]:
    """Every cell once, in an order that is drawn."""
    cells = [(fault, moment) for fault in FAULTS if not fault.needs_replica for moment in MOMENTS]
    chance.shuffle(cells)
    return cells


async def one_cell(
    soak: Soak, fleet: Fleet, fault: Fault, moment: Moment, seed: int, folder: Path
) -> None:
    name = f"soak-{len(soak.reports)}"
    try:
        grounds = await fleet.hold(name, fault, moment, seed)
    except (AssertionError, TimeoutError) as error:
        soak.failed.append(f"{fault.name}-{moment.name}: {type(error).__name__}: {error}"[:300])
        raise
    report = grounds.report()
    soak.reports.append(report)
    soak.units += 2 * UNITS
    of_fault = soak.cells.setdefault(fault.name, {})
    of_fault[moment.name] = of_fault.get(moment.name, 0) + 1
    if report.violations:
        file = grounds.observer.write(folder / f"{name}.jsonl")
        soak.failed.append(f"{fault.name}-{moment.name}: {file}")
        raise AssertionError(f"{report.violations[:3]}: {file}")


async def test_faults_at_random(tiny_checkpoint: Path, tmp_path: Path) -> None:
    chance, soak = random.Random(SEED), Soak()
    bed = make_bed(tiny_checkpoint)
    began_s = time.monotonic()
    try:
        bed.valkey.start()
        async with Fleet(bed) as fleet:
            fleet.tokens = await undisturbed_tokens(fleet)
            began_s = time.monotonic()
            cells: list[tuple[Fault, Moment]] = []
            while time.monotonic() - began_s < MINUTES * 60:
                cells = cells or drawn(chance)
                await one_cell(soak, fleet, *cells.pop(), chance.randrange(1 << 16), tmp_path)
                soak.look(fleet)
    finally:
        soak.write((time.monotonic() - began_s) / 60)
        bed.close()
    assert soak.cells
    grown = {
        name: track.slope
        for name, track in soak.tracks.items()
        if track.slope is not None and track.slope > FLAT_KIB_A_UNIT
    }
    assert grown == {}, REPORT
