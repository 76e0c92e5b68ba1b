"""What an operator may say about telemetry, with its bounds."""

from typing import Annotated

import msgspec

Milliseconds = Annotated[int, msgspec.Meta(ge=50, le=600_000)]


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one process.

    otlp_endpoint: base URL of an OTLP/HTTP collector (`http://host:4318`), without a signal path;
    None exports nothing (the Prometheus page still works).
    replica: instance id of this process, in every span, metric and log line.
    include_content: the one switch that lets text into spans. Audio never goes there.
    queue_spans, batch_spans: bounds of the exporter; a full queue drops spans, it never waits.
    trace_sample_ratio: part of the sessions whose spans are recorded at all.
    segment_units: units of one trace before a new, linked one begins.
    """

    replica: str
    otlp_endpoint: str | None = None
    service_name: str = "duplex-sidecar"
    service_version: str = "0.1.0"
    include_content: bool = False
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    queue_spans: Annotated[int, msgspec.Meta(ge=64, le=65_536)] = 4_096
    batch_spans: Annotated[int, msgspec.Meta(ge=1, le=4_096)] = 512
    span_delay_ms: Milliseconds = 1_000
    metric_interval_ms: Milliseconds = 15_000
    export_timeout_ms: Milliseconds = 3_000
    segment_units: Annotated[int, msgspec.Meta(ge=1, le=86_400)] = 600

    def __post_init__(self) -> None:
        endpoint = self.otlp_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"telemetry endpoint must be an http(s) URL, got {endpoint!r}")
        if self.batch_spans > self.queue_spans:
            raise ValueError(
                f"batch_spans {self.batch_spans} exceeds queue_spans {self.queue_spans}"
            )

    def signal_url(self, path: str) -> str | None:
        """Full URL of one signal (`v1/traces`, `v1/metrics`), or None."""
        if self.otlp_endpoint is None:
            return None
        return f"{self.otlp_endpoint.rstrip('/')}/{path}"
