"""What the cluster's bench counts of an operator's metrics page."""

import pytest

from duplex_operator.reign import request_gauges
from tests.bench.operator_requests import requests_for_sessions

pytestmark = pytest.mark.unit

ASKED = {
    "patch duplexsessions": 3,
    "create secrets": 1,
    "create events": 2,
    "patch leases": 40,
    "patch pods": 2,
    "patch duplexpools": 5,
    "create poddisruptionbudgets": 1,
}


def test_a_pools_upkeep_is_no_sessions_request() -> None:
    gauges = {"duplex_operator_leads": 1.0, **request_gauges(ASKED)}
    page = "".join(f"{name} {value}\n" for name, value in gauges.items())
    assert requests_for_sessions(page) == {
        "patch duplexsessions": 3,
        "create secrets": 1,
        "create events": 2,
    }
