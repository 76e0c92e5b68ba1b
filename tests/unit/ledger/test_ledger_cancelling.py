"""A task that is stopped while the Redis client loses its cancellation."""

import asyncio
from typing import Any, cast

import pytest
from redis.asyncio import BlockingConnectionPool

from duplex_sidecar.ledger.call import PendingCall, ScriptName
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.nodes import OneServer

pytestmark = pytest.mark.unit


class Swallowing:
    """Answers, or fails, at the very moment at which its caller is cancelled."""

    max_connections = 8

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.asked = asyncio.Event()

    async def answer(self) -> Any:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
        return [b"ok"]

    async def get_connection(self) -> "Swallowing":
        return self

    async def release(self, _: object) -> None:
        pass

    async def send_packed_command(self, _: object) -> None:
        pass

    async def read_response(self) -> Any:
        return await self.answer()

    def pipeline(self, **_: Any) -> "Swallowing":
        return self

    def execute_command(self, *_: Any) -> None:
        pass

    async def execute(self, **_: Any) -> Any:
        return [await self.answer()]


@pytest.mark.parametrize("what", ["call", "read"])
@pytest.mark.parametrize("error", [None, ConnectionError("gone")])
async def test_a_loop_over_the_ledger_ends_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, what: str, error: Exception | None
) -> None:
    server = Swallowing(error)
    monkeypatch.setattr("duplex_sidecar.ledger.nodes.Redis", lambda **_: server)
    connection = Connection(OneServer(cast("BlockingConnectionPool", server)), 5_000, 5_000)

    async def loop() -> None:
        while True:
            if what == "read":
                await connection.read("s", ("GET", "x"))
            else:
                await connection.call(PendingCall("s", ScriptName.RENEW, ("k",), ()))

    task = asyncio.create_task(loop())
    async with asyncio.timeout(60):
        await server.asked.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
