"""The recorded reservations and session contexts hold."""

import json
from pathlib import Path

import pytest

from duplex_sidecar.contract.window_cases import check_framing, check_session_context

pytestmark = pytest.mark.unit

CONTRACT = Path(__file__).parents[1] / "contract"
RECORDED = json.loads((CONTRACT / "framing_cases.json").read_text())


def test_reservations_equal_the_record() -> None:
    results = [check_framing(case) for case in RECORDED["cases"]]
    assert [d for result in results for d in result.differences] == []
    assert sum(result.comparisons for result in results) == 1_200


def test_session_contexts_equal_the_record() -> None:
    results = [check_session_context(case) for case in RECORDED["context_cases"]]
    assert [d for result in results for d in result.differences] == []
    assert sum(result.comparisons for result in results) == 420
