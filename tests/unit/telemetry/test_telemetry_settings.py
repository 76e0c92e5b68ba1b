"""Settings refuse what cannot work."""

import msgspec
import pytest

from duplex_sidecar.telemetry.settings import TelemetrySettings

pytestmark = pytest.mark.unit


def test_signal_urls() -> None:
    for base in ("http://collector:4318", "http://collector:4318/"):
        settings = TelemetrySettings(replica="r", otlp_endpoint=base)
        assert settings.signal_url("v1/traces") == "http://collector:4318/v1/traces"
    assert TelemetrySettings(replica="r").signal_url("v1/traces") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"otlp_endpoint": "collector:4318"},
        {"otlp_endpoint": "file:///etc/passwd"},
        {"queue_spans": 0},
        {"batch_spans": 100, "queue_spans": 64},
        {"export_timeout_ms": 10},
        {"segment_units": 0},
        {"include_content": "yes"},
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"replica": "r", **fields}, TelemetrySettings)
