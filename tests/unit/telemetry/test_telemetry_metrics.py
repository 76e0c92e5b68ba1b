"""Numbers on the Prometheus page: bounded series, enums as labels, one sample a series."""

import re

import pytest

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.settings import TelemetrySettings

pytestmark = pytest.mark.unit


def samples_of(metrics: Metrics) -> dict[str, float]:
    """Series (name and labels) -> value; fails on a series that is there twice."""
    lines = metrics.prometheus_page().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            assert series not in found
            found[series] = float(value)
    return found


def test_every_number_is_on_the_page() -> None:
    metrics = Metrics(TelemetrySettings(replica="r1"))
    metrics.unit(names.UnitDecision.LISTEN, 70.0, 1_000.0)
    metrics.unit(names.UnitDecision.SPEAK, 1_200.0, 1_000.0)
    metrics.rebuild(names.RebuildCause.SLIDE, 55.0)
    metrics.stage_call(names.StageName.TALKER, 68.0)
    metrics.stage_restarted(names.StageName.CODE2WAV)
    metrics.sessions_live(3)
    metrics.ledger_call(names.LedgerCall.COMMIT, 0.4)
    metrics.ledger_reachable(True)
    metrics.epoch(names.EpochCause.TURN_END)
    metrics.envelope_refused("stale_cache_epoch")
    samples = samples_of(metrics)
    for series, value in {
        'duplex_units_total{duplex_unit_decision="listen"}': 1,
        'duplex_unit_wall_milliseconds_bucket{duplex_unit_decision="listen",le="80"}': 1,
        'duplex_unit_wall_milliseconds_sum{duplex_unit_decision="speak"}': 1_200,
        'duplex_units_late_total{duplex_unit_decision="speak"}': 1,
        "duplex_units_near_real_time": 0.5,
        'duplex_window_rebuilds_total{duplex_window_cause="slide"}': 1,
        'duplex_window_rebuild_time_milliseconds_sum{duplex_window_cause="slide"}': 55,
        'duplex_stage_time_milliseconds_count{duplex_stage="talker"}': 1,
        'duplex_stage_restarts_total{duplex_stage="code2wav"}': 1,
        "duplex_sessions_live": 3,
        'duplex_ledger_time_milliseconds_sum{duplex_ledger_call="commit"}': 0.4,
        "duplex_ledger_reachable": 1,
        'duplex_stage2_epochs_total{duplex_stage2_cause="turn_end"}': 1,
        'duplex_envelopes_refused_total{duplex_envelope_reason="stale_cache_epoch"}': 1,
    }.items():
        assert samples[series] == pytest.approx(value), series


def test_counters_are_there_before_their_first_case() -> None:
    samples = samples_of(Metrics(TelemetrySettings(replica="r1")))
    for series in (
        'duplex_units_total{duplex_unit_decision="listen"}',
        'duplex_units_late_total{duplex_unit_decision="speak"}',
        'duplex_window_rebuilds_total{duplex_window_cause="move"}',
        'duplex_stage_restarts_total{duplex_stage="encoder"}',
        'duplex_stage2_epochs_total{duplex_stage2_cause="violation"}',
        'duplex_engine_preemptions_total{duplex_stage="thinker"}',
        "duplex_units_overdue",
        "duplex_sessions_live",
    ):
        assert samples[series] == 0, series


def test_series_do_not_grow_with_units_or_scrapes() -> None:
    metrics = Metrics(TelemetrySettings(replica="r1"))
    sizes: list[int] = []
    for _ in range(3):
        for _ in range(50):
            metrics.unit(names.UnitDecision.LISTEN, 70.0, 1_000.0)
        metrics.flush(1_000)
        sizes.append(len(samples_of(metrics)))
    assert sizes[0] == sizes[1] == sizes[2]
    assert samples_of(metrics)['duplex_units_total{duplex_unit_decision="listen"}'] == 150


def test_preemptions_count_on_over_the_restart_of_an_engine() -> None:
    metrics = Metrics(TelemetrySettings(replica="r1"))
    for since_start in (0, 2, 2, 1, 3):
        metrics.preemptions(names.StageName.THINKER, since_start)
    samples = samples_of(metrics)
    assert samples['duplex_engine_preemptions_total{duplex_stage="thinker"}'] == 5


def test_two_processes_worth_of_metrics_do_not_mix() -> None:
    one, other = (Metrics(TelemetrySettings(replica=r)) for r in ("r1", "r2"))
    one.sessions_live(1)
    assert samples_of(other)["duplex_sessions_live"] == 0
    assert 'service_instance_id="r2"' in other.prometheus_page().decode()


def test_near_real_time_looks_back_on_recent_units() -> None:
    metrics = Metrics(TelemetrySettings(replica="r1"))
    assert metrics.near_real_time_ratio() == 1.0
    for wall_ms in (900.0, 1_000.0, 1_000.1, 3_000.0):
        metrics.unit(names.UnitDecision.LISTEN, wall_ms, 1_000.0)
    assert metrics.near_real_time_ratio() == 0.5
    metrics.unit(names.UnitDecision.LISTEN, 1_900.0, 2_000.0)
    assert metrics.near_real_time_ratio() == 0.6
    for _ in range(600):
        metrics.unit(names.UnitDecision.LISTEN, 100.0, 1_000.0)
    assert metrics.near_real_time_ratio() == 1.0


def test_no_label_can_carry_a_session() -> None:
    metrics = Metrics(TelemetrySettings(replica="r1"))
    metrics.unit(names.UnitDecision.LISTEN, 70.0, 1_000.0)
    labels = set(re.findall(r'([a-z_0-9]+)="', metrics.prometheus_page().decode()))
    assert not {label for label in labels if "session" in label}
