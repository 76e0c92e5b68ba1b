"""python -m tests.bench: measures speed and memory on this machine.

Prints every figure with the target beside it and writes all of it as JSON, with the conditions. The
exit status is 0 when everything could be measured, 1 with --strict when a target was missed, 2 when
a measure is broken. Run it on a quiet machine: `conditions` in the JSON says what the load was.
"""

import argparse
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar, SidecarFailed
from tests.bench import conditions
from tests.bench.figures import Broken, Figure, as_json, exit_status, print_table
from tests.bench.measure_bytes import measure_bytes
from tests.bench.measure_demo import measure_demo
from tests.bench.measure_handover import measure_handover
from tests.bench.measure_kill import measure_kill
from tests.bench.measure_ledger import measure_ledger
from tests.bench.measure_memory import measure_memory
from tests.bench.measure_planner import measure_planner
from tests.bench.measure_profile import measure_profile
from tests.bench.measure_start import measure_start
from tests.bench.measure_units import measure_units
from tests.bench.revision import ROOT, revision
from tests.bench.rig import Rig

MEASURES = (
    "planner",
    "ledger",
    "bytes",
    "start",
    "units",
    "memory",
    "kill",
    "handover",
    "profile",
    "demo",
)
RESULTS = Path(__file__).resolve().parent / "results"
QUICK_RESULTS = ROOT / ".cache" / "bench"

Found = tuple[list[Figure], dict[str, object]]


@dataclass
class Results:
    """What has been found so far."""

    figures: list[Figure] = field(default_factory=list[Figure])
    data: dict[str, object] = field(default_factory=dict[str, object])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    broken: dict[str, str] = field(default_factory=dict[str, str])

    def take(self, name: str, measure: Callable[[], Found], console: Console) -> None:
        """Run one measure; what breaks it is noted, and the others go on."""
        began = time.monotonic()
        console.print(f"\n{name}", style="bold")
        try:
            figures, self.data[name] = measure()
            self.figures += figures
            print_table(console, figures)
        except Exception as error:
            if not isinstance(error, Broken | ApiError | SidecarFailed | OSError):
                traceback.print_exc()
            self.broken[name] = f"{type(error).__name__}: {error}"
            console.print(self.broken[name], style="red", markup=False)
        self.seconds[name] = round(time.monotonic() - began, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measure speed and memory.")
    parser.add_argument("measures", nargs="*", help=f"some of: {', '.join(MEASURES)}")
    parser.add_argument("--quick", action="store_true", help="fewer units: shows that it runs")
    parser.add_argument("--strict", action="store_true", help="a missed target is a failure")
    parser.add_argument("--name", help="of the result file (default: cpu-tiny, or the measures')")
    parser.add_argument("--checkpoint", type=Path, help="default: the tiny one, made if need be")
    arguments = parser.parse_args()
    chosen: list[str] = arguments.measures or list(MEASURES)
    if unknown := set(chosen) - set(MEASURES):
        parser.error(f"unknown measure {min(unknown)!r}; there are {', '.join(MEASURES)}")
    folder = QUICK_RESULTS if arguments.quick else RESULTS
    path = folder / f"{arguments.name or default_name(chosen)}.json"
    if lost := would_lose(path, chosen):
        parser.error(f"{path.name} also has figures of {', '.join(lost)}: choose another --name")
    console = Console(width=None if sys.stdout.isatty() else 160)
    before, began = conditions.load_average(), time.monotonic()
    # So that a `kill` or a timeout of this program leaves no sidecar behind.
    signal.signal(signal.SIGTERM, leave)
    results = Results()
    rig = Rig.prepare(arguments.checkpoint, arguments.quick)
    with rig:
        run(rig, chosen, results, console)
    document: dict[str, object] = {
        "date": conditions.now_utc(),
        "revision": revision(),
        "settings": {"quick": rig.quick, "measures": chosen, "forced_listens": rig.forced},
        "conditions": {
            "machine": conditions.machine(),
            "load_before": before,
            "load_after": conditions.load_average(),
            "seconds": {"all": round(time.monotonic() - began, 1)} | results.seconds,
            "versions": conditions.versions(),
            "checkpoint": conditions.checkpoint(rig.checkpoint),
        },
        "broken": results.broken,
        "figures": [as_json(figure) for figure in results.figures],
        "data": results.data,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(document))
    return conclude(results, path, console, arguments.strict)


def default_name(chosen: Sequence[str]) -> str:
    """Each set of measures has a file of its own, so that a run of some takes the place of no
    figure of others."""
    if set(chosen) == set(MEASURES):
        return "cpu-tiny"
    return "-".join(name for name in MEASURES if name in chosen)


def would_lose(path: Path, chosen: Sequence[str]) -> list[str]:
    """Measures of the file that a run of `chosen` would not have. A file has one run's conditions
    and revision, so nothing of two runs is put together."""
    if not path.exists():
        return []
    there: list[str] = json.loads(path.read_text())["settings"]["measures"]
    return [name for name in there if name not in chosen]


def leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def run(rig: Rig, chosen: list[str], results: Results, console: Console) -> None:
    """One warm sidecar serves `start`, `units` and `memory`, and is the first victim of `kill`."""
    if "planner" in chosen:
        results.take("planner", lambda: measure_planner(rig.quick), console)
    if "ledger" in chosen:
        results.take("ledger", lambda: measure_ledger(rig.quick), console)
    if "bytes" in chosen:
        results.take("bytes", lambda: measure_bytes(rig.quick), console)
    if set(chosen) & {"start", "units", "memory", "kill"}:
        with ExitStack() as stack:
            warm: list[LocalSidecar] = []

            def start() -> Found:
                sidecar, figures, data = measure_start(rig)
                stack.callback(sidecar.stop)
                warm.append(sidecar)
                return figures, data

            if "start" in chosen:
                results.take("start", start, console)
            else:
                sidecar, _ = rig.start_sidecar("warm")
                stack.callback(sidecar.stop)
                warm.append(sidecar)
            for name, measure in (
                ("units", measure_units),
                ("memory", measure_memory),
                ("kill", measure_kill),
            ):
                if name in chosen and warm:
                    results.take(name, lambda measure=measure: measure(rig, warm[0]), console)
    if "handover" in chosen:
        results.take("handover", lambda: measure_handover(rig), console)
    if "profile" in chosen:
        results.take("profile", lambda: measure_profile(rig), console)
    if "demo" in chosen:
        results.take("demo", lambda: measure_demo(rig), console)


def conclude(results: Results, path: Path, console: Console, strict: bool) -> int:
    aimed = [figure for figure in results.figures if figure.at_most is not None]
    missed = [figure for figure in aimed if figure.verdict == "MISS"]
    shown = path.relative_to(ROOT)
    console.print(
        f"\n{len(aimed) - len(missed)} of {len(aimed)} targets met, "
        f"{len(results.broken)} measures broken; all figures in {shown}",
        style="bold",
        highlight=False,
    )
    for figure in missed:
        console.print(f"  missed: {figure.name}", highlight=False, markup=False)
    return exit_status(results.figures, list(results.broken), strict)


def dump(document: Mapping[str, object]) -> str:
    """Readable JSON: a list of plain values is one line."""
    text = json.dumps(document, indent=1)
    return _FLAT_LIST.sub(lambda found: f"[{_LINE_BREAK.sub(' ', found[1])}]", text) + "\n"


_FLAT_LIST = re.compile(r"\[\n\s+([^][{}]*?)\n\s*\]")
_LINE_BREAK = re.compile(r"\n\s*")


if __name__ == "__main__":
    sys.exit(main())
