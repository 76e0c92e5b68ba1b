"""What an operator, or `duplex run`, may ask of this replica. Every call needs the admin token.

PUT    /admin/v1/sessions/{session}     {"manifest": "...", "token": "..."}   idempotent
GET    /admin/v1/sessions               GET /admin/v1/sessions/{session}
DELETE /admin/v1/sessions/{session}     ends it for good
POST   /admin/v1/dead-replicas          {"replica": "..."}   proof of death: breaks its leases
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from duplex_api.manifest import ManifestError, load_manifest, load_manifests
from duplex_api.problems import Problem
from duplex_api.resolve import UnknownPresetError
from duplex_api.window import WindowConfigError
from duplex_sidecar.admin.guard import ADMIN_PREFIX, error_body
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.actor import SessionActor
from duplex_sidecar.session.opening import UnservedManifestError
from duplex_sidecar.session.registry import SessionRegistry

MAX_MANIFEST_CHARACTERS = 256 * 1024
_HTTP_STATUS = {
    ErrorCode.UNAUTHORIZED: 403,
    ErrorCode.SESSION_NOT_FOUND: 404,
    ErrorCode.SESSION_ENDED: 410,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.NOT_READY: 503,
    ErrorCode.LEDGER_UNAVAILABLE: 503,
}


_MANIFEST_ERRORS = (ManifestError, WindowConfigError, UnknownPresetError, UnservedManifestError)


class OpenSession(BaseModel):
    model_config = ConfigDict(extra="forbid")

    manifest: Annotated[str, Field(min_length=1, max_length=MAX_MANIFEST_CHARACTERS)]
    """A DuplexSession as YAML or JSON text, exactly as `kubectl apply` takes it."""
    token: Annotated[str, Field(min_length=1, max_length=512)]


class DeadReplica(BaseModel):
    model_config = ConfigDict(extra="forbid")

    replica: Annotated[str, Field(min_length=1, max_length=253)]


def session_view(actor: SessionActor) -> dict[str, Any]:
    """Status of one session: numbers and states, never content."""
    conversation, speech = actor.conversation, actor.speech
    return {
        "session": actor.session,
        "phase": actor.phase,
        "attached": actor.attached,
        "units": conversation.seq,
        "windowTokens": conversation.window.prompt_tokens,
        "retainedUnits": len(conversation.window.units),
        "retainedRowBytes": actor.retained_row_bytes,
        "epoch": speech.epoch,
        "turn": speech.turn,
        "lastEventSequence": speech.last_sequence,
        "acknowledgedSample": conversation.framing.received_samples,
    }


def admin_router(
    registry: Callable[[], SessionRegistry | None], is_ready: Callable[[], bool]
) -> APIRouter:
    """registry: None until the ledger is connected. `AdminGuard` stands in front of it."""

    def sessions() -> SessionRegistry:
        found = registry()
        if found is None:
            raise ClientError(ErrorCode.NOT_READY)
        return found

    router = APIRouter(prefix=ADMIN_PREFIX)

    @router.put("/sessions/{session}")
    async def open_session(session: str, body: OpenSession) -> dict[str, Any]:
        if not is_ready():
            raise ClientError(ErrorCode.NOT_READY)
        manifests = load_manifests(body.manifest)
        manifest = load_manifest(body.manifest)
        pool = manifests.pool_of(manifest)
        actor = await sessions().open(session, manifest, body.token, pool)
        return session_view(actor)

    @router.get("/sessions")
    async def list_sessions() -> dict[str, Any]:
        live = [session_view(actor) for actor in sessions().live.values()]
        return {"sessions": live, "freeSlots": sessions().free_slots}

    @router.get("/sessions/{session}")
    async def get_session(session: str) -> dict[str, Any]:
        actor = sessions().live.get(session)
        if actor is None:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND, "the session does not run here")
        return session_view(actor)

    @router.delete("/sessions/{session}")
    async def end_session(session: str) -> dict[str, Any]:
        return {"ended": await sessions().end(session)}

    @router.post("/dead-replicas")
    async def declare_dead(body: DeadReplica) -> dict[str, Any]:
        sessions().declare_dead(body.replica)
        return {"replica": body.replica}

    _ = (open_session, list_sessions, get_session, end_session, declare_dead)
    return router


def install_error_handlers(app: FastAPI) -> None:
    """Typed bodies: {"error": {code, message, param}} or {"error": {code, problems: [...]}}."""

    async def client_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ClientError)
        body = error_body(error.code, error.detail, error.param)
        return JSONResponse(body, _HTTP_STATUS.get(error.code, 400))

    async def bad_request(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # What was sent is not sent back: it may be a token.
        problems = [
            _problem(Problem(".".join(str(part) for part in found["loc"][1:]), found["msg"], ""))
            for found in error.errors()
        ]
        return JSONResponse({"error": {"code": "invalid_request", "problems": problems}}, 422)

    async def bad_manifest(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, _MANIFEST_ERRORS)
        problems = [_problem(problem) for problem in error.problems]
        code = getattr(error, "code", "invalid_manifest")
        return JSONResponse({"error": {"code": code, "problems": problems}}, 422)

    app.add_exception_handler(ClientError, client_error)
    app.add_exception_handler(RequestValidationError, bad_request)
    for kind in _MANIFEST_ERRORS:
        app.add_exception_handler(kind, bad_manifest)


def _problem(problem: Problem) -> dict[str, str | None]:
    return {"path": problem.path, "message": problem.message, "allowed": problem.allowed}
