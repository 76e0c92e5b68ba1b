"""The recorded behaviour of window options, planner and layout holds."""

import gzip
import json
from pathlib import Path

import pytest

from duplex_sidecar.contract.types import CaseResult
from duplex_sidecar.contract.window_cases import (
    check_layout_session,
    check_planner_session,
    check_window_config,
)

pytestmark = pytest.mark.unit

CONTRACT = Path(__file__).parents[1] / "contract"


def read_lines(name: str) -> list[dict]:
    with gzip.open(CONTRACT / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def assert_equal(results: list[CaseResult], cases: int, comparisons: int, skipped: int) -> None:
    assert [d for result in results for d in result.differences] == []
    assert len(results) == cases
    assert sum(result.comparisons for result in results) >= comparisons
    assert sum(result.skipped_steps for result in results) <= skipped


def test_window_options_equal_the_record() -> None:
    cases = json.loads((CONTRACT / "window_config_cases.json").read_text())["cases"]
    assert_equal([check_window_config(case) for case in cases], 200, 200, 0)


def test_planner_sessions_equal_the_record() -> None:
    sessions = read_lines("planner_sessions.jsonl.gz")
    assert_equal([check_planner_session(session) for session in sessions], 400, 88_000, 2)


def test_layout_sessions_equal_the_record() -> None:
    sessions = read_lines("layout_sessions.jsonl.gz")
    assert_equal([check_layout_session(session) for session in sessions], 150, 15_000, 4)


def test_a_changed_record_is_noticed() -> None:
    session = read_lines("planner_sessions.jsonl.gz")[0]
    session["expected"][10]["replacement_len"] += 1
    session["expected"][11]["retained_unit_lens"] = [14]
    where = [difference.where for difference in check_planner_session(session).differences]
    assert where == ["append 12.replacement_len", "append 13.retained_unit_lens"]


def test_a_changed_layout_is_noticed() -> None:
    session = read_lines("layout_sessions.jsonl.gz")[0]
    session["appends"][1]["expected"]["layout"][1][0] = 3
    where = [difference.where for difference in check_layout_session(session).differences]
    assert where == ["append 2.layout"]
