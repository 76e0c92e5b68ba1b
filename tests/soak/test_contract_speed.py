"""`duplex contract check` on a file far larger than the recorded one."""

import gzip
import time
from pathlib import Path

import pytest

from duplex_sidecar.contract.check import check_file

pytestmark = pytest.mark.soak

RECORDED = Path(__file__).parents[1] / "unit" / "contract" / "planner_sessions.jsonl.gz"
SESSIONS = 20_000
MOST_S = 120.0


def test_20000_planner_sessions_take_at_most_two_minutes_of_one_core(tmp_path: Path) -> None:
    with gzip.open(RECORDED) as source:
        recorded = source.readlines()
    large = tmp_path / "planner_sessions.jsonl"
    with large.open("wb") as file:
        for _ in range(SESSIONS // len(recorded)):
            file.writelines(recorded)
    before_s = time.process_time()
    report = check_file(large)
    took_s = time.process_time() - before_s
    print(f"{report.cases} sessions, {report.comparisons} comparisons, {took_s:.1f} s")
    assert (report.cases, report.differences) == (SESSIONS, ())
    assert took_s <= MOST_S
