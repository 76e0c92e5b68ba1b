"""The bench's arithmetic: spreads, slopes, verdicts, exit status, and what its JSON looks like."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.__main__ import MEASURES, default_name, dump, would_lose
from tests.bench.client import Seen, quiet_at_end, script
from tests.bench.figures import Broken, Figure, Verdict, as_json, exit_status
from tests.bench.measure_memory import FILL_UNITS, at_rest
from tests.bench.measure_planner import CHECKED_S, check_sessions
from tests.bench.measure_profile import room_of, short_name
from tests.bench.measure_units import listens_only, rebuilt_full, speaks_whole
from tests.bench.processes import cpu_s, main_thread_cpu_s, memory
from tests.bench.stats import fit_line, median_slope, percentile, spread
from tests.bench.table import markdown

pytestmark = pytest.mark.unit

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def test_percentiles_lie_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0], 0.0) == 1.0
    assert percentile([1.0, 2.0, 3.0], 1.0) == 3.0
    assert percentile([10.0, 20.0], 0.95) == pytest.approx(19.5)
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_percentiles_refuse(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|not between"):
        percentile(samples, share)


@given(SAMPLES)
def test_a_spread_is_ordered_and_ignores_order(samples: list[float]) -> None:
    found = spread(samples)
    assert found is not None
    assert found.least <= found.p50 <= found.p95 <= found.p99 <= found.most
    assert found == spread(list(reversed(samples)))
    assert found.count == len(samples)


def test_a_run_of_some_measures_takes_the_place_of_no_others(tmp_path: Path) -> None:
    assert default_name(MEASURES) == "cpu-tiny"
    assert default_name(["kill", "units"]) == default_name(["units", "kill"]) == "units-kill"
    path = tmp_path / "some.json"
    assert would_lose(path, ["kill"]) == []
    path.write_text(json.dumps({"settings": {"measures": ["start", "units", "kill"]}}))
    assert would_lose(path, ["kill"]) == ["start", "units"]
    assert would_lose(path, MEASURES) == []


def test_no_samples_have_no_spread() -> None:
    assert spread([]) is None


@given(st.floats(-100, 100), st.floats(-1000, 1000), st.integers(3, 40))
def test_a_straight_line_is_found(slope: float, intercept: float, count: int) -> None:
    xs = [float(x) for x in range(count)]
    ys = [intercept + slope * x for x in xs]
    line = fit_line(xs, ys)
    assert line is not None
    assert line.slope == pytest.approx(slope, abs=1e-6)
    assert line.intercept == pytest.approx(intercept, abs=1e-4)
    assert line.low <= line.slope <= line.high
    assert median_slope(xs, ys) == pytest.approx(slope, abs=1e-6)


def test_the_interval_of_a_slope_is_student_s() -> None:
    line = fit_line([1, 2, 3, 4], [1.0, 3.0, 2.0, 4.0])
    assert line is not None
    assert line.slope == pytest.approx(0.8)
    # residual variance 0.9, sum of squares of x 5, t(2) = 4.30
    assert line.high - line.slope == pytest.approx(4.30 * (0.9 / 5) ** 0.5)


def test_lines_need_points() -> None:
    assert fit_line([1, 2], [1.0, 2.0]) is None
    assert fit_line([2, 2, 2], [1.0, 2.0, 3.0]) is None
    assert median_slope([2, 2], [1.0, 5.0]) is None
    assert median_slope([], []) is None
    for broken in (fit_line, median_slope):
        with pytest.raises(ValueError, match="1 x for 2 y"):
            broken([1], [1.0, 2.0])


def test_steps_do_not_look_like_growth() -> None:
    """One step of the allocator late in a run moves the fitted line, not the median slope."""
    xs = [float(x) for x in range(30)]
    ys = [100.0] * 24 + [1124.0] * 6
    line = fit_line(xs, ys)
    assert line is not None
    assert line.slope > 4
    assert median_slope(xs, ys) == 0.0


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (80.0, 80.0, Verdict.OK),
        (80.1, 80.0, Verdict.MISS),
        (None, 80.0, Verdict.NO_DATA),
        (None, None, Verdict.REPORTED),
        (9.0, None, Verdict.REPORTED),
    ],
)
def test_verdicts(value: float | None, at_most: float | None, verdict: Verdict) -> None:
    figure = Figure("a", value, "ms", at_most)
    assert figure.verdict is verdict
    assert as_json(figure)["verdict"] == verdict


@pytest.mark.parametrize(
    ("values", "broken", "strict", "status"),
    [
        ([1.0], [], True, 0),
        ([1.0, 3.0], [], False, 0),
        ([1.0, 3.0], [], True, 1),
        ([1.0, None], [], False, 2),
        ([1.0], ["kill"], False, 2),
        ([], [], False, 2),
    ],
)
def test_a_miss_fails_only_when_asked(
    values: list[float | None], broken: list[str], strict: bool, status: int
) -> None:
    figures = [Figure("a", value, "ms", 2.0) for value in values]
    assert exit_status(figures, broken, strict) == status


def seen(**facts: object) -> Seen:
    values: dict[str, object] = {
        "unit": 1,
        "decision": "listen",
        "client_ms": 50.0,
        "first_audio_ms": None,
        "server_ms": 40.0,
        "stage_ms": {"encoder": 10.0, "thinker": 25.0, "commit": 3.0},
        "rebuild_cause": None,
        "rebuild_ms": None,
        "window_tokens": 100,
        "tokens": 1,
        "audio_samples": 0,
        "turn": 0,
        "replica": "one",
    }
    return Seen(**(values | facts))  # pyright: ignore[reportArgumentType]


def test_units_are_told_apart_by_what_was_reported() -> None:
    assert listens_only(seen())
    assert not listens_only(seen(audio_samples=6_000))  # the end of the turn before
    assert speaks_whole(seen(decision="speak", audio_samples=24_000))
    assert not speaks_whole(seen(decision="speak", audio_samples=105_600))
    assert seen().stages_ms == 35.0


def test_a_window_is_full_near_its_longest_prompt() -> None:
    growing = [
        seen(window_tokens=tokens, rebuild_cause="slide", rebuild_ms=1.0)
        for tokens in (500, 899, 900, 950, 1000)
    ]
    others = [seen(window_tokens=4000), seen(window_tokens=1000, rebuild_cause="move")]
    assert [one.window_tokens for one in rebuilt_full(growing + others)] == [900, 950, 1000]
    assert rebuilt_full(others) == []


def test_the_script_goes_round_the_recording() -> None:
    speech = bytes(32_000) + b"\x01\x00" * 16_000 + bytes(100)
    units = script(speech, 5, frames=(b"a", b"b", b"c"), forced=True)
    assert [unit.pcm_s16le[:2] for unit in units] == [b"\0\0", b"\1\0", b"\0\0", b"\1\0", b"\0\0"]
    assert {len(unit.pcm_s16le) for unit in units} == {32_000}
    assert [unit.frames for unit in units] == [(b"a",), (b"b",), (b"c",), (b"a",), (b"b",)]
    assert [unit.force_listen for unit in units] == [True, False, True, False, True]
    assert not any(unit.force_listen or unit.frames for unit in script(speech, 5))
    with pytest.raises(Broken):
        script(bytes(31_999), 1)


def test_quiet_is_judged_at_the_end() -> None:
    loud, quiet = b"\x00\x20" * 12_800, bytes(6_400)
    assert quiet_at_end(loud + quiet)
    assert not quiet_at_end(bytes(25_600) + b"\x00\x20" * 3_200)


def test_profiles_name_no_place_of_the_machine() -> None:
    product = "/somewhere/sidecar/duplex_sidecar/session/unit.py"
    assert short_name(product) == "duplex_sidecar/session/unit.py"
    assert room_of(product, "run") == "session"
    assert room_of("/a/sidecar/duplex_sidecar/app.py", "run") == "app"
    library = "/somewhere/lib/python3.11/site-packages/redis/client.py"
    assert short_name(library) == "redis/client.py"
    assert room_of(library, "call") == "redis"
    assert short_name("/usr/lib/python3.11/asyncio/tasks.py") == "asyncio/tasks.py"
    assert room_of("/usr/lib/python3.11/json/decoder.py", "x") == "json"
    assert room_of("~", "<built-in method posix.read>").startswith("built-in")


def test_the_document_has_rows_on_one_line() -> None:
    document: dict[str, object] = {
        "rows": [[1, None, "a, b"], [2.5, True, "c [d]"]],
        "table": {"x": [], "y": [1, 2]},
        "objects": [{"n": 1}],
    }
    text = dump(document)
    assert json.loads(text) == document
    assert '[1, null, "a, b"]' in text
    assert '"y": [1, 2]' in text


def test_a_result_file_becomes_a_table() -> None:
    figures = [
        as_json(Figure("reported", None, "ms", note="n=0")),
        as_json(Figure("slowest", 1096.7, "ms", 1000.0)),
        as_json(Figure("planner", 6.0712, "us", 50.0)),
    ]
    conditions = {
        "machine": {"cpu": "Some CPU", "cores": 2},
        "load_before": [0.1, 0.2, 0.3],
        "load_after": [1.0, 0.5, 0.4],
    }
    text = markdown(
        {"date": "today", "revision": "abc+", "conditions": conditions, "figures": figures}
    )
    assert text.splitlines()[0].startswith("today, revision `abc+`, Some CPU, 2 cores, load 0.1")
    assert text.splitlines()[4:] == [
        "| slowest | 1097 ms | <= 1000 ms | MISS |  |",
        "| planner | 6.07 us | <= 50 us | ok |  |",
        "| reported | - ms |  |  | n=0 |",
    ]


def test_a_process_s_own_clock_and_memory() -> None:
    before = cpu_s(os.getpid())
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    assert 0.02 <= cpu_s(os.getpid()) - before < 5
    assert 0 < main_thread_cpu_s(os.getpid()) <= cpu_s(os.getpid()) + 0.01
    found = memory(os.getpid())
    assert 0 < found.own_kib <= found.pss_kib <= found.rss_kib


@pytest.mark.parametrize(
    ("engine_kib", "still"),
    [
        ((), False),
        ((100,), False),
        ((100, 100 + 5 * FILL_UNITS), False),
        ((100, 100 + 5 * FILL_UNITS, 100 + 8 * FILL_UNITS), True),
        ((100, 90), True),
    ],
)
def test_filling_ends_when_no_process_grows_any_more(
    engine_kib: tuple[int, ...], still: bool
) -> None:
    assert at_rest([{"sidecar": 70, "thinker engine": kib} for kib in engine_kib]) is still


def test_a_file_of_any_number_of_planner_sessions_is_checked(tmp_path: Path) -> None:
    """More than were recorded, and not a multiple of them."""
    report, took_s = check_sessions(tmp_path, 503)
    assert (report.cases, report.differences) == (503, ())
    assert 0 < took_s < CHECKED_S
