"""One reader of the instruments for both ways out: the Prometheus page and OTLP.

With a reader each, every measurement would be aggregated twice.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import MetricsData
from prometheus_client import CollectorRegistry

from duplex_sidecar.telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

Labels = dict[str, str]
Record = Callable[[float, Labels], None]

MAX_UNSETTLED = 512
"""So many take two or three milliseconds."""


class Measurements:
    """Measurements of counters and histograms on their way into them. One by one, between the steps
    of a unit, each runs through code that has left the processor's caches meanwhile; hundreds in a
    row, when somebody wants to see the numbers, cost a fraction of that each."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Record, float, Labels]] = deque()

    def note(self, record: Record, value: float, labels: Labels) -> None:
        """record: the method of an instrument. labels: not changed afterwards."""
        self._waiting.append((record, value, labels))
        if len(self._waiting) >= MAX_UNSETTLED:
            self.settle()

    def settle(self) -> None:
        """Any thread may, two at once too: each measurement is taken by one of them."""
        while self._waiting:
            try:
                record, value, labels = self._waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            record(value, labels)


class SharedReader(PrometheusMetricReader):
    """The Prometheus page, and `snapshot` of the same cumulative numbers."""

    def __init__(self, registry: CollectorRegistry, measurements: Measurements) -> None:
        self._measurements = measurements
        super().__init__(scope_info_enabled=False, registry=registry)
        # Of the thread that takes a snapshot: `collect` hands over in the thread it is called in,
        # and the page may be made in another one meanwhile.
        self._mine = threading.local()

    def snapshot(self) -> MetricsData | None:
        """The numbers as they stand; None before the first measurement."""
        self._measurements.settle()
        self._mine.taken = None
        self._mine.taking = True
        try:
            self.collect()
        finally:
            self._mine.taking = False
        return self._mine.taken

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> None:
        if getattr(self._mine, "taking", False):
            self._mine.taken = metrics_data
        else:
            super()._receive_metrics(metrics_data, timeout_millis, **kwargs)


class MetricPusher:
    """Sends a snapshot each interval from a thread of its own, and a last one at the end."""

    def __init__(self, reader: SharedReader, url: str, settings: TelemetrySettings) -> None:
        self._reader = reader
        self._exporter = OTLPMetricExporter(endpoint=url, timeout=settings.export_timeout_ms / 1000)
        self._interval_s = settings.metric_interval_ms / 1000
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duplex-metrics", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Send now. Blocks for as long as the collector takes, the export's timeout at most."""
        data = self._reader.snapshot()
        if data is None:
            return
        with self._sending:
            try:
                self._exporter.export(data)
            except Exception:
                log.exception("metrics were not sent")

    def close(self) -> None:
        """Send once more and stop."""
        self._ended.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.push()
        self.push()
