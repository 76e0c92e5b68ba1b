"""`duplex contract check` on a file far larger than the recorded one; the bench's `planner` has the
same figure."""

from pathlib import Path

import pytest

from tests.bench.measure_planner import CHECKED_S, CHECKED_SESSIONS, check_sessions

pytestmark = pytest.mark.soak


def test_20000_planner_sessions_take_at_most_two_minutes_of_one_core(tmp_path: Path) -> None:
    report, took_s = check_sessions(tmp_path, CHECKED_SESSIONS)
    print(f"{report.cases} sessions, {report.comparisons} comparisons, {took_s:.1f} s")
    assert (report.cases, report.differences) == (CHECKED_SESSIONS, ())
    assert took_s <= CHECKED_S
