"""Cells of the fault matrix on whole sidecars with real engines. In `make test-long` alone: a cell
takes up to a minute or two, since a killed sidecar has to be started again."""

import sys
import zlib
from pathlib import Path

import pytest
from support import last_run
from support.sidecars import make_bed
from support.valkeys import failing_pair

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from support.fault_table import FAULTS, MOMENTS
from support.real_grounds import Fleet, undisturbed_tokens

pytestmark = [pytest.mark.fault, pytest.mark.timeout(2_400)]

CELLS = (
    ("client-one-way", "speaking"),
    ("ledger-cut", "handing-over"),
    ("server-restart", "opening"),
    ("full-memory", "rebuilding"),
    ("stage-kill", "speaking"),
    ("oom-kill", "rebuilding"),
    ("sigterm", "parking"),
    ("sigstop", "speaking"),
    ("sigkill", "closing"),
)


async def hold_cells(checkpoint: Path, folder: Path) -> None:
    faults = {fault.name: fault for fault in FAULTS}
    moments = {moment.name: moment for moment in MOMENTS}
    bed = make_bed(checkpoint)
    try:
        bed.valkey.start()
        async with Fleet(bed) as fleet:
            fleet.tokens = await undisturbed_tokens(fleet)
            for fault, moment in CELLS:
                name = f"real-{fault}-{moment}"
                seed = zlib.crc32(name.encode())
                grounds = await fleet.hold(name, faults[fault], moments[moment], seed)
                report = grounds.report()
                last_run.add("fault_matrix_real", [report], cells={fault: {moment: 1}})
                file = grounds.observer.write(folder / f"{name}.jsonl")
                assert report.violations == (), file
    finally:
        bed.close()


async def hold_a_failover(checkpoint: Path, folder: Path) -> None:
    """On sidecars of its own, whose ledger has a replica."""
    fault = next(fault for fault in FAULTS if fault.needs_replica)
    moment = next(moment for moment in MOMENTS if moment.name == "speaking")
    bed = make_bed(checkpoint)
    try:
        with failing_pair(folder / "pair") as pair:
            async with Fleet(bed, pair) as fleet:
                fleet.tokens = await undisturbed_tokens(fleet)
                grounds = await fleet.hold("real-failover", fault, moment, 0)
                report = grounds.report()
                last_run.add("fault_matrix_real", [report], cells={fault.name: {moment.name: 1}})
                file = grounds.observer.write(folder / "real-failover.jsonl")
                assert report.violations == (), file
    finally:
        bed.close()


if last_run.is_long():

    async def test_the_cells_on_real_engines(tiny_checkpoint: Path, tmp_path: Path) -> None:
        await hold_cells(tiny_checkpoint, tmp_path)

    async def test_a_failover_on_real_engines(tiny_checkpoint: Path, tmp_path: Path) -> None:
        await hold_a_failover(tiny_checkpoint, tmp_path)
