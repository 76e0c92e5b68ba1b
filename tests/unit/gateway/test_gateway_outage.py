"""A ledger that is away is asked by every call, and is told of once."""

import logging
from typing import Any, cast

import pytest

from duplex_gateway.routing import Directory
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable, ServerFull

pytestmark = pytest.mark.unit


class Away:
    """A connection to nowhere."""

    def __init__(self, error: LedgerError) -> None:
        self._error = error

    async def read(self, *_: Any) -> Any:
        raise self._error

    read_many = read


@pytest.mark.parametrize("error", [LedgerUnavailable("", "refused"), LedgerError("", "no rights")])
async def test_calls_together_say_it_once(
    error: LedgerError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory = Directory(cast("Connection", Away(error)))
    for _ in range(20):
        with pytest.raises(LedgerError):
            await directory.find("a-session")
        with pytest.raises(LedgerError):
            await directory.leases(["a-session"])
    assert [record.getMessage() for record in caplog.records] == [
        f"the ledger does not answer: {error.reason}"
    ]


async def test_one_that_is_full_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """It costs nobody a call."""
    caplog.set_level(logging.INFO)
    directory = Directory(cast("Connection", Away(ServerFull("", "full"))))
    for _ in range(20):
        assert await directory.claim_call("a-session", "a-token") == ""
        with pytest.raises(ServerFull):
            await directory.wake("a-session")
    assert [record.getMessage() for record in caplog.records] == [
        "the ledger does not take what is written: full"
    ]
