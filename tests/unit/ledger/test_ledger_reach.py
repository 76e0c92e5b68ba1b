"""Whether the ledger answers, against a scripted one and a clock of its own."""

import asyncio
import logging
from contextlib import suppress

import pytest

from duplex_sidecar.ledger.errors import LedgerUnavailable
from duplex_sidecar.ledger.reach import ASK_AGAIN_S, ASK_PERIOD_S, AWAY_AFTER_S, LedgerReach

pytestmark = pytest.mark.unit


class Over(Exception):
    """The time of the test is over."""


class Scripted:
    """Sleeping moves the clock; the ledger fails while the clock is within `away_s`."""

    def __init__(self, until_s: float, away_s: tuple[float, float], error: Exception) -> None:
        self.now_s = 0.0
        self.until_s = until_s
        self.away_s = away_s
        self.error = error
        self.told: list[tuple[float, bool]] = []

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.until_s:
            raise Over

    async def ask(self) -> None:
        first, last = self.away_s
        if first <= self.now_s < last:
            raise self.error

    def run(self) -> list[tuple[float, bool]]:
        reach = LedgerReach(
            self.ask,
            lambda there: self.told.append((self.now_s, there)),
            clock_s=lambda: self.now_s,
            sleep=self.sleep,
        )
        with suppress(Over):
            asyncio.run(reach.run())
        assert reach.away is not self.told[-1][1]
        return self.told


@pytest.mark.parametrize("error", [LedgerUnavailable("", "refused"), RuntimeError("odd")])
def test_away_after_its_time_and_back_with_the_first_answer(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told = Scripted(60.0, (10.5, 40.0), error).run()
    assert [there for _, there in told] == [True, False, True]
    (_, _), (gone_s, _), (back_s, _) = told
    assert AWAY_AFTER_S <= gone_s - 10.0 <= AWAY_AFTER_S + ASK_PERIOD_S
    assert 40.0 <= back_s <= 40.0 + ASK_AGAIN_S
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("the ledger does not answer: ")
    assert messages[1].startswith("the ledger is back after ")


def test_a_short_silence_is_nothing() -> None:
    error = LedgerUnavailable("", "refused")
    assert Scripted(60.0, (10.5, 10.5 + AWAY_AFTER_S - ASK_PERIOD_S), error).run() == [(0.0, True)]
