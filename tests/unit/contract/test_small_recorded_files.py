"""Files as anybody may write them: ids that come twice, cases that cannot be run, more fields than
the schema names, an end in the middle. What can be checked is checked, and the rest is told."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duplex_sidecar.cli.contract import check
from duplex_sidecar.contract import decode_cases
from duplex_sidecar.contract.check import KINDS, FileReport, check_file
from duplex_sidecar.contract.decode_cases import BATCH_ROWS
from duplex_sidecar.contract.types import ContractFileError

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).parent
LINES = (
    "planner_sessions",
    "layout_sessions",
    "decode_cases",
    "handoff_sessions",
    "talker_context_sessions",
    "producer_sessions",
    "consumer_sessions",
)
LISTS = {
    "window_config_cases": ("cases",),
    "framing_cases": ("cases", "context_cases"),
    "talker_steps": ("steps", "codec_repetition"),
}

Case = dict[str, Any]


def recorded(kind: str, count: int) -> list[Case]:
    """The first cases of a kind, the shortest ones first, so that many of them cost little."""
    with gzip.open(RECORDED / f"{kind}.jsonl.gz", "rt") as source:
        lines = sorted(source, key=len)
    return [json.loads(line) for line in lines[:count]]


def lists(kind: str) -> dict[str, list[Case]]:
    return json.loads((RECORDED / f"{kind}.json").read_text())


def checked(folder: Path, kind: str, cases: list[Case] | list[str]) -> FileReport:
    path = folder / f"{kind}_held.jsonl"
    texts = [case if isinstance(case, str) else json.dumps(case) for case in cases]
    path.write_text("".join(f"{text}\n" for text in texts))
    return check_file(path)


def checked_lists(folder: Path, kind: str, cases: dict[str, list[Case]]) -> FileReport:
    path = folder / f"{kind}_held.json"
    path.write_text(json.dumps(cases))
    return check_file(path)


# --- ids ------------------------------------------------------------------------------------------


def test_ids_that_come_twice_in_a_batch_are_two_cases(tmp_path: Path) -> None:
    """Sequences of different lengths and draws under one id, within one batch and across two."""
    cases = [{**case, "id": 7} for case in recorded("decode_cases", BATCH_ROWS + 3)]
    sampled = [case for case in cases if not case["sampling"]["greedy"]]
    assert len({len(case["units"][0]["rows"]) for case in sampled}) > 1
    report = checked(tmp_path, "decode_cases", cases)
    assert report.differences == ()
    assert report.cases == BATCH_ROWS + 3


@pytest.mark.parametrize("kind", [kind for kind in LINES if kind != "decode_cases"])
def test_ids_that_come_twice_are_two_cases(kind: str, tmp_path: Path) -> None:
    cases = [{**case, "id": "same"} for case in recorded(kind, 6)]
    report = checked(tmp_path, kind, cases)
    assert (report.differences, report.cases) == ((), 6)


@pytest.mark.parametrize("count", [1, BATCH_ROWS - 1, BATCH_ROWS, BATCH_ROWS + 1])
def test_every_sequence_is_checked_wherever_a_batch_ends(count: int, tmp_path: Path) -> None:
    cases = recorded("decode_cases", count)
    cases[-1]["units"][-1]["emitted"][-1] = 63
    report = checked(tmp_path, "decode_cases", cases)
    assert report.cases == count
    assert {difference.case for difference in report.differences} == {str(cases[-1]["id"])}


# --- cases that cannot be run ---------------------------------------------------------------------


def no_rows(case: Case) -> None:
    case["units"][0]["rows"] = []


def no_such_id(case: Case) -> None:
    case["units"][0]["rows"][0]["set"]["64"] = 1.0


def no_draws(case: Case) -> None:
    case["sampling"] = {"greedy": False, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    case["units"][0] |= {"uniforms": [], "force_listen": False, "is_speech": True}


def no_units(case: Case) -> None:
    del case["units"]


@pytest.mark.parametrize("spoil", [no_rows, no_such_id, no_draws, no_units])
@pytest.mark.parametrize("place", [0, 4, BATCH_ROWS - 1, BATCH_ROWS, BATCH_ROWS + 1])
def test_a_sequence_that_cannot_be_run_is_one_difference(
    spoil: Callable[[Case], None], place: int, tmp_path: Path
) -> None:
    cases = recorded("decode_cases", BATCH_ROWS + 2)
    spoil(cases[place])
    report = checked(tmp_path, "decode_cases", cases)
    assert report.cases == BATCH_ROWS + 2
    assert [difference.case for difference in report.differences] == [f"line {place + 1}"]


def test_sequences_that_cannot_be_run_together_alone_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that fails for many rows and for none alone is the product's fault, not a line's."""
    real = decode_cases.choose

    def choose_one(logits: Any, rows: Any, *others: Any) -> Any:
        if len(rows) > 1:
            raise RuntimeError("too many rows")
        return real(logits, rows, *others)

    monkeypatch.setattr(decode_cases, "choose", choose_one)
    report = checked(tmp_path, "decode_cases", recorded("decode_cases", 3))
    (difference,) = report.differences
    assert difference.case == "lines 1 to 3 together"
    assert "too many rows" in difference.actual


@pytest.mark.parametrize("line", ['{"id": 1', "[]", "{}", '{"id": 1}', "[" * 5000, '{"id": null}'])
@pytest.mark.parametrize("kind", LINES)
def test_a_line_that_is_no_case_is_one_difference(kind: str, line: str, tmp_path: Path) -> None:
    cases = [json.dumps(case) for case in recorded(kind, 4)]
    report = checked(tmp_path, kind, [*cases[:2], line, *cases[2:]])
    assert report.cases == 5
    assert [difference.case for difference in report.differences] == ["line 3"]
    assert check(report.path) == 1


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in LISTS.items() for key in keys]
)
def test_an_entry_that_is_no_case_is_one_difference(kind: str, key: str, tmp_path: Path) -> None:
    cases = {name: entries[:4] for name, entries in lists(kind).items() if name in LISTS[kind]}
    cases[key].insert(1, {"id": 1})
    report = checked_lists(tmp_path, kind, cases)
    assert report.cases == sum(map(len, cases.values()))
    assert [difference.case for difference in report.differences] == [f"{key} 1"]


def test_rows_of_unequal_length_and_an_unknown_kind_are_told_and_the_rest_is_checked(
    tmp_path: Path,
) -> None:
    cases = {key: lists("talker_steps")[key][:3] for key in LISTS["talker_steps"]}
    del cases["codec_repetition"][0]["expected"][0]
    cases["steps"][1]["kind"] = "encore"
    cases["codec_repetition"][2]["expected"][0] += 1
    report = checked_lists(tmp_path, "talker_steps", cases)
    assert [difference.case for difference in report.differences] == [
        "steps 1",
        "codec_repetition 0",
        f"repetition {cases['codec_repetition'][2]['id']}",
    ]


# --- more than the schema names -------------------------------------------------------------------


def with_more(value: object) -> object:
    """Every object with one field more."""
    if isinstance(value, dict):
        return {**{key: with_more(part) for key, part in value.items()}, "remark": [1]}
    return [with_more(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", [kind for kind in LINES if kind != "decode_cases"])
def test_unknown_fields_are_looked_over(kind: str, tmp_path: Path) -> None:
    report = checked(tmp_path, kind, [with_more(case) for case in recorded(kind, 5)])
    assert (report.differences, report.cases) == ((), 5)


def test_unknown_fields_of_sequences_are_looked_over(tmp_path: Path) -> None:
    """Not those of `set`: there a field is an id."""
    cases = recorded("decode_cases", 5)
    for case in cases:
        case["remark"] = 1
        for unit in case["units"]:
            unit["note"] = unit["state_after"]["note"] = "?"
    report = checked(tmp_path, "decode_cases", cases)
    assert (report.differences, report.cases) == ((), 5)


@pytest.mark.parametrize(("kind", "keys"), LISTS.items())
def test_unknown_fields_of_entries_are_looked_over(
    kind: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    cases = {key: lists(kind)[key][:20] for key in keys}
    for entries in cases.values():
        for entry in entries:
            entry["remark"] = 1
            if isinstance(entry.get("expected"), dict):
                entry["expected"]["note"] = "?"
                entry["expected"]["upstream_quirk"] = None
    report = checked_lists(tmp_path, kind, cases)
    assert report.differences == ()
    assert report.cases == sum(map(len, cases.values()))
    assert report.skipped_steps == 0


@pytest.mark.parametrize("kind", ["window_config_cases", "framing_cases"])
def test_what_is_marked_as_a_quirk_is_skipped_in_every_kind(kind: str, tmp_path: Path) -> None:
    cases = {key: lists(kind)[key][:3] for key in LISTS[kind]}
    for entries in cases.values():
        entries[1]["expected"] = {"upstream_quirk": "as it is"}
    report = checked_lists(tmp_path, kind, cases)
    assert (report.differences, report.skipped_steps) == ((), len(cases))


def test_an_action_that_differs_is_told_by_its_name(tmp_path: Path) -> None:
    """Also where the record has not the fields that the product's action has."""
    case = next(
        case
        for case in recorded("planner_sessions", 50)
        if case["expected"][0]["action"] == "extend" and len(case["expected"]) > 5
    )
    expected = case["expected"][0]
    for name in ("open_start_after", "retained_unit_lens", "prompt_len_after"):
        del expected[name]
    expected["action"] = "overflow"
    report = checked(tmp_path, "planner_sessions", [case])
    assert report.differences[0].where.endswith(".action")


# --- files without an end, without a case ---------------------------------------------------------


def test_a_file_that_ends_too_early_is_unusable_and_the_next_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (RECORDED / "producer_sessions.jsonl.gz").read_bytes()
    cut = tmp_path / "producer_sessions.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ContractFileError, match="cannot be read"):
        check_file(cut)
    assert check(cut, RECORDED / "talker_steps.json") == 2
    shown = capsys.readouterr()
    assert "talker_steps: 205 cases, 3673 comparisons: equal" in shown.out
    assert str(cut) in shown.err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_file_without_a_case_is_not_equal(kind: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}_held.{'jsonl' if kind in LINES else 'json'}{'.gz' * packed}"
    data = b"\n \n" if kind in LINES else b'{"other": []}'
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(ContractFileError, match="holds no case"):
        check_file(path)
    assert check(path) == 2
