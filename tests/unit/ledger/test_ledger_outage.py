"""What the log says of a ledger that is away: not each time that somebody asks it."""

import logging

import pytest

from duplex_api.ledger_outage import AGAIN_S, SETTLED_S, LedgerOutage

pytestmark = pytest.mark.unit

log = logging.getLogger("duplex.test")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    return Clock()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_outage_is_told_when_it_begins_and_when_it_is_over(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outage = LedgerOutage(log, clock_s=clock)
    outage.answered()
    for _ in range(40):
        outage.failed("refused")
        clock.now_s += 0.5
    outage.answered()
    outage.answered()
    assert told(caplog) == [
        "the ledger does not answer: refused",
        "the ledger is back after 20.0 s",
    ]


def test_a_long_one_is_told_now_and_then(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    outage = LedgerOutage(log, verb="take what is written", clock_s=clock)
    for _ in range(round(4 * AGAIN_S)):
        outage.failed("full")
        clock.now_s += 1.0
    first, *again = told(caplog)
    assert first == "the ledger does not take what is written: full"
    assert again == [
        f"the ledger still does not take what is written ({seconds} s): full"
        for seconds in (30, 60, 90)
    ]


def test_one_that_answers_some_is_not_back(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A cluster of which one node is away, asked by many calls."""
    outage = LedgerOutage(log, settled_s=SETTLED_S, clock_s=clock)
    for _ in range(10):
        outage.failed("no answer")
        outage.answered()
        clock.now_s += 0.5
    assert len(told(caplog)) == 1
    clock.now_s += SETTLED_S
    outage.answered()
    assert len(told(caplog)) == 2
