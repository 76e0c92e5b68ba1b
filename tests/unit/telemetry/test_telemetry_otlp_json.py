"""The OTLP JSON mapping: ids in hex, enums as numbers, 64-bit integers as text."""

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from duplex_sidecar.telemetry.otlp_sink import to_otlp_json

pytestmark = pytest.mark.unit


def test_ids_are_hex_and_enums_are_numbers() -> None:
    request = ExportTraceServiceRequest()
    span = (
        request.resource_spans.add()
        .scope_spans.add()
        .spans.add(
            name="duplex.unit",
            trace_id=bytes(range(16)),
            span_id=bytes(range(8)),
            parent_span_id=b"\xff" * 8,
            kind=1,
            start_time_unix_nano=1_700_000_000_000_000_001,
        )
    )
    span.attributes.append(KeyValue(key="spanId", value=AnyValue(string_value="AAECAwQFBgc=")))
    span.attributes.append(KeyValue(key="n", value=AnyValue(int_value=7)))
    span.links.add(trace_id=b"\xaa" * 16, span_id=b"\xbb" * 8)
    (found,) = to_otlp_json(request)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert found["traceId"] == "000102030405060708090a0b0c0d0e0f"
    assert found["spanId"] == "0001020304050607"
    assert found["parentSpanId"] == "ff" * 8
    assert found["links"] == [{"traceId": "aa" * 16, "spanId": "bb" * 8}]
    assert found["kind"] == 1
    assert found["startTimeUnixNano"] == "1700000000000000001"
    assert found["attributes"] == [
        {"key": "spanId", "value": {"stringValue": "AAECAwQFBgc="}},
        {"key": "n", "value": {"intValue": "7"}},
    ]
