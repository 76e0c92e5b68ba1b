"""A ledger that is away is asked for every session, and is told of once."""

import logging
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Refused

from duplex_operator.routes import LedgerAwayError, Routes
from duplex_operator.sidecar_client import (
    SidecarRefusalError,
    SidecarUnreachableError,
    retry_level,
)

pytestmark = pytest.mark.unit


async def test_sessions_together_say_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    routes = Routes("redis://user:hidden@ledger")

    async def refuse(*_: Any) -> None:
        raise Refused("hidden")

    monkeypatch.setattr(routes._redis, "hgetall", refuse)
    for number in range(20):
        with pytest.raises(LedgerAwayError):
            await routes.read(f"uid-{number}")
    await routes.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the ledger does not answer: ConnectionError"
    ]


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (LedgerAwayError("TimeoutError"), logging.DEBUG),
        (SidecarRefusalError(503, "ledger_unavailable", "away"), logging.DEBUG),
        (SidecarRefusalError(409, "session_busy", "busy"), logging.INFO),
        (SidecarUnreachableError("refused"), logging.INFO),
    ],
)
def test_what_the_log_has_already_is_said_softly(error: Exception, level: int) -> None:
    assert retry_level(error) == level
