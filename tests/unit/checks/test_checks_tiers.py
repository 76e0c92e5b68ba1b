"""Every test belongs to the tier of its folder; a tier without tests is a failure."""

from pathlib import Path, PurePath

import pytest

from scripts.run_tests import TierResult, closing, count_outcomes
from scripts.tiers import wrong_tier

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("path", "markers", "says"),
    [
        ("tests/unit/window/test_a.py", {"unit", "asyncio"}, None),
        ("tests/faults/test_a.py", {"fault"}, None),
        ("tests/clients/test_a.py", set(), "needs the marker client, carries none"),
        ("tests/unit/test_a.py", {"integration"}, "needs the marker unit, carries integration"),
        ("tests/unit/test_a.py", {"integration", "unit"}, "carries integration, unit"),
        ("tests/test_a.py", {"unit"}, "tests live in"),
        ("sidecar/test_a.py", {"unit"}, "tests live in"),
    ],
)
def test_the_marker_is_the_folder_s(path: str, markers: set[str], says: str | None) -> None:
    found = wrong_tier(PurePath(path), markers)
    assert found is None if says is None else says in str(found)


def test_outcomes_are_counted_once_a_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="a" name="good"/>
        <testcase classname="a" name="bad"><failure/></testcase>
        <testcase classname="a" name="torn"/>
        <testcase classname="a" name="torn"><error/></testcase>
        <testcase classname="a" name="left"><skipped/></testcase>
        </testsuite></testsuites>"""
    )
    assert count_outcomes(report) == (1, 2, 1)
    assert count_outcomes(tmp_path / "absent.xml") == (0, 0, 0)


@pytest.mark.parametrize(
    ("passed", "failed", "exit_status", "good"),
    [(3, 0, 0, True), (0, 0, 5, False), (0, 0, 0, False), (3, 1, 1, False), (3, 0, 2, False)],
)
def test_a_tier_is_good_if_it_ran_and_nothing_failed(
    passed: int, failed: int, exit_status: int, good: bool
) -> None:
    result = TierResult("unit", 1.0, passed, failed, 0, exit_status)
    assert result.good is good
    assert ("ran no test" in result.sentence()) == (passed + failed == 0)


def test_the_last_line_counts_and_a_cluster_that_was_not_there_is_told_of() -> None:
    results = [TierResult("unit", 1.0, 3, 0, 1, 0), TierResult("cluster", 2.0, 2, 0, 0, 0)]
    lines, good = closing(results, None)
    assert (lines[-1], good) == ("5 passed, 0 failed, 1 skipped", True)
    assert "all tiers good" in lines
    lines, good = closing(results, "needs root")
    assert (lines[-1], good) == ("5 passed, 0 failed, 1 skipped", True)
    assert "all tiers good" not in lines
    assert lines[-3].startswith("cluster: NOT RUN, and not counted")
    # On a CI machine the tier's own pytest has failed for it.
    lines, good = closing([results[0], TierResult("cluster", 2.0, 2, 0, 0, 1)], "needs root")
    assert not good
    assert "not good: cluster" in lines
