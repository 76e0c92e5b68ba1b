"""Which pods count as stuck: never only because the ledger is, or was, away for all of them."""

from typing import cast

import pytest

from duplex_operator.objects import PodObject
from duplex_operator.pool_view import STUCK_MARGIN_MS, stuck_before

pytestmark = pytest.mark.unit

NOW_MS = 10_000_000
START_MS = 300_000


class Pod:
    """What this rule looks at."""

    def __init__(self, ready: bool, changed_ago_ms: int) -> None:
        self.ready = ready
        self.readiness_changed_ms = NOW_MS - changed_ago_ms


@pytest.mark.parametrize(
    ("pods", "stuck"),
    [
        ((), False),
        ((Pod(False, 3_600_000), Pod(False, 3_600_000)), False),
        # The ledger is back after an hour, and one pod has seen it first.
        ((Pod(False, 3_600_000), Pod(True, 1_000)), False),
        ((Pod(False, 3_600_000), Pod(True, STUCK_MARGIN_MS)), True),
    ],
)
def test_a_pod_is_stuck_only_while_others_have_long_been_ready(
    pods: tuple[Pod, ...], stuck: bool
) -> None:
    before_ms = stuck_before(cast("tuple[PodObject, ...]", pods), START_MS, NOW_MS)
    assert before_ms == (NOW_MS - START_MS - STUCK_MARGIN_MS if stuck else 0)
