"""Telemetry over real OTLP/HTTP: what arrives, what a kill leaves, and what an absent or slow
collector costs."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.telemetry_kit import speak_units

from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.otlp_sink import MAX_BODY_BYTES, OtlpSink
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

pytestmark = pytest.mark.integration

WAIT_MS = 60_000


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[OtlpSink]:
    with OtlpSink(tmp_path / "spans.jsonl", tmp_path / "metrics.jsonl") as running:
        yield running


def spans_in(path: Path) -> list[dict[str, Any]]:
    """Every span of a spans.jsonl, with its replica beside it."""
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            attributes = attributes_of(resource["resource"])
            for scope in resource["scopeSpans"]:
                found += [
                    {**span, "replica": attributes["service.instance.id"]}
                    for span in scope["spans"]
                ]
    return found


def attributes_of(holder: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in holder.get("attributes", ())}


def test_a_conversation_arrives_whole(sink: OtlpSink, tmp_path: Path) -> None:
    settings = TelemetrySettings(replica="r1", otlp_endpoint=sink.endpoint, batch_spans=64)
    tracing, metrics = Tracing(settings), Metrics(settings)
    session = tracing.session("s1", None, names.SegmentReason.OPENED)
    speak_units(session, 1, 40)
    metrics.unit(names.UnitDecision.SPEAK, 120.0, 1_000.0)
    assert tracing.close(WAIT_MS)
    assert metrics.close(WAIT_MS)

    spans = spans_in(tmp_path / "spans.jsonl")
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans) == 1 + 40 * 8
    assert all(len(s["traceId"]) == 32 and int(s["traceId"], 16) for s in spans)
    units = [span for span in spans if span["name"] == "duplex.unit"]
    assert sorted(int(attributes_of(u)["duplex.unit.seq"]) for u in units) == list(range(1, 41))
    for span in spans:
        parent = by_id[span["parentSpanId"]]["name"] if "parentSpanId" in span else None
        expected = {"duplex.session": None, "duplex.unit": "duplex.session"}
        assert parent == expected.get(span["name"], "duplex.unit")
    assert all(unit["events"][0]["name"] == "duplex.stage2.epoch" for unit in units)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    arrived = json.loads(line)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert "duplex.unit.wall" in {metric["name"] for metric in arrived}
    assert sink.failed_writes == 0


KILLED_REPLICA = """
import sys, time
from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing
tracing = Tracing(TelemetrySettings(replica="killed", otlp_endpoint=sys.argv[1]))
session = tracing.session("s1", None, names.SegmentReason.OPENED)
for seq in range(1, 31):
    session.unit(seq, 0, 1000.0).end()
tracing.flush(60_000)
under_way = session.unit(31, 0, 1000.0)
print(session.traceparent, under_way.traceparent, flush=True)
time.sleep(600)
"""


def test_traces_are_linked_across_a_kill(sink: OtlpSink, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_REPLICA, sink.endpoint],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    stored_session, stored_unit = process.stdout.readline().split()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

    tracing = Tracing(TelemetrySettings(replica="second", otlp_endpoint=sink.endpoint))
    session = tracing.session("s1", stored_session, names.SegmentReason.RESUMED)
    session.stage2_epoch(1, names.EpochCause.RECOVERY)
    session.unit(31, 0, 1_000.0, redo_of=stored_unit).end()
    assert tracing.close(WAIT_MS)

    spans = spans_in(tmp_path / "spans.jsonl")
    units = [span for span in spans if span["name"] == "duplex.unit"]
    sequence = [(span["replica"], int(attributes_of(span)["duplex.unit.seq"])) for span in units]
    assert sequence == [*(("killed", n) for n in range(1, 31)), ("second", 31)]
    roots = {s["replica"]: s for s in spans if s["name"] == "duplex.session"}
    (link,) = roots["second"]["links"]
    assert link["traceId"] == roots["killed"]["traceId"]
    assert link["spanId"] == roots["killed"]["spanId"]
    (redo_link,) = units[-1]["links"]
    assert stored_unit.startswith(f"00-{redo_link['traceId']}-{redo_link['spanId']}-")
    assert redo_link["traceId"] == roots["killed"]["traceId"]
    # No span of the killed replica hangs from a parent that never arrived.
    ids = {span["spanId"] for span in spans}
    assert all(span["parentSpanId"] in ids for span in spans if "parentSpanId" in span)


def test_the_sink_refuses_what_is_no_export(sink: OtlpSink, tmp_path: Path) -> None:
    with httpx.Client(base_url=sink.endpoint) as client:
        assert client.post("/v1/traces", content=b"\xff\xff\xff").status_code == 400
        too_long = client.post("/v1/traces", content=b"0" * (MAX_BODY_BYTES + 1))
        assert too_long.status_code == 413
        bomb = gzip.compress(b"\0" * (MAX_BODY_BYTES + 1))
        gzipped = {"content-encoding": "gzip"}
        assert client.post("/v1/traces", content=bomb, headers=gzipped).status_code == 413
        broken = client.post("/v1/traces", content=b"no gzip", headers=gzipped)
        assert broken.status_code == 413
        assert client.get("/v1/traces").status_code == 405
        assert client.post("/v1/logs", content=b"").status_code == 404
        empty = client.post("/v1/traces", content=gzip.compress(b""), headers=gzipped)
        assert empty.status_code == 200
    assert (tmp_path / "spans.jsonl").read_text() == "{}\n"
    assert (sink.exports, sink.failed_writes) == (1, 0)


def test_a_taken_port_or_folder_is_an_error_at_once(sink: OtlpSink, tmp_path: Path) -> None:
    port = int(sink.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        OtlpSink(None, None, port)
    with pytest.raises(IsADirectoryError):
        OtlpSink(tmp_path, None)


def test_a_second_sink_adds_to_the_same_files(tmp_path: Path) -> None:
    for replica in ("r1", "r2"):
        with OtlpSink(tmp_path / "spans.jsonl", None) as sink:
            tracing = Tracing(TelemetrySettings(replica=replica, otlp_endpoint=sink.endpoint))
            tracing.session("s1", None, names.SegmentReason.OPENED)
            assert tracing.close(WAIT_MS)
    replicas = [span["replica"] for span in spans_in(tmp_path / "spans.jsonl")]
    assert replicas == ["r1", "r2"]
