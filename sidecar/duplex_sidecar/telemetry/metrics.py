"""Numbers of this process, through OTLP and on a Prometheus page, from the same instruments.

Labels are enums only: no session id and no free text, so that the number of series is bounded.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Final

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.bounded import finishes_within
from duplex_sidecar.telemetry.metric_export import (
    Labels,
    Measurements,
    MetricPusher,
    SharedReader,
)
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import resource_of

PROMETHEUS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

RECENT_UNITS: Final = 600
"""Units that the near-real-time ratio looks back on: 10 minutes of one session."""

_UNIT_MS: Final = (10, 25, 50, 80, 120, 180, 250, 300, 400, 500, 650, 800, 1000, 1500, 2500, 5000)
_STAGE_MS: Final = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 800, 1200, 2500, 5000)
_LEDGER_MS: Final = (0.25, 0.5, 1, 2, 3, 5, 8, 12, 20, 40, 80, 200, 1000, 5000)
_PACE: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Metrics:
    """The instruments of this process; every method costs microseconds and never waits."""

    def __init__(self, settings: TelemetrySettings) -> None:
        """Starts one background thread if there is an endpoint, none otherwise."""
        self._registry = CollectorRegistry()
        self._measurements = Measurements()
        self._note = self._measurements.note
        reader = SharedReader(self._registry, self._measurements)
        url = settings.signal_url("v1/metrics")
        self._provider = MeterProvider(
            metric_readers=[reader],
            resource=resource_of(settings),
            # Spans are passed explicitly here, so an exemplar would never find one.
            exemplar_filter=AlwaysOffExemplarFilter(),
            shutdown_on_exit=False,
        )
        self._pusher = None if url is None else MetricPusher(reader, url, settings)
        meter = self._provider.get_meter("duplex", settings.service_version)
        self._units = meter.create_counter(names.METRIC_UNITS, "{unit}", "Units by decision")
        self._unit_wall = meter.create_histogram(
            names.METRIC_UNIT_WALL,
            "ms",
            "Wall time of a unit, from its input to its last sound",
            explicit_bucket_boundaries_advisory=_UNIT_MS,
        )
        self._unit_pace = meter.create_histogram(
            names.METRIC_UNIT_PACE,
            "1",
            "Wall time of a unit over the time it covers; above 1 is slower than real time",
            explicit_bucket_boundaries_advisory=_PACE,
        )
        self._units_late = meter.create_counter(
            names.METRIC_UNITS_LATE, "{unit}", "Units slower than real time"
        )
        self._units_overdue = meter.create_gauge(
            names.METRIC_UNITS_OVERDUE,
            "{unit}",
            "Units under way for longer than the time they cover",
        )
        self._overdue = 0
        self.overdue(0)
        self._rebuilds = meter.create_counter(
            names.METRIC_REBUILDS, "{rebuild}", "Rebuilds of the Thinker's prompt by cause"
        )
        self._rebuild_time = meter.create_histogram(
            names.METRIC_REBUILD_TIME,
            "ms",
            "Time of a rebuild by cause",
            explicit_bucket_boundaries_advisory=_UNIT_MS,
        )
        self._stage_time = meter.create_histogram(
            names.METRIC_STAGE_TIME,
            "ms",
            "Time of a stage call",
            explicit_bucket_boundaries_advisory=_STAGE_MS,
        )
        self._stage_restarts = meter.create_counter(
            names.METRIC_STAGE_RESTARTS, "{restart}", "Restarts of a stage process"
        )
        self._sessions_live = meter.create_gauge(
            names.METRIC_SESSIONS_LIVE, "{session}", "Sessions that hold a slot"
        )
        self._ledger_time = meter.create_histogram(
            names.METRIC_LEDGER_TIME,
            "ms",
            "Time of a ledger call",
            explicit_bucket_boundaries_advisory=_LEDGER_MS,
        )
        self._ledger_reachable = meter.create_gauge(
            names.METRIC_LEDGER_REACHABLE, "1", "1 while the ledger answers, 0 while it does not"
        )
        self._epochs = meter.create_counter(
            names.METRIC_STAGE2_EPOCHS, "{epoch}", "Stage-2 epochs by cause"
        )
        self._refused = meter.create_counter(
            names.METRIC_ENVELOPES_REFUSED,
            "{envelope}",
            "Envelopes refused between stages by reason",
        )
        self._preemptions = meter.create_counter(
            names.METRIC_PREEMPTIONS,
            "{unit}",
            "Units that vLLM preempted itself; admission should leave it no reason to",
        )
        self._preempted: dict[names.StageName, int] = {}
        self._recent_in_time: deque[bool] = deque(maxlen=RECENT_UNITS)
        meter.create_observable_gauge(
            names.METRIC_NEAR_REAL_TIME,
            [self._observe_near_real_time],
            "1",
            f"Share of the last {RECENT_UNITS} units not slower than real time",
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A counter is there before its first case: an alert's rule sees a series from the start,
        and no rate misses the first step."""
        for decision in names.UnitDecision:
            for counter in (self._units, self._units_late):
                self._note(counter.add, 0, {names.UNIT_DECISION: decision.value})
        for rebuild in names.RebuildCause:
            self._note(self._rebuilds.add, 0, {names.WINDOW_CAUSE: rebuild.value})
        for epoch in names.EpochCause:
            self._note(self._epochs.add, 0, {names.STAGE2_CAUSE: epoch.value})
        for stage in names.StageName:
            self._note(self._stage_restarts.add, 0, {names.STAGE: stage.value})
        for engine in (names.StageName.THINKER, names.StageName.TALKER):
            self._note(self._preemptions.add, 0, {names.STAGE: engine.value})
        self.sessions_live(0)

    def unit(self, decision: names.UnitDecision, wall_ms: float, audio_ms: float) -> None:
        """A unit is done. `audio_ms` (> 0): length of the input it covers."""
        labels: Labels = {names.UNIT_DECISION: decision.value}
        self._note(self._units.add, 1, labels)
        self._note(self._unit_wall.record, wall_ms, labels)
        self._note(self._unit_pace.record, wall_ms / audio_ms, labels)
        in_time = wall_ms <= audio_ms
        if not in_time:
            self._note(self._units_late.add, 1, labels)
        self._recent_in_time.append(in_time)

    def overdue(self, more: int) -> None:
        """more: 1 when a unit under way has become late, -1 when such a one is over."""
        self._overdue += more
        self._units_overdue.set(self._overdue)

    def rebuild(self, cause: names.RebuildCause, elapsed_ms: float) -> None:
        labels: Labels = {names.WINDOW_CAUSE: cause.value}
        self._note(self._rebuilds.add, 1, labels)
        self._note(self._rebuild_time.record, elapsed_ms, labels)

    def stage_call(self, stage: names.StageName, elapsed_ms: float) -> None:
        self._note(self._stage_time.record, elapsed_ms, {names.STAGE: stage.value})

    def stage_restarted(self, stage: names.StageName) -> None:
        self._note(self._stage_restarts.add, 1, {names.STAGE: stage.value})

    def sessions_live(self, count: int) -> None:
        self._sessions_live.set(count)

    def ledger_call(self, call: names.LedgerCall, elapsed_ms: float) -> None:
        self._note(self._ledger_time.record, elapsed_ms, {names.LEDGER_CALL: call.value})

    def ledger_reachable(self, reachable: bool) -> None:
        self._ledger_reachable.set(int(reachable))

    @contextmanager
    def timed_ledger_call(self, call: names.LedgerCall) -> Generator[None]:
        """One that is refused or not answered counts nothing."""
        started = time.perf_counter()
        yield
        self.ledger_call(call, (time.perf_counter() - started) * 1000)

    def epoch(self, cause: names.EpochCause) -> None:
        self._note(self._epochs.add, 1, {names.STAGE2_CAUSE: cause.value})

    def envelope_refused(self, reason: str) -> None:
        """`reason`: a value of a closed list (contract section E, or a StageFault)."""
        self._note(self._refused.add, 1, {names.ENVELOPE_REASON: reason})

    def preemptions(self, stage: names.StageName, since_start: int) -> None:
        """since_start: of the stage's present process, as its health says."""
        before = self._preempted.get(stage, 0)
        # A smaller number is that of a new process.
        more = since_start - before if since_start >= before else since_start
        self._preempted[stage] = since_start
        self._note(self._preemptions.add, more, {names.STAGE: stage.value})

    def near_real_time_ratio(self) -> float:
        """Share of the recent units that were not slower than real time; 1.0 before any unit."""
        recent = tuple(self._recent_in_time)
        return sum(recent) / len(recent) if recent else 1.0

    def _observe_near_real_time(self, _options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(self.near_real_time_ratio())

    def prometheus_page(self) -> bytes:
        """The page for `/metrics`, of type PROMETHEUS_CONTENT_TYPE."""
        self._measurements.settle()
        return generate_latest(self._registry)

    def flush(self, timeout_ms: int) -> bool:
        """Export now. False: not taken in time. Blocks: call it in a thread from asyncio."""
        if self._pusher is None:
            return True
        return finishes_within(timeout_ms, self._pusher.push, "duplex-metric-flush")

    def close(self, timeout_ms: int) -> bool:
        """Export once more and stop. False: gave up after `timeout_ms`."""
        return finishes_within(timeout_ms, self._close, "duplex-metric-close")

    def _close(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        self._provider.shutdown()
