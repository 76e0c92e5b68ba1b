"""The page for people: a unit that hangs is a number there, and none is an empty cell."""

from types import SimpleNamespace
from typing import Any

import pytest

from duplex_sidecar.admin.statusz import status_page

pytestmark = pytest.mark.unit


def page(under_way_ms: int | None) -> str:
    view: dict[str, Any] = {"session": "a", "unitUnderWayMs": under_way_ms, "audio": {}}
    report = SimpleNamespace(stage="thinker", state="ready", generation=1, elapsed_s=2, reason="")
    return status_page(
        {
            "replica": "r",
            "model": "m",
            "checkpoint": "c",
            "uptime_s": 1.0,
            "problem": None,
            "free_slots": 1,
            "near_real_time_ratio": 1.0,
            "stages": [report],
            "sessions": [view],
        }
    )


def test_a_unit_under_way_has_a_column() -> None:
    assert "<th>unitUnderWayMs</th>" in page(7012)
    assert "<tr><td>a</td><td>7012</td></tr>" in page(7012)
    assert "<tr><td>a</td><td></td></tr>" in page(None)
