"""A unit that takes longer than its second is seen while it is under way: pure, with the time
given. What the log says of it is bounded, and is numbers alone."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from duplex_sidecar.session.lateness import AGAIN_S, Lateness
from duplex_sidecar.session.watching import UnitWatch
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import SegmentReason, StepName
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

pytestmark = pytest.mark.unit
SETTINGS = TelemetrySettings(replica="r")


class Session:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.metrics = Metrics(SETTINGS)
        self.lateness = Lateness(self.metrics, self._clock_s)
        self._trace = Tracing(SETTINGS).session("s", None, SegmentReason.OPENED)

    def _clock_s(self) -> float:
        return self.now_s

    @contextmanager
    def unit(self, seq: int) -> Iterator[UnitWatch]:
        watch = UnitWatch(self._trace.unit(seq, 0, 1000.0), self.metrics, self._clock_s)
        with self.lateness.watched(seq, watch):
            yield watch

    def takes(self, seq: int, seconds: float) -> None:
        with self.unit(seq):
            self.now_s += seconds

    @property
    def overdue(self) -> str:
        page = self.metrics.prometheus_page().decode()
        (line,) = [line for line in page.splitlines() if line.startswith("duplex_units_overdue")]
        return line.rsplit(" ", 1)[1]


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.levelno == level]


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_unit_in_time_is_not_late(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    with session.unit(1):
        session.now_s += 1.0
        assert session.lateness.under_way_ms == pytest.approx(1000.0)
        assert not session.lateness.late
        assert not session.lateness.look()
    assert session.lateness.under_way_ms is None
    assert not session.lateness.late
    assert not caplog.records


def test_a_unit_that_hangs_is_late_at_once(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    with session.unit(7) as watch:
        with watch.step(StepName.ENCODE):
            session.now_s += 0.125
        with watch.step(StepName.THINKER):
            session.now_s += 1.0
            assert session.lateness.late
            assert session.lateness.look()
            assert not session.lateness.look()
            assert session.overdue == "1.0"
            (told,) = said(caplog, logging.WARNING)
            assert (told["total_ms"], told["in"]) == (1125.0, "thinker")
            assert told["thinker_ms"] == 1000.0
            assert told["late_units_untold"] == 0
            session.now_s += 6.0
    assert (session.lateness.late, session.overdue) == (False, "0.0")
    (told,) = said(caplog, logging.INFO)
    assert (told["total_ms"], told["in"]) == (7125.0, "")
    assert set(told) == {"total_ms", "in", "encoder_ms", "thinker_ms"}


def test_one_that_hangs_on_is_told_of_each_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    with session.unit(1):
        for _ in range(300):
            session.now_s += 0.25
            session.lateness.look()
    totals = [told["total_ms"] for told in said(caplog, logging.WARNING)]
    assert totals == [1250.0, 1250.0 + 1000 * AGAIN_S, 1250.0 + 2000 * AGAIN_S]


def test_one_that_nobody_looked_at_is_told_of_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = Session()
    session.takes(1, 1.1)
    (told,) = said(caplog, logging.WARNING)
    assert told["total_ms"] == 1100.0
    assert said(caplog, logging.INFO) == []
    assert session.overdue == "0.0"


def test_those_between_two_warnings_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    for seq in range(1, 30):
        session.takes(seq, 2.0)
    told = said(caplog, logging.WARNING)
    assert [each["late_units_untold"] for each in told] == [0, 14]


def test_a_unit_that_fails_is_no_longer_under_way() -> None:
    session = Session()
    with suppress(ValueError), session.unit(1):
        session.now_s += 2.0
        assert session.lateness.look()
        raise ValueError
    assert (session.lateness.under_way_ms, session.overdue) == (None, "0.0")


def test_a_step_that_failed_is_not_under_way() -> None:
    session = Session()
    with session.unit(1) as watch:
        with suppress(ValueError), watch.step(StepName.THINKER):
            session.now_s += 0.5
            assert watch.stage_ms_so_far == {"thinker": 500.0}
            raise ValueError
        assert (watch.in_steps, watch.stage_ms_so_far) == ("", {})
