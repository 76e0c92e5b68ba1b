"""A small OTLP/HTTP receiver: writes what it is sent as OTLP JSON, one export request a line.

For one machine and for tests; a cluster has a collector. Takes protobuf bodies (plain or gzip) at
`/v1/traces` and `/v1/metrics`, on the loopback address. In the JSON lines, ids are hex and enums
are numbers, as the OTLP JSON mapping asks.
"""

import base64
import contextlib
import errno
import os
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import uvicorn
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of a request after decompression."""
START_TIMEOUT_S = 10.0
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")
_PROTOBUF = "application/x-protobuf"

Json = dict[str, Any]


def to_otlp_json(message: Message) -> Json:
    """The OTLP JSON form of an export request: lowerCamelCase names, hex ids, numeric enums."""
    document: Json = MessageToDict(
        message, preserving_proto_field_name=False, use_integers_for_enums=True
    )
    _hex_ids(document)
    return document


def _hex_ids(value: Any) -> None:
    """Protobuf's JSON has bytes in base64; OTLP's has the ids in hex."""
    if isinstance(value, dict):
        fields = cast(Json, value)
        for name in _ID_FIELDS:
            text = fields.get(name)
            if isinstance(text, str):
                fields[name] = base64.b64decode(text).hex()
        for inner in fields.values():
            _hex_ids(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            _hex_ids(inner)


class OtlpSink:
    """Receiver in a thread of its own: `with OtlpSink(spans=PATH, metrics=PATH) as sink`.

    Files are opened for appending, so that two replicas and two runs of a sink add up. A line that
    cannot be written (disk full) is answered with 503, which exporters repeat, and counted.
    """

    def __init__(self, spans: Path | None, metrics: Path | None, port: int = 0) -> None:
        """`spans`, `metrics`: files to append to; None accepts and drops that signal. `port` 0
        takes a free one. Raises OSError if the port is taken or a file cannot be opened."""
        self._socket = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.exports = 0
        self.failed_writes = 0
        try:
            self._spans = None if spans is None else _LineFile(spans)
            self._metrics = None if metrics is None else _LineFile(metrics)
        except OSError:
            self._socket.close()
            raise
        app = Starlette(
            routes=[
                Route("/v1/traces", self._traces, methods=["POST"]),
                Route("/v1/metrics", self._metrics_endpoint, methods=["POST"]),
            ]
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                limit_concurrency=64,
                timeout_keep_alive=10,
                timeout_graceful_shutdown=2,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="duplex-otlp-sink", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and close the files; requests under way get 2 s."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_TIMEOUT_S)
        self._socket.close()
        for file in (self._spans, self._metrics):
            if file is not None:
                file.close()

    async def _traces(self, request: Request) -> Response:
        return await self._receive(request, ExportTraceServiceRequest(), self._spans)

    async def _metrics_endpoint(self, request: Request) -> Response:
        return await self._receive(request, ExportMetricsServiceRequest(), self._metrics)

    async def _receive(
        self, request: Request, message: Message, file: "_LineFile | None"
    ) -> Response:
        try:
            body = await _read_body(request.stream, request.headers.get("content-encoding"))
        except ClientDisconnect:
            return Response(status_code=400)
        if body is None:
            return Response("body too large or badly compressed", status_code=413)
        try:
            message.ParseFromString(body)
        except DecodeError:
            return Response("not an OTLP export request", status_code=400)
        try:
            if file is not None:
                file.append(msgspec.json.encode(to_otlp_json(message)) + b"\n")
        except OSError:
            self.failed_writes += 1
            return Response("cannot be stored", status_code=503)
        self.exports += 1
        return Response(b"", media_type=_PROTOBUF)


class _LineFile:
    """A file that holds whole lines only, also after a disk ran full."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, line: bytes) -> None:
        """Raises OSError with nothing of the line left in the file."""
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes written")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise

    def close(self) -> None:
        self._file.close()


async def _read_body(
    stream: Callable[[], AsyncIterator[bytes]], encoding: str | None
) -> bytes | None:
    """The request's body, decompressed; None when it is too long or no gzip."""
    chunks = bytearray()
    async for chunk in stream():
        chunks += chunk
        if len(chunks) > MAX_BODY_BYTES:
            return None
    if encoding != "gzip":
        return bytes(chunks)
    inflate = zlib.decompressobj(wbits=31)
    try:
        body = inflate.decompress(bytes(chunks), MAX_BODY_BYTES)
    except zlib.error:
        return None
    return None if inflate.unconsumed_tail else body
