"""Runs the test tiers one after another and says what each took.

python -m scripts.run_tests              unit, integration, client, fault, cluster in its short form
python -m scripts.run_tests unit fault   only these
python -m scripts.run_tests cluster      all of it
python -m scripts.run_tests --long       all of cluster, and the property tests with many more cases

The last line counts everything. Exits 1 if any test failed or a tier ran none. The tier `cluster`
wants a real Kubernetes cluster, whose programs are compiled while the others run. Where there can
be no cluster of nodes, the tests that need one do not run and are not counted; the last lines say
so, and on a CI machine that is a failure. The short form does not wait for the compiler, but on a
CI machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from scripts.cluster import API_PARTS, building_meanwhile, foreign_kubeconfig, why_not
from scripts.tiers import LONG_MARKER, LONG_PROFILE, PROFILE_VARIABLE, TIER_OF_FOLDER

ROOT = Path(__file__).resolve().parent.parent
FOLDER_OF_TIER = {tier: folder for folder, tier in TIER_OF_FOLDER.items()}
CLUSTER = "cluster"
TIERS = ("unit", "integration", "client", "fault", CLUSTER)
"""The last one wants root, or somebody's cluster."""

PYTEST = ("-m", "pytest", "-p", "scripts.tiers", "--durations=3")


@dataclass(frozen=True, slots=True)
class TierResult:
    tier: str
    seconds: float
    passed: int
    failed: int
    skipped: int
    exit_status: int

    @property
    def good(self) -> bool:
        return self.exit_status == 0 and self.failed == 0 and self.passed > 0

    def sentence(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        if self.good:
            return counts
        if self.passed + self.failed == 0:
            return f"{counts}: ran no test (pytest's exit status {self.exit_status})"
        return f"{counts} (pytest's exit status {self.exit_status})"


def run_tier(tier: str, environment: dict[str, str], selected: str) -> TierResult:
    """selected: a pytest expression of markers."""
    folder = ROOT / "tests" / FOLDER_OF_TIER[tier]
    print(f"\n=== {tier}: tests/{folder.name} ===", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ("-q", "-m", selected, f"--junitxml={report}")
        command = [sys.executable, *PYTEST, *options, str(folder)]
        exit_status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        counts = count_outcomes(report)
    return TierResult(tier, time.monotonic() - started, *counts, exit_status)


def count_outcomes(report: Path) -> tuple[int, int, int]:
    """Passed, failed, skipped. A test that passes and then fails in its teardown has failed."""
    if not report.is_file():
        return 0, 0, 0
    outcomes: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = (case.get("classname", ""), case.get("name", ""))
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes[name] = "failed"
        elif case.find("skipped") is not None:
            outcomes.setdefault(name, "skipped")
        else:
            outcomes.setdefault(name, "passed")
    values = list(outcomes.values())
    return values.count("passed"), values.count("failed"), values.count("skipped")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the test tiers.")
    parser.add_argument("tiers", nargs="*", help=f"default: {' '.join(TIERS)}, the last one short")
    parser.add_argument("--long", action="store_true", help="all of cluster; more random cases")
    arguments = parser.parse_args()
    tiers: Sequence[str] = arguments.tiers or TIERS
    unknown = [tier for tier in tiers if tier not in FOLDER_OF_TIER]
    if unknown:
        parser.error(f"unknown tier {unknown[0]!r}; there are {', '.join(FOLDER_OF_TIER)}")
    short = not (arguments.long or arguments.tiers)
    environment = dict(os.environ)
    # One thread a process: stages are many processes on few cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    if arguments.long:
        environment[PROFILE_VARIABLE] = LONG_PROFILE
    reason = why_not() if CLUSTER in tiers else None
    not_run = None if reason is None else f"the tests on nodes: {reason}"
    # While the other tiers wait for their own clocks.
    ahead = len(tiers) > 1 and CLUSTER in tiers and foreign_kubeconfig() is None
    parts = API_PARTS if reason else ()
    results: list[TierResult] = []
    with building_meanwhile(parts) if ahead else nullcontext() as building:
        for tier in tiers:
            late = building is not None and building.poll() is None
            if tier == CLUSTER and short and late and os.environ.get("CI") != "true":
                not_run = (
                    "its programs are still being compiled; `make test-cluster` waits for them"
                )
                continue
            results.append(
                run_tier(tier, environment, f"{tier} and not {LONG_MARKER}" if short else tier)
            )
    lines, good = closing(results, not_run)
    print("\n".join(("", *lines)))
    return 0 if good else 1


def closing(results: Sequence[TierResult], not_run: str | None) -> tuple[list[str], bool]:
    """The last lines, and whether all is good. not_run: what of the tier `cluster`, and why."""
    lines = ["tier           seconds"]
    lines += [f"{each.tier:14} {each.seconds:7.1f}  {each.sentence()}" for each in results]
    bad = [each.tier for each in results if not each.good]
    if bad:
        lines.append(f"not good: {', '.join(bad)}")
    elif not_run is None:
        lines.append("all tiers good")
    if not_run is not None:
        lines.append(f"cluster: NOT RUN, and not counted: {not_run}")
    passed = sum(each.passed for each in results)
    failed = sum(each.failed for each in results)
    skipped = sum(each.skipped for each in results)
    return [*lines, "", f"{passed} passed, {failed} failed, {skipped} skipped"], not bad


if __name__ == "__main__":
    sys.exit(main())
