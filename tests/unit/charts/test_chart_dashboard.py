"""The dashboard asks for series that exist, by labels that they have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from duplex_gateway.metrics import Metrics as GatewayMetrics
from duplex_operator import reign
from duplex_sidecar.telemetry import names
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.settings import TelemetrySettings

pytestmark = pytest.mark.unit

FILE = Path(__file__).parents[3] / "charts" / "duplex" / "files" / "dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

SCRAPED = {"instance", "job", "namespace", "pod"}
"""Labels that Prometheus adds."""

_SERIES = re.compile(r"\bduplex_\w+")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def operator_series() -> dict[str, set[str]]:
    """The operator's page needs a cluster; its code has every name and label in plain text."""
    code = Path(reign.__file__).read_text(encoding="utf-8")
    labels = set(re.findall(r'(\w+)="\{', code))
    return dict.fromkeys(re.findall(r'"(duplex_operator_\w+)', code), labels)


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Every series of sidecar, gateway and operator -> its labels."""
    metrics = Metrics(TelemetrySettings(replica="r1"))
    metrics.unit(names.UnitDecision.SPEAK, 1_200.0, 1_000.0)
    metrics.rebuild(names.RebuildCause.SLIDE, 55.0)
    metrics.stage_call(names.StageName.TALKER, 68.0)
    metrics.stage_restarted(names.StageName.CODE2WAV)
    metrics.preemptions(names.StageName.THINKER, 1)
    metrics.sessions_live(3)
    metrics.ledger_reachable(True)
    metrics.ledger_call(names.LedgerCall.COMMIT, 0.4)
    metrics.epoch(names.EpochCause.TURN_END)
    metrics.envelope_refused("stale_cache_epoch")
    pages = metrics.prometheus_page(), GatewayMetrics(lambda: 0).page()
    return operator_series() | {
        sample.name: set(sample.labels)
        for page in pages
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_names_what_there_is(query: str, series: dict[str, set[str]]) -> None:
    asked = set(_SERIES.findall(_GROUPED.sub("", query)))
    assert asked
    assert asked <= set(series)
    labels = {name.strip() for group in _GROUPED.findall(query) for name in group.split(",")}
    for name in asked:
        assert labels <= series[name] | SCRAPED


def test_every_number_of_a_sidecar_is_shown() -> None:
    text = " ".join(queries())
    known = {
        value
        for name, value in vars(names).items()
        if name.startswith("METRIC_") and isinstance(value, str)
    }
    assert [name for name in sorted(known) if name.replace(".", "_") not in text] == []


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
