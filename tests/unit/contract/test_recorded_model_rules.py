"""Recorded behaviour of decode, hand-off, Talker and stage 2, through `duplex contract check`."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duplex_sidecar.cli.contract import check
from duplex_sidecar.contract.check import KINDS, check_file
from duplex_sidecar.contract.files import kind_of
from duplex_sidecar.contract.types import ContractFileError

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).parent
SHARDS = {
    "decode_cases": 6,
    "handoff_sessions": 2,
    "talker_context_sessions": 1,
    "producer_sessions": 2,
    "consumer_sessions": 1,
}
CASES = {
    "decode_cases": 300,
    "handoff_sessions": 300,
    "talker_context_sessions": 200,
    "producer_sessions": 300,
    "consumer_sessions": 400,
}


def lines_of(kind: str) -> list[str]:
    with gzip.open(RECORDED / f"{kind}.jsonl.gz", "rt") as source:
        return source.readlines()


@pytest.mark.parametrize(
    ("kind", "shard"), [(kind, shard) for kind, shards in SHARDS.items() for shard in range(shards)]
)
def test_every_recorded_case_is_equal(kind: str, shard: int, tmp_path: Path) -> None:
    lines = lines_of(kind)
    assert len(lines) == CASES[kind]
    part = tmp_path / f"{kind}.jsonl"
    part.write_text("".join(lines[shard :: SHARDS[kind]]))
    shutil.copy(RECORDED / "decode_vocab.json", tmp_path)
    report = check_file(part)
    assert report.differences == ()
    assert report.cases == len(lines[shard :: SHARDS[kind]])
    assert report.comparisons > 10 * report.cases


def test_talker_steps_are_equal() -> None:
    report = check_file(RECORDED / "talker_steps.json")
    assert report.differences == ()
    assert report.cases == 205


def emitted_differs(case: dict[str, Any]) -> None:
    case["units"][0]["emitted"][0] = 40


def history_differs(case: dict[str, Any]) -> None:
    case["penalty_history_after"] = [*case["penalty_history_after"], 3]


def row_differs(case: dict[str, Any]) -> None:
    given = next(s for s in case["steps"] if s["expected"]["outcome"] == "handoff")
    given["expected"]["hidden_rows"][0] += 1


def length_differs(case: dict[str, Any]) -> None:
    case["steps"][0]["expected"]["prompt_len_after"] += 1


def chunk_differs(case: dict[str, Any]) -> None:
    given = next(s for s in case["steps"] if s["expected"])
    given["expected"]["seq"] += 1


def reason_differs(case: dict[str, Any]) -> None:
    case["steps"][0]["expected"]["reason"] = "stale_cache_epoch"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("decode_cases", emitted_differs),
        ("decode_cases", history_differs),
        ("handoff_sessions", row_differs),
        ("talker_context_sessions", length_differs),
        ("producer_sessions", chunk_differs),
        ("consumer_sessions", reason_differs),
    ],
)
def test_one_changed_value_is_a_difference(
    kind: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    case = json.loads(lines_of(kind)[0])
    change(case)
    path = tmp_path / f"{kind}_held.jsonl"
    path.write_text(json.dumps(case) + "\n")
    report = check_file(path)
    assert report.kind == kind
    assert report.differences
    assert check(path) == 1


def test_status_of_equal_files_is_0_and_the_report_names_the_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(RECORDED / "talker_steps.json") == 0
    assert "talker_steps: 205 cases, 3673 comparisons: equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("other_cases.json", b"{}", "unknown kind 'other_cases'"),
        ("talker_steps.json", b"[1, 2", "not in the schema"),
        ("producer_sessions.jsonl", b'{"id": 1}\n', "not in the schema"),
        ("producer_sessions.jsonl.gz", b"\x1f\x8bnot gzip", "cannot be read"),
    ],
)
def test_an_unusable_file_is_named(
    name: str, content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ContractFileError, match=problem):
        check_file(path)
    assert check(path) == 2
    assert problem in capsys.readouterr().err


def test_a_missing_file_and_no_file_are_unusable(tmp_path: Path) -> None:
    assert check(tmp_path / "decode_cases.jsonl") == 2
    assert check() == 2


def test_the_list_shows_every_kind_and_what_is_not_covered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(list_=True) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in KINDS)
    assert "Not covered" in shown


@pytest.mark.parametrize("name", ["a_cases.json", "a_cases_held.jsonl.gz", "a_cases.b.json"])
def test_the_kind_is_the_name_before_the_first_dot(name: str) -> None:
    assert kind_of(Path("somewhere.else") / name) == "a_cases"
