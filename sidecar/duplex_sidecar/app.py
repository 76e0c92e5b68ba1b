"""The sidecar, put together; reads like a table of contents: model, ledger, stages, sessions.

The HTTP server answers from the first second: `/livez` at once, `/readyz` when every stage has
answered and the ledger is connected.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, WebSocket
from fastapi.responses import HTMLResponse, JSONResponse, Response

from duplex_api.admin import ADMIN_VERSION, POD_UID
from duplex_api.ledger_outage import LedgerOutage
from duplex_sidecar.admin.api import NOT_SERVED, admin_router, install_error_handlers
from duplex_sidecar.admin.feed import Feed
from duplex_sidecar.admin.guard import AdminGuard, guards_admin, guards_all, guards_status
from duplex_sidecar.admin.statusz import status_page
from duplex_sidecar.admin.tokens import AdminToken, FixedToken, TokenFile, file_reader
from duplex_sidecar.admin.views import UNDERSTANDS, session_view
from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.contract.recorder_stages import Recorder
from duplex_sidecar.doors.openai_realtime import serve_realtime
from duplex_sidecar.ledger.errors import LedgerUnavailable
from duplex_sidecar.ledger.pending import PendingErasures, keep_finishing_erasures
from duplex_sidecar.ledger.reach import LedgerReach
from duplex_sidecar.ledger.store import Ledger, LedgerOptions
from duplex_sidecar.protocol.errors import ClientError
from duplex_sidecar.protocol.errors import ErrorCode as Code
from duplex_sidecar.session.assembly import Assembly, StagesOf, as_they_are
from duplex_sidecar.session.given_voices import GivenVoices, given_voices_in_use
from duplex_sidecar.session.model import ServedModel, load_model
from duplex_sidecar.session.port import Attachment
from duplex_sidecar.session.reconciler import Reconciler
from duplex_sidecar.session.registry import SessionRegistry
from duplex_sidecar.session.roster import Roster
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.code2wav.client import Code2WavClient
from duplex_sidecar.stages.encoder.client import EncoderClient
from duplex_sidecar.stages.envelope import HealthReport
from duplex_sidecar.stages.launch import STAGES, stage_specs
from duplex_sidecar.stages.supervisor import StageReport, StageState, Supervisor
from duplex_sidecar.stages.talker.client import TalkerClient
from duplex_sidecar.stages.thinker.client import ThinkerClient
from duplex_sidecar.telemetry.metrics import PROMETHEUS_CONTENT_TYPE, Metrics
from duplex_sidecar.telemetry.names import StageName
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

log = logging.getLogger(__name__)

LEDGER_RETRY_S = 0.5
TELEMETRY_CLOSE_MS = 3_000


class Sidecar:
    """One replica. `start` returns when it serves; until then `problem` says what it waits for."""

    def __init__(self, settings: SidecarSettings, model: ServedModel) -> None:
        self.settings = settings
        self.model = model
        self.started_at = time.monotonic()
        telemetry = TelemetrySettings(
            replica=settings.replica,
            otlp_endpoint=settings.otlp_endpoint,
            include_content=settings.content_in_telemetry,
            trace_sample_ratio=settings.trace_sample_ratio,
        )
        self.tracing = Tracing(telemetry)
        self.metrics = Metrics(telemetry)
        self._stage_states: dict[str, StageState] = {}
        """As last reported; a stage under way reports its progress in the same state again."""
        self.supervisor = Supervisor(
            stage_specs(settings, model.element_type),
            self._on_stage_report,
            on_health=self._on_stage_health,
        )
        self.roster = Roster(settings.slots)
        self.feed = Feed(self.roster, self.hello)
        self.sessions: SessionRegistry | None = None
        self.ledger: Ledger | None = None
        self._reach: LedgerReach | None = None
        self._background: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> None:
        """Connect the ledger and start the stages side by side. Raises StageStartError,
        LedgerUnsuitable; waits for a ledger that is not there yet."""
        ledger, _ = await asyncio.gather(self._connect_ledger(), self.supervisor.start())
        pending = PendingErasures(Path(self.settings.cache_dir), self.settings.redis_url)
        assembly = Assembly(
            model=self.model,
            stages=self._stages(),
            ledger=ledger,
            tracing=self.tracing,
            metrics=self.metrics,
            replica=self.settings.replica,
            ledger_hold_s=self.settings.ledger_hold_s,
            rebuild_ahead=self.settings.rebuild_ahead,
            stages_of=self._stages_of(),
            address=self.settings.address,
            pod_uid=self.settings.pod_uid,
        )
        self.sessions = SessionRegistry(
            assembly,
            ledger,
            self.roster,
            lambda: self.hindrance is None,
            placed=bool(self.settings.pod_uid),
            keep_erasure=pending.add,
        )
        reconciler = Reconciler(assembly.stages, self.roster.ids)
        self._reach = LedgerReach(ledger.ping, self._on_ledger_change)
        self._background = (
            asyncio.create_task(self._reach.run(), name="ledger reach"),
            asyncio.create_task(reconciler.run(), name="reconciler"),
            asyncio.create_task(keep_finishing_erasures(ledger, pending), name="erasures"),
        )
        log.info(
            "ready", extra={"fields": {"seconds": round(time.monotonic() - self.started_at, 1)}}
        )

    async def drain(self, grace_s: float) -> None:
        """Park all sessions, at the end of their turn or at the grace's end; returns when none is
        left or none will go any more. None starts from now on."""
        if self.sessions is not None:
            self.sessions.departures.drain(grace_s)
            if not await self.sessions.departures.drained():
                log.warning("%d sessions did not park in time", len(self.roster.live))

    async def stop(self) -> None:
        """Let go of the sessions (their ledgers stay open), then end the stages."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self.sessions is not None:
            await self.sessions.close()
        await self.supervisor.stop()
        if self.ledger is not None:
            await self.ledger.close()
        await asyncio.gather(
            asyncio.to_thread(self.tracing.close, TELEMETRY_CLOSE_MS),
            asyncio.to_thread(self.metrics.close, TELEMETRY_CLOSE_MS),
        )

    @property
    def hindrance(self) -> str | None:
        """What keeps this replica from taking any call. A ledger that was there and is away is
        none: each call is refused by that name, and sessions go on waiting for it."""
        stage = self._stage_under_way
        if stage is not None:
            return f"{stage.stage}: {stage.state}: {stage.reason}"
        return "ledger: connecting" if self.sessions is None else None

    @property
    def problem(self) -> str | None:
        """What keeps this replica from serving, None when it serves."""
        return self.hindrance or ("ledger: away" if self._ledger_went else None)

    @property
    def waits_for(self) -> str | None:
        """The same for strangers: which part, and its state, never why."""
        stage = self._stage_under_way
        return self.problem if stage is None else f"{stage.stage}: {stage.state}"

    @property
    def ledger_away(self) -> bool:
        """Whether nothing but the ledger keeps this replica from serving."""
        return (self.ledger is None or self._ledger_went) and self._stage_under_way is None

    @property
    def _ledger_went(self) -> bool:
        return self._reach is not None and self._reach.away

    @property
    def _stage_under_way(self) -> StageReport | None:
        """The first one that is not ready."""
        reports = (self.supervisor.report(stage) for stage in STAGES)
        return next((each for each in reports if each.state is not StageState.READY), None)

    @property
    def draining(self) -> bool:
        return self.sessions is not None and self.sessions.departures.draining

    def hello(self) -> dict[str, Any]:
        """First line of the feed."""
        return {
            "kind": "hello",
            "version": ADMIN_VERSION,
            "replica": self.settings.replica,
            POD_UID: self.settings.pod_uid,
            "podName": self.settings.pod_name,
            "modelName": self.settings.model_name,
            "slots": self.settings.slots,
            "freeSlots": self.roster.free_slots,
            "draining": self.draining,
            "ready": self.problem is None,
            "ledgerAway": self.ledger_away,
            "understands": UNDERSTANDS,
        }

    async def attach(self, session: str, token: str, last_sequence: int | None) -> Attachment:
        """`SessionPort` for the doors: refuses by name while this replica is not ready."""
        if self.sessions is None:
            raise ClientError(Code.NOT_READY)
        return await self.sessions.attach(session, token, last_sequence)

    async def _connect_ledger(self) -> Ledger:
        outage = LedgerOutage(log)
        while True:
            try:
                options = LedgerOptions(durability=self.settings.ledger_durability)
                self.ledger = await Ledger.connect(self.settings.redis_url, options)
            except LedgerUnavailable as error:
                outage.failed(error.reason)
                await asyncio.sleep(LEDGER_RETRY_S)
            else:
                outage.answered()
                return self.ledger

    def _stages(self) -> StageSet:
        link = self.supervisor.link
        return StageSet(
            encoder=EncoderClient(link("encoder")),
            thinker=ThinkerClient(link("thinker")),
            talker=TalkerClient(link("talker")),
            code2wav=Code2WavClient(link("code2wav")),
            thinker_spare=SpareSeats(self.settings.rebuild_seats),
            talker_spare=SpareSeats(self.settings.rebuild_seats),
        )

    def _stages_of(self) -> StagesOf:
        """What stands between a session and its stages: a recorder, where one is wanted."""
        folder = self.settings.contract_tape_dir
        if not folder:
            return as_they_are
        recorder = Recorder(Path(folder), self.model.vocabulary, self.model.max_talker_tokens)
        return recorder.stages_of

    def _on_ledger_change(self, reachable: bool) -> None:
        self.metrics.ledger_reachable(reachable)
        self.roster.changed()  # the feed says at once whether this replica is ready

    def _on_stage_health(self, health: HealthReport) -> None:
        preemptions = health.limits.get("preemptions")
        if preemptions is not None:
            self.metrics.preemptions(StageName(health.stage), preemptions)

    def _on_stage_report(self, report: StageReport) -> None:
        fields = {
            "stage": report.stage,
            "state": report.state,
            "generation": report.generation,
            "elapsed_s": round(report.elapsed_s, 1),
        }
        before = self._stage_states.get(report.stage)
        self._stage_states[report.stage] = report.state
        if before is StageState.READY and report.state is StageState.RESTARTING:
            self.metrics.stage_restarted(StageName(report.stage))
            log.warning("stage lost: %s", report.reason, extra={"fields": fields})
        elif report.state is before:
            log.debug("stage still %s", report.state, extra={"fields": fields})
        else:
            log.info("stage %s", report.state, extra={"fields": fields})


@dataclass(frozen=True)
class SidecarApps:
    """admin: of the admin port; None where the admin API is beside the door."""

    sidecar: Sidecar
    public: FastAPI
    admin: FastAPI | None


def create_apps(
    settings: SidecarSettings, on_failed_start: Callable[[BaseException], None]
) -> SidecarApps:
    """The HTTP applications. Raises CheckpointError for a checkpoint that cannot be served, OSError
    and ValueError for the file of the admin token.

    on_failed_start: a stage gave up, or the ledger is of a wrong kind; it will never be ready.
    """
    token = admin_token(settings)
    sidecar = Sidecar(settings, load_model(settings))
    voices = GivenVoices(
        Path(settings.given_voices_dir),
        Path(settings.checkpoint),
        sidecar.model.config.token2wav,
        sidecar.model.given,
        lambda: given_voices_in_use(
            sidecar.roster, sidecar.sessions.expected if sidecar.sessions else ()
        ),
        settings.slots,
    )
    router = admin_router(
        lambda: sidecar.sessions, lambda: sidecar.hindrance is None, sidecar.feed, voices
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        def started(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("start failed: %s", error)
                on_failed_start(error)

        starting = asyncio.create_task(sidecar.start())
        starting.add_done_callback(started)
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await sidecar.stop()

    public = _application("Duplex sidecar", lifespan)
    _serve_public(public, sidecar)
    strangers = bool(settings.admin_token or settings.admin_token_file) and not settings.is_loopback
    public.add_middleware(
        AdminGuard, token=token, guarded=guards_status if strangers else guards_admin
    )
    if not settings.admin_port:
        public.include_router(router)
        return SidecarApps(sidecar, public, None)
    admin = _application("Duplex admin", None)
    admin.include_router(router)
    admin.add_middleware(AdminGuard, token=token, guarded=guards_all)
    return SidecarApps(sidecar, public, admin)


def admin_token(settings: SidecarSettings) -> AdminToken:
    """Raises OSError and ValueError when there is no token in its file."""
    if settings.admin_token_file:
        return TokenFile(file_reader(Path(settings.admin_token_file)))
    return FixedToken(settings.admin_token)


def _application(
    title: str, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None
) -> FastAPI:
    app = FastAPI(title=title, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    return app


def _serve_public(app: FastAPI, sidecar: Sidecar) -> None:
    """The realtime door, and what says how the replica is."""

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(ledger: str = "") -> JSONResponse:
        """ledger: "any" asks whether it is up, wherever the ledger is."""
        told = sidecar.problem if sidecar.settings.is_loopback else sidecar.waits_for
        if ledger == "any" and sidecar.ledger_away:
            told = None
        problem = "draining" if sidecar.draining else told
        return JSONResponse(
            {
                "ready": problem is None,
                "waiting_for": problem,
                "replica": sidecar.settings.replica,
            },
            200 if problem is None else 503,
        )

    @app.get("/statusz")
    async def statusz() -> HTMLResponse:
        return HTMLResponse(status_page(sidecar_status(sidecar)))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(sidecar.metrics.prometheus_page(), media_type=PROMETHEUS_CONTENT_TYPE)

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await serve_realtime(websocket, sidecar, sidecar.settings.model_name)

    @app.get("/v1/realtime")
    async def plain() -> JSONResponse:
        error = {"code": NOT_SERVED, "message": "dial /v1/realtime as a WebSocket"}
        return JSONResponse({"error": error}, 426, {"upgrade": "websocket"})

    @app.websocket("/{path:path}")
    async def elsewhere(websocket: WebSocket) -> None:
        error = {"code": NOT_SERVED, "message": "the door is at /v1/realtime"}
        await websocket.send_denial_response(JSONResponse({"error": error}, 404))

    _ = (livez, readyz, statusz, metrics, realtime, plain, elsewhere)


def sidecar_status(sidecar: Sidecar) -> dict[str, Any]:
    """What `/statusz` shows."""
    return {
        "replica": sidecar.settings.replica,
        "model": sidecar.settings.model_name,
        "checkpoint": sidecar.model.fingerprint,
        "uptime_s": round(time.monotonic() - sidecar.started_at, 1),
        "problem": "draining" if sidecar.draining else sidecar.problem,
        "free_slots": sidecar.roster.free_slots,
        "near_real_time_ratio": round(sidecar.metrics.near_real_time_ratio(), 3),
        "stages": [sidecar.supervisor.report(stage) for stage in STAGES],
        "sessions": [session_view(entry.actor) for entry in sidecar.roster.live.values()],
    }
