"""`duplex checkpoint`: make one to try things with, or look at one."""

import time
from pathlib import Path
from typing import Literal

from cyclopts import App
from rich.console import Console
from rich.table import Table

from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.checkpoint.presets import Shape
from duplex_sidecar.cli.inputs import CheckpointPath, Count, OutputPath
from duplex_sidecar.cli.places import default_cache_dir

app = App(name="checkpoint", help="Make a checkpoint to try things with, or look at one.")

EXIT_INCOMPLETE = 1
EXIT_FAILED = 2


@app.command
def make(
    path: OutputPath,
    *,
    shape: Literal["tiny", "8b"] = "tiny",
    seed: Count = 0,
) -> int:
    """Make a checkpoint with the public names and random weights. The same one again is kept.

    Parameters
    ----------
    path
        Folder to make.
    shape
        tiny: holds a conversation on one CPU core, made in under a minute. 8b: the real shapes for
        measuring on a GPU (19 GB).
    seed
        Another seed gives other weights.
    """
    console = Console()
    began = time.monotonic()
    try:
        with console.status(f"making the {shape} checkpoint"):
            made = _make(path, Shape(shape), seed)
    except CheckpointError as error:
        console.print(str(error), style="red", markup=False)
        return EXIT_FAILED
    verdict = f"made in {time.monotonic() - began:.0f} s" if made else "was there already"
    console.print(f"{path}: {verdict}", highlight=False, markup=False)
    _print_behaviours(console, path)
    return 0


@app.command
def report(path: CheckpointPath) -> int:
    """List every tensor that is missing, unexpected or of another shape; nothing is loaded.

    The exit status is 0 when the checkpoint is complete, 1 when it is not, 2 when it has no usable
    config.json.

    Parameters
    ----------
    path
        Folder to look at.
    """
    from duplex_sidecar.checkpoint.report import describe, make_report

    console = Console()
    try:
        found = make_report(path)
    except CheckpointError as error:
        console.print(str(error), style="red", markup=False)
        return EXIT_FAILED
    for finding in found.findings:
        console.print(describe(finding), highlight=False, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    verdict = "complete" if found.complete else f"{len(found.findings)} findings"
    console.print(
        f"{found.path}: {found.tensors} tensors in {len(found.files)} files: {verdict}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _print_behaviours(console, path)
    return 0 if found.complete else EXIT_INCOMPLETE


def _make(path: Path, shape: Shape, seed: int) -> bool:
    # Imported late: both bring torch, which --help has no use for.
    if shape is Shape.TINY:
        from duplex_sidecar.checkpoint.tiny import make_tiny

        return make_tiny(path, seed, cache_dir=default_cache_dir())
    from duplex_sidecar.checkpoint.dummy8b import make_dummy8b

    return make_dummy8b(path, seed)


def _print_behaviours(console: Console, path: Path) -> None:
    """What the fitted readout did when it was made."""
    from duplex_sidecar.checkpoint.behaviour import read_behaviours

    behaviours = read_behaviours(path)
    if not behaviours:
        return
    table = Table(
        "rehearsal", "units", "listens", "speaks", "turn ends", "longest turn", "rebuilds", box=None
    )
    for each in behaviours:
        counts = (
            each.units,
            each.listens,
            each.speaks,
            each.turn_ends,
            each.longest_turn_units,
            each.rebuilds,
        )
        table.add_row(each.scene, *map(str, counts))
    console.print(table)
