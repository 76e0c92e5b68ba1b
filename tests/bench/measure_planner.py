"""The planner alone, in this process: 600 retained units, each mode's dearest decision; and through
`duplex contract check`, a file of 20,000 recorded sessions."""

import gc
import gzip
import tempfile
import time
from pathlib import Path

from duplex_api.window import WindowBoundary, WindowMode
from duplex_sidecar.contract.check import FileReport, check_file
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.state import (
    Directive,
    PlanLimits,
    Rebuild,
    WindowAppend,
    WindowLayout,
    WindowState,
    WindowUnit,
)
from tests.bench.figures import Broken, Figure
from tests.bench.stats import percentile

RETAINED_UNITS = 600
UNIT_TOKENS = 20
PLANNER_US = 50.0
CHECKED_SESSIONS = 20_000
CHECKED_S = 120.0
RECORDED = Path(__file__).parents[1] / "unit" / "contract" / "planner_sessions.jsonl.gz"
LAYOUT = WindowLayout(
    context_tokens=90,
    prefix_tokens=80,
    suffix_tokens=10,
    marker_tokens=4,
    special_ids=frozenset(range(100)),
)
_UNITS_TOKENS = RETAINED_UNITS * UNIT_TOKENS
POLICIES = {
    "context, one unit leaves": WindowPolicy(WindowMode.CONTEXT, 8_000, 6_000, 500, RETAINED_UNITS),
    "basic, half of them leave": WindowPolicy(
        WindowMode.BASIC, _UNITS_TOKENS, _UNITS_TOKENS // 2, 500, 24
    ),
    "basic, none leaves": WindowPolicy(WindowMode.BASIC, 10 * _UNITS_TOKENS, 6_000, 500, 24),
}


def measure_planner(quick: bool) -> tuple[list[Figure], dict[str, object]]:
    calls = 2_000 if quick else 20_000
    figures: list[Figure] = []
    for name, policy in POLICIES.items():
        samples = _samples_us(policy, calls, slides="none" not in name)
        title = f"planner at {RETAINED_UNITS} units, {name}"
        figures += [
            Figure(f"{title}, p50", percentile(samples, 0.5), "us", PLANNER_US),
            Figure(f"{title}, p99", percentile(samples, 0.99), "us"),
        ]
    sessions = CHECKED_SESSIONS // 10 if quick else CHECKED_SESSIONS
    with tempfile.TemporaryDirectory() as folder:
        report, took_s = check_sessions(Path(folder), sessions)
    if report.cases != sessions or report.differences:
        raise Broken(f"{report.cases} sessions, {len(report.differences)} differences")
    title = f"contract check of {sessions:,} planner sessions, processor time"
    figures.append(Figure(title, took_s, "s", CHECKED_S, f"{report.comparisons:,} comparisons"))
    return figures, {
        "calls": calls,
        "retained_units": RETAINED_UNITS,
        "sessions": sessions,
        "comparisons": report.comparisons,
    }


def check_sessions(folder: Path, sessions: int) -> tuple[FileReport, float]:
    """What the check says of a file with so many sessions, the recorded ones again and again, and
    the seconds of one core that it takes."""
    with gzip.open(RECORDED) as source:
        recorded = source.readlines()
    large = folder / "planner_sessions.jsonl"
    with large.open("wb") as file:
        for start in range(0, sessions, len(recorded)):
            file.writelines(recorded[: sessions - start])
    before_s = time.process_time()
    report = check_file(large)
    return report, time.process_time() - before_s


def _samples_us(policy: WindowPolicy, calls: int, slides: bool) -> list[float]:
    spoken = tuple(range(1_000, 1_010))
    units = tuple(
        WindowUnit(seq, UNIT_TOKENS, spoken, WindowBoundary.UNIT)
        for seq in range(1, RETAINED_UNITS + 1)
    )
    tokens = LAYOUT.context_tokens + _UNITS_TOKENS
    state = WindowState(tokens + 13, tokens, units, _UNITS_TOKENS, tuple(range(2_000, 2_500)))
    append = WindowAppend(RETAINED_UNITS + 2, 13, spoken)
    limits, directive = PlanLimits(None), Directive()
    decision, _ = plan(state, append, policy, LAYOUT, limits, directive)
    if isinstance(decision, Rebuild) is not slides:
        raise Broken(f"the planner decided {type(decision).__name__}")
    samples: list[float] = []
    gc.collect()
    for _ in range(calls):
        began = time.perf_counter_ns()
        plan(state, append, policy, LAYOUT, limits, directive)
        samples.append((time.perf_counter_ns() - began) / 1000)
    return samples
