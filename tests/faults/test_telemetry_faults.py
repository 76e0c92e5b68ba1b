"""What an absent or silent collector and a full disk cost: time that is bounded, never a unit."""

import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.standstill import Standstill
from support.telemetry_kit import speak_units

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.otlp_sink import OtlpSink
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

pytestmark = pytest.mark.fault


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_an_absent_collector_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    settings = TelemetrySettings(
        replica="r1",
        otlp_endpoint=f"http://127.0.0.1:{closed_port()}",
        queue_spans=64,
        batch_spans=32,
        export_timeout_ms=500,
    )
    tracing, metrics = Tracing(settings), Metrics(settings)
    session = tracing.session("s1", None, names.SegmentReason.OPENED)
    with Standstill() as stood:
        speak_units(session, 1, 100)
        metrics.unit(names.UnitDecision.LISTEN, 50.0, 1_000.0)
        assert stood.moved_s() < 2.0
    assert b"duplex_units_total" in metrics.prometheus_page()
    with Standstill() as stood:
        tracing.close(1_500)
        metrics.close(1_500)
        assert stood.moved_s() < 4.0


def test_a_collector_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = TelemetrySettings(
            replica="r1",
            otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            export_timeout_ms=60_000,
        )
        tracing = Tracing(settings)
        tracing.session("s1", None, names.SegmentReason.OPENED)
        with Standstill() as stood:
            assert not tracing.flush(300)
            assert not tracing.close(300)
            assert stood.moved_s() < 2.0


def test_a_full_disk_is_answered_as_come_again(tmp_path: Path) -> None:
    with (
        OtlpSink(Path("/dev/full"), None) as sink,
        httpx.Client(base_url=sink.endpoint) as client,
    ):
        assert client.post("/v1/traces", content=b"").status_code == 503
        assert client.post("/v1/metrics", content=b"").status_code == 200
        assert sink.failed_writes == 1


def test_a_line_that_did_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    """The limit on file sizes stands in for a disk that is full in mid-line."""
    program = (
        "import resource, signal, sys, httpx;"
        "from pathlib import Path;"
        "from duplex_sidecar.telemetry.otlp_sink import OtlpSink;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (7, 7));"
        "sink = OtlpSink(Path(sys.argv[1]), None).__enter__();"
        "post = lambda: httpx.post(sink.endpoint + '/v1/traces', content=b'').status_code;"
        "print(*[post() for _ in range(4)]); sink.close()"
    )
    path = tmp_path / "spans.jsonl"
    answers = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=180
    )
    assert answers.stdout.split() == ["200", "200", "503", "503"], answers.stderr
    assert path.read_text() == "{}\n{}\n"
