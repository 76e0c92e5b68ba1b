"""What strangers get at the sidecar's ports: not why it is not ready, and no socket for nothing."""

import asyncio
import gc
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from support.patience import PATIENCE_S
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from duplex_sidecar import app as sidecar_app
from duplex_sidecar.app import Sidecar
from duplex_sidecar.cli import serving
from duplex_sidecar.doors.http import DoorHttp
from duplex_sidecar.stages.supervisor import StageState

pytestmark = pytest.mark.integration
REASON = "given up: /somewhere/model.safetensors is broken"


class NotReady:
    """As a sidecar whose Thinker has been given up."""

    problem = f"thinker: failed: {REASON}"
    broken = True
    draining = False
    waits_for = Sidecar.waits_for
    ledger_away = Sidecar.ledger_away
    ledger: Any = None
    _reach: Any = None
    _ledger_went = Sidecar._ledger_went
    _stage_under_way = Sidecar._stage_under_way

    def __init__(self, *, loopback: bool) -> None:
        self.settings = SimpleNamespace(is_loopback=loopback, replica="one")
        self.supervisor = SimpleNamespace(report=self._report)

    def _report(self, stage: str) -> Any:
        bad = stage == "thinker"
        state = StageState.FAILED if bad and self.broken else StageState.READY
        return SimpleNamespace(stage=stage, state=state, reason=REASON)


class WithoutLedger(NotReady):
    """All stages are ready; the ledger was never reached, or is away."""

    problem = "ledger: connecting"
    broken = False


@pytest.mark.parametrize("reached", [False, True])
async def test_a_start_needs_the_stages_alone(reached: bool) -> None:
    """Or a kubelet would end a pod that waits for the ledger, and load the weights again."""
    sidecar = WithoutLedger(loopback=False)
    if reached:
        sidecar.ledger, sidecar._reach = object(), SimpleNamespace(away=True)
    assert await status_of(sidecar, "/readyz") == 503
    assert await status_of(sidecar, "/readyz?ledger=any") == 200
    assert await status_of(NotReady(loopback=False), "/readyz?ledger=any") == 503
    sidecar.draining = True
    assert await status_of(sidecar, "/readyz?ledger=any") == 503


async def status_of(sidecar: NotReady, path: str) -> int:
    app = FastAPI()
    sidecar_app._serve_public(app, cast("Sidecar", sidecar))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://sidecar"
    ) as client:
        return (await client.get(path)).status_code


@pytest.mark.parametrize(
    ("loopback", "told"), [(True, NotReady.problem), (False, "thinker: failed")]
)
async def test_why_it_is_not_ready_is_for_those_who_run_it(loopback: bool, told: str) -> None:
    app = FastAPI()
    sidecar_app._serve_public(app, cast("Sidecar", NotReady(loopback=loopback)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://sidecar"
    ) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "waiting_for": told, "replica": "one"}


@asynccontextmanager
async def serving_nothing(app: FastAPI | None = None) -> AsyncGenerator[tuple[str, int]]:
    """An app, empty if none is given, behind the sidecar's own HTTP; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = serving._Server(serving._config(app or FastAPI(), "off"))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await task
        listener.close()


async def test_who_knocks_elsewhere_is_told_where_the_door_is() -> None:
    app = FastAPI()
    sidecar_app._serve_public(app, cast("Sidecar", NotReady(loopback=False)))
    async with serving_nothing(app) as (host, port):
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://{host}:{port}/v1/real-time", proxy=None)
        assert refused.value.response.status_code == 404
        assert b"/v1/realtime" in refused.value.response.body
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            answer = await client.get("/v1/realtime")
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
        assert "WebSocket" in answer.json()["error"]["message"]


async def test_connections_that_ask_for_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplex_sidecar.doors.http.REQUEST_TIMEOUT_S", 0.2)
    async with serving_nothing() as address:
        for said in (b"", b"GET /livez HTTP/1.1\r\nHost: sidecar\r\n"):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(said)
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: sidecar\r\n"


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (LIVEZ + b"\r\n", b"G"),
        (LIVEZ + b"Content-Length: 1000000\r\n\r\n", b"x"),
    ],
    ids=["the next request", "the rest of the first one"],
)
async def test_connections_that_ask_a_byte_at_a_time_are_closed(
    first: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte by itself comes in good time."""
    monkeypatch.setattr("duplex_sidecar.doors.http.REQUEST_TIMEOUT_S", 1.0)
    async with serving_nothing() as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(first)
        assert b"404" in await reader.readuntil(b"}")
        closed = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE_S):
            while not closed.done():
                writer.write(drop)
                await asyncio.wait({closed}, timeout=0.05)
        writer.close()
        await asyncio.gather(closed, writer.wait_closed(), return_exceptions=True)


async def test_a_request_under_way_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take as long as it likes: the admin API's feed has no end."""
    monkeypatch.setattr("duplex_sidecar.doors.http.REQUEST_TIMEOUT_S", 0.1)
    app, more = FastAPI(), asyncio.Event()

    @app.get("/long")
    async def long() -> dict[str, bool]:
        await more.wait()
        return {"whole": True}

    _ = long
    async with serving_nothing(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /long HTTP/1.1\r\nHost: sidecar\r\n\r\n")
        asyncio.get_running_loop().call_later(0.5, more.set)
        assert b"whole" in await reader.readuntil(b"}")
        writer.close()
        await writer.wait_closed()


async def test_a_connection_that_is_closed_is_not_kept_until_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("duplex_sidecar.doors.http.REQUEST_TIMEOUT_S", 3_600.0)
    async with serving_nothing() as address:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: sidecar\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(PATIENCE_S):
            while any(type(kept) is DoorHttp for kept in gc.get_objects()):
                await asyncio.sleep(0.05)
                gc.collect()
