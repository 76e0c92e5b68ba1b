"""Real sidecars for tests: a bed holds one Valkey, one OTLP sink and the sidecars on them."""

import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from duplex_sidecar.cli.places import default_cache_dir
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.telemetry.otlp_sink import OtlpSink


@dataclass
class Bed:
    """What sidecars lie on. `work` has a short path: sockets are below it."""

    checkpoint: Path
    work: Path
    valkey: EmbeddedValkey
    sink: OtlpSink
    sidecars: list[LocalSidecar] = field(default_factory=list)

    @property
    def spans_file(self) -> Path:
        return self.work / "spans.jsonl"

    def prepare(self, name: str, **settings: Any) -> LocalSidecar:
        """A sidecar that is not started. It is stopped with the bed."""
        values = {
            "checkpoint": str(self.checkpoint),
            "redis_url": self.valkey.url,
            "cache_dir": str(default_cache_dir()),
            "replica": name,
            "otlp_endpoint": self.sink.endpoint,
        }
        sidecar = LocalSidecar.prepare(self.work / name, **(values | settings))
        self.sidecars.append(sidecar)
        return sidecar

    def spans(self) -> list[dict[str, Any]]:
        """Everything that has arrived at the sink."""
        return [
            span for line in whole_lines(self.spans_file) for span in spans_of(json.loads(line))
        ]

    def close(self) -> None:
        for sidecar in self.sidecars:
            sidecar.stop()
        if self.valkey.running:
            self.valkey.stop()
        self.sink.close()
        shutil.rmtree(self.work, ignore_errors=True)


def make_bed(checkpoint: Path) -> Bed:
    work = Path(tempfile.mkdtemp(prefix="duplex-bed-"))
    sink = OtlpSink(work / "spans.jsonl", None)
    sink.__enter__()
    return Bed(checkpoint, work, EmbeddedValkey(work / "ledger"), sink)


def whole_lines(file: Path) -> list[str]:
    """Of a file that is just being written to: without the part of a line at its end."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def spans_of(export: dict[str, Any]) -> list[dict[str, Any]]:
    """Spans of one OTLP JSON export; attributes as plain values."""
    found: list[dict[str, Any]] = []
    for resource in export.get("resourceSpans", ()):
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                events = [
                    event | {"attributes": _plain(event.get("attributes", ()))}
                    for event in span.get("events", ())
                ]
                found.append(
                    span | {"attributes": _plain(span.get("attributes", ())), "events": events}
                )
    return found


def _plain(attributes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in attributes}


def _value(value: dict[str, Any]) -> Any:
    """OTLP JSON has 64-bit integers as strings."""
    ((kind, inner),) = value.items()
    return int(inner) if kind == "intValue" else inner


def get(sidecar: LocalSidecar, path: str) -> tuple[int, str]:
    """(status, body) of a GET."""
    try:
        with urllib.request.urlopen(f"{sidecar.base_url}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def survivors(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that are still there after the time. A zombie whose parent does not collect it runs
    nothing any more."""
    deadline = time.monotonic() + timeout_s
    alive = list(processes)
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = [process for process in alive if _runs(process)]
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
