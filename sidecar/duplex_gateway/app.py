"""The gateway, put together: who may call, which calls there are, how it shuts down."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.datastructures import QueryParams
from fastapi.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute

from duplex_gateway.budget import Account, Budget
from duplex_gateway.client_socket import ClientSocket
from duplex_gateway.credentials import FailedAttempts
from duplex_gateway.ending import SERVICE_RESTART, Ended
from duplex_gateway.held import HeldLimits
from duplex_gateway.metrics import PROMETHEUS_CONTENT_TYPE, CallEnd, Metrics
from duplex_gateway.relay import Call, CallParts
from duplex_gateway.resume import ResumeState
from duplex_gateway.routing import Directory, connect_directory, token_matches
from duplex_gateway.settings import GatewaySettings
from duplex_gateway.watch import LeaseWatch
from duplex_sidecar.doors.bearer import bearer_token
from duplex_sidecar.doors.first_message import resume_point
from duplex_sidecar.doors.unread import unread_of
from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.telemetry.logs import log_context

log = logging.getLogger(__name__)

LEDGER_RETRY_S = 0.5
HANG_UP_TIMEOUT_S = 5.0
REALTIME_PATH = "/v1/realtime"


class Gateway:
    """One replica."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        budget = Budget(settings.max_held_bytes, settings.max_calls)
        self.metrics = Metrics(lambda: budget.held_bytes)
        self._budget = budget
        self._watch = LeaseWatch()
        self._directory: Directory | None = None
        self._watching: asyncio.Task[None] | None = None
        self._attempts = FailedAttempts(settings.failed_attempts, settings.failed_attempt_refill_s)
        self._limits = HeldLimits()
        self._connections = 0
        self._calls: set[Call] = set()
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        self._draining = False

    async def start(self) -> None:
        """Returns when the ledger is connected. Raises LedgerUnsuitable."""
        self._directory = await connect_directory(self.settings.redis_url, LEDGER_RETRY_S)
        self._watching = asyncio.create_task(self._watch.run(self._directory), name="leases")
        log.info("ready")

    async def drain(self) -> None:
        """Take no more calls; those there are go on for the grace, then they are closed."""
        self._draining = True
        log.info("shutting down", extra={"fields": {"calls": len(self._calls)}})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_grace_s):
                await self._no_calls.wait()
        for call in self._calls:
            call.hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_UP_TIMEOUT_S):
                await self._no_calls.wait()

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._directory is not None:
            await self._directory.close()

    @property
    def problem(self) -> str | None:
        """What keeps this replica from taking calls, None when it does."""
        if self._draining:
            return "shutting down"
        return "ledger: connecting" if self._directory is None else None

    # --- calls ----------------------------------------------------------------------------------

    async def serve(self, websocket: WebSocket) -> None:
        """One client connection to its end. Never raises for what a client does."""
        token, subprotocol = bearer_token(websocket.headers)
        session, resumes = _asked_for(websocket)
        address = websocket.client.host if websocket.client else ""
        try:
            await websocket.accept(subprotocol=subprotocol)
        except (WebSocketDisconnect, RuntimeError):
            return
        with self._connection() as account, log_context(session=session[:64]):
            client = ClientSocket(websocket, unread_of(websocket.scope), account)
            try:
                directory = self._admit(address)
                await self._authenticate(directory, session, token, address)
                client.admit()
                last_sequence = await _resume_point(client) if resumes else None
                state = ResumeState(last_sequence, self._limits, account)
                ended = await self._hold_call(directory, client, session, token, state)
            except Ended as refused:
                ended = refused
            fields = {"end": ended.end, "code": ended.close_code, "reason": ended.reason}
            log.info("call ended", extra={"fields": fields})
            self.metrics.call_ended(ended.end)
            await client.say_goodbye(ended)

    async def _hold_call(
        self,
        directory: Directory,
        client: ClientSocket,
        session: str,
        token: str,
        state: ResumeState,
    ) -> Ended:
        try:
            mark = await directory.claim_call(session, token)
        except LedgerError as error:
            raise _ledger_trouble(error) from None
        parts = CallParts(directory, self._watch, self.metrics, self.settings.queue_wait_s)
        call = Call(parts, client, session, token, state, mark)
        if self._draining:
            raise _shutting_down()
        self._calls.add(call)
        self._no_calls.clear()
        self.metrics.calls(len(self._calls))
        try:
            return await call.run()
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._no_calls.set()
            self.metrics.calls(len(self._calls))

    def _admit(self, address: str) -> Directory:
        """Raises Ended before anything is asked of the ledger."""
        if self._draining:
            raise _shutting_down()
        if self._directory is None:
            raise Ended.because(CallEnd.REFUSED, ErrorCode.NOT_READY)
        if self._connections > self.settings.max_calls:
            raise Ended.because(
                CallEnd.REFUSED, ErrorCode.RESOURCE_EXHAUSTED, "this gateway has no room for a call"
            )
        if not self._attempts.allowed(address, time.monotonic()):
            raise Ended.because(
                CallEnd.REFUSED,
                ErrorCode.RESOURCE_EXHAUSTED,
                "too many failed attempts from this address; try again later",
            )
        return self._directory

    async def _authenticate(
        self, directory: Directory, session: str, token: str, address: str
    ) -> None:
        """A wrong token, an unknown session and an impossible name look the same. Raises Ended."""
        try:
            route, lease, _ = await directory.find(session)
        except ValueError:
            route = lease = None
        except LedgerError as error:
            raise _ledger_trouble(error) from None
        if not token_matches(token, route, lease):
            self._attempts.failed(address, time.monotonic())
            self.metrics.failed_attempt()
            raise Ended.because(CallEnd.REFUSED, ErrorCode.SESSION_NOT_FOUND)

    @contextlib.contextmanager
    def _connection(self) -> Generator[Account]:
        self._connections += 1
        try:
            with self._budget.account() as account:
                yield account
        finally:
            self._connections -= 1


def _asked_for(websocket: WebSocket) -> tuple[str, bool]:
    """(session, whether it is to be resumed). `websocket.query_params` would be kept."""
    query = QueryParams(websocket.scope["query_string"])
    return query.get("session", ""), query.get("resume") in ("1", "true")


async def _resume_point(client: ClientSocket) -> int:
    try:
        return await resume_point(client.receive())
    except ClientError as error:
        raise Ended.because(CallEnd.REFUSED, error.code, error.detail) from None


def _shutting_down() -> Ended:
    return Ended(CallEnd.SHUTDOWN, SERVICE_RESTART, "the gateway is shutting down")


def _ledger_trouble(error: LedgerError) -> Ended:
    detail = "" if isinstance(error, LedgerUnavailable) else "the ledger refuses this gateway"
    return Ended.because(CallEnd.FAILED, ErrorCode.LEDGER_UNAVAILABLE, detail)


def create_app(gateway: Gateway) -> FastAPI:
    """The clients' side."""
    # FastAPI's own kind of route would keep each request's parameters as long as the call lasts.
    realtime = WebSocketRoute(REALTIME_PATH, gateway.serve)
    return FastAPI(
        title="Duplex gateway", docs_url=None, redoc_url=None, openapi_url=None, routes=[realtime]
    )


def create_health_app(gateway: Gateway) -> FastAPI:
    """The side of whoever runs it: a port of its own, which no ingress exposes."""
    app = FastAPI(title="Duplex gateway health", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        problem = gateway.problem
        return JSONResponse(
            {"ready": problem is None, "waiting_for": problem}, 200 if problem is None else 503
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.page(), media_type=PROMETHEUS_CONTENT_TYPE)

    _ = (livez, readyz, metrics)
    return app
