"""Runs the test tiers one after another and says what each took.

python -m scripts.run_tests              unit, integration, client, fault
python -m scripts.run_tests unit fault   only these
python -m scripts.run_tests cluster      on a real Kubernetes cluster; not among the first four
python -m scripts.run_tests --long       the property tests with many more cases

The last line counts everything. Exits 1 if any test failed or a tier ran none. Where there can be
no cluster of nodes, the tests of the tier `cluster` that need one do not run; the last lines say
so, and on a CI machine that is a failure.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from scripts.cluster import why_not
from scripts.tiers import LONG_PROFILE, PROFILE_VARIABLE, TIER_OF_FOLDER

ROOT = Path(__file__).resolve().parent.parent
FOLDER_OF_TIER = {tier: folder for folder, tier in TIER_OF_FOLDER.items()}
TIERS = ("unit", "integration", "client", "fault")
"""What needs one machine and nothing else."""

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


def run_tier(tier: str, environment: dict[str, str]) -> TierResult:
    folder = ROOT / "tests" / FOLDER_OF_TIER[tier]
    print(f"\n=== {tier}: tests/{folder.name} ===", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, *PYTEST, "-q", "-m", tier, f"--junitxml={report}", str(folder)]
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
    parser.add_argument("tiers", nargs="*", default=TIERS, help=f"default: {' '.join(TIERS)}")
    parser.add_argument("--long", action="store_true", help="many more random cases")
    arguments = parser.parse_args()
    unknown = [tier for tier in arguments.tiers if tier not in FOLDER_OF_TIER]
    if unknown:
        parser.error(f"unknown tier {unknown[0]!r}; there are {', '.join(FOLDER_OF_TIER)}")
    environment = dict(os.environ)
    # One thread a process: stages are many processes on few cores.
    environment.setdefault("OMP_NUM_THREADS", "1")
    if arguments.long:
        environment[PROFILE_VARIABLE] = LONG_PROFILE
    results = [run_tier(tier, environment) for tier in arguments.tiers]
    print("\ntier           seconds")
    for result in results:
        print(f"{result.tier:14} {result.seconds:7.1f}  {result.sentence()}")
    reason = why_not() if "cluster" in arguments.tiers else None
    if reason is not None:
        print(f"cluster: NOT RUN are the tests on nodes: {reason}")
    passed = sum(result.passed for result in results)
    failed = sum(result.failed for result in results)
    skipped = sum(result.skipped for result in results)
    bad = [result.tier for result in results if not result.good]
    print(f"not good: {', '.join(bad)}" if bad else "all tiers good")
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
