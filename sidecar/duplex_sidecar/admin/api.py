"""What an operator, or `duplex run`, may ask of this replica. Every call needs the admin token.

PUT    /admin/v1/sessions/{session}       runs a session here; the same call again, the same answer
GET    /admin/v1/sessions                 GET /admin/v1/sessions/{session}
POST   /admin/v1/sessions/{session}/park  lets it wait in the ledger
POST   /admin/v1/sessions/{session}/prepare    makes ready for it while another replica runs it
POST   /admin/v1/sessions/{session}/hand-over  gives it to a replica that is prepared
DELETE /admin/v1/sessions/{session}       ends it for good
POST   /admin/v1/erase/{session}          erases its ledger
POST   /admin/v1/drain                    parks all sessions and takes no new one
POST   /admin/v1/dead-replicas            proof of death: breaks a replica's, or a pod's, leases
GET    /admin/v1/feed                     what happens here, as JSON lines
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import (
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from duplex_api.admin import (
    ADMIN_PREFIX,
    GRACE_SECONDS,
    POD_UID,
    RESUME,
    TOKEN_HASH,
    VOICE_FILE,
)
from duplex_api.given_voices import MAX_GIVEN_VOICE_BYTES, given_voice_name, is_given
from duplex_api.manifest import ManifestError, load_manifests
from duplex_api.pool import PoolSpec
from duplex_api.problems import Problem
from duplex_api.resolve import UnknownPresetError
from duplex_api.session import DuplexSession, Voice
from duplex_api.window import WindowConfigError
from duplex_sidecar.admin.feed import Feed, FeedResponse
from duplex_sidecar.admin.guard import error_body
from duplex_sidecar.admin.views import session_view
from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.ledger.token import token_sha256
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.arrivals import Claim
from duplex_sidecar.session.departures import HAND_OVER_GRACE_S
from duplex_sidecar.session.given_voices import GivenVoices
from duplex_sidecar.session.handing_over import HandOver
from duplex_sidecar.session.opening import UnservedManifestError
from duplex_sidecar.session.refusals import PlacementRefused, Refusal
from duplex_sidecar.session.registry import SessionRegistry, name_complaint

log = logging.getLogger(__name__)

MAX_MANIFEST_CHARACTERS = 256 * 1024
MAX_GRACE_S = 3600.0
INVALID_REQUEST = "invalid_request"
NOT_SERVED = "not_served"
MAX_HAND_OVER_GRACE_S = 20.0
"""Below the time that an offer holds."""
MOST_TOLD_FIELDS = 8
_FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_HTTP_STATUS = {
    ErrorCode.UNAUTHORIZED: 403,
    ErrorCode.SESSION_NOT_FOUND: 404,
    ErrorCode.SESSION_ENDED: 410,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.NOT_READY: 503,
    ErrorCode.LEDGER_UNAVAILABLE: 503,
    ErrorCode.LEASE_LOST: 503,
}
_REFUSAL_STATUS = {
    Refusal.NO_SLOT: 429,
    Refusal.STALE_FENCE: 409,
    Refusal.MANIFEST_CONFLICT: 409,
    Refusal.DRAINING: 503,
    Refusal.SESSION_BUSY: 409,
    Refusal.NOT_PREPARED: 409,
    Refusal.LEDGER_LOST: 410,
}
_MANIFEST_ERRORS = (ManifestError, WindowConfigError, UnknownPresetError, UnservedManifestError)


async def _session_name(session: str) -> str:
    if (complaint := name_complaint(session)) is not None:
        raise ClientError(ErrorCode.INVALID_EVENT, complaint, "session")
    return session


SessionName = Annotated[str, Depends(_session_name)]
"""Of a path: a name that the ledger has keys for."""


class _Body(BaseModel):
    """Fields of a newer release are ignored, as they are in answers: a new operator works with this
    sidecar. What must not be ignored it sends only where the hello says that it is understood."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _tell_of_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            names = cast("dict[str, Any]", given).keys() - known - cls.model_fields.keys()
            if names:
                told = sorted(filter(_FIELD_NAME.fullmatch, names))[:MOST_TOLD_FIELDS]
                fields = {"unknown": len(names), "names": " ".join(told)}
                log.info("unknown fields of a request are ignored", extra={"fields": fields})
        return given


class OpenSession(_Body):
    manifest: Annotated[str, Field(min_length=1, max_length=MAX_MANIFEST_CHARACTERS)]
    """A DuplexSession as YAML or JSON text, exactly as `kubectl apply` takes it."""
    token: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    token_hash: Annotated[
        Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None, Field(alias=TOKEN_HASH)
    ] = None
    """sha256 of the token, in hex."""
    voice_file: Annotated[Base64Bytes | None, Field(alias=VOICE_FILE)] = None
    """The file of the voice that the manifest names, in base64; where the name is `given-...`."""
    fence: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Issued by an operator: only a larger one than the ledger's is taken."""
    resume: Annotated[bool, Field(alias=RESUME)] = False
    """It has a history: refused where the ledger knows nothing of it."""

    @field_validator("voice_file")
    @classmethod
    def _bounded(cls, content: bytes | None) -> bytes | None:
        if content is not None and len(content) > MAX_GIVEN_VOICE_BYTES:
            raise ValueError(f"a voice file has at most {MAX_GIVEN_VOICE_BYTES} bytes")
        return content

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if (self.token is None) == (self.token_hash is None):
            raise ValueError("exactly one of token and tokenHash is needed")
        return self

    def claim(self) -> Claim:
        digest = self.token_hash or token_sha256(self.token or "")
        return Claim(digest, self.fence, self.resume)


class PrepareSession(OpenSession):
    """With a fence: under which it is to run here."""

    @model_validator(mode="after")
    def _has_fence(self) -> Self:
        if self.fence is None:
            raise ValueError("a fence is needed")
        return self


class HandOverSession(_Body):
    target: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the replica that is prepared."""
    fence: Annotated[int, Field(ge=1, le=2**53)]
    """Under which it was prepared."""
    grace_s: Annotated[float, Field(alias=GRACE_SECONDS, ge=0, le=MAX_HAND_OVER_GRACE_S)] = (
        HAND_OVER_GRACE_S
    )
    """How long the end of the present turn is waited for."""


class EndSession(_Body):
    reason: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""


class ParkSession(_Body):
    """Nothing to say."""


class Drain(_Body):
    grace_s: Annotated[float, Field(alias=GRACE_SECONDS, ge=0, le=MAX_GRACE_S)]


class DeadReplica(_Body):
    """Exactly one of the two."""

    replica: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    pod_uid: Annotated[
        Annotated[str, Field(min_length=1, max_length=64)] | None, Field(alias=POD_UID)
    ] = None

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if (self.replica is None) == (self.pod_uid is None):
            raise ValueError("exactly one of replica and podUID is needed")
        return self


def admin_router(
    registry: Callable[[], SessionRegistry | None],
    is_ready: Callable[[], bool],
    feed: Feed,
    voices: GivenVoices,
) -> APIRouter:
    """registry: None until the ledger is connected. `AdminGuard` stands in front of it."""

    def sessions() -> SessionRegistry:
        found = registry()
        if found is None:
            raise ClientError(ErrorCode.NOT_READY)
        return found

    router = APIRouter(prefix=ADMIN_PREFIX)
    reading = asyncio.Lock()
    """One manifest is read at a time: threads that compute take turns with the event loop."""

    async def read(body: OpenSession) -> tuple[DuplexSession, PoolSpec | None]:
        if not is_ready():
            raise ClientError(ErrorCode.NOT_READY)
        async with reading:
            # A text as long as may be takes seconds to read; sessions go on meanwhile.
            manifests = await asyncio.to_thread(load_manifests, body.manifest)
        manifest = manifests.only_session()
        await asyncio.to_thread(_take_voice, voices, manifest.spec.voice, body.voice_file)
        return manifest, manifests.pool_of(manifest)

    @router.put("/sessions/{session}")
    async def open_session(session: SessionName, body: OpenSession) -> dict[str, Any]:
        manifest, pool = await read(body)
        return session_view(await sessions().open(session, manifest, body.claim(), pool))

    @router.get("/sessions")
    async def list_sessions() -> dict[str, Any]:
        live = [session_view(actor) for actor in sessions().live.values()]
        return {"sessions": live, "freeSlots": sessions().free_slots}

    @router.get("/sessions/{session}")
    async def get_session(session: SessionName) -> dict[str, Any]:
        actor = sessions().live.get(session)
        if actor is None:
            raise ClientError(ErrorCode.SESSION_NOT_FOUND, "the session does not run here")
        return session_view(actor)

    @router.post("/sessions/{session}/park")
    async def park_session(session: SessionName, body: ParkSession) -> dict[str, Any]:
        _ = body
        await sessions().departures.park(session)
        return {"parked": True}

    @router.post("/sessions/{session}/prepare")
    async def prepare_session(session: SessionName, body: PrepareSession) -> dict[str, Any]:
        manifest, pool = await read(body)
        units = await sessions().prepare(session, manifest, body.claim(), pool)
        return {"prepared": True, "fence": body.fence, "units": units}

    @router.post("/sessions/{session}/hand-over")
    async def hand_over_session(session: SessionName, body: HandOverSession) -> dict[str, Any]:
        order = HandOver(body.target, body.fence)
        await sessions().departures.hand_over(session, order, grace_s=body.grace_s)
        return {"handedOver": True, "fence": body.fence}

    @router.delete("/sessions/{session}")
    async def end_session(session: SessionName, body: EndSession | None = None) -> dict[str, Any]:
        return {"ended": await sessions().end(session, body.reason if body else "")}

    @router.post("/erase/{session}")
    async def erase_session(session: SessionName) -> dict[str, Any]:
        await sessions().departures.erase(session)
        return {"erased": True}

    @router.post("/drain")
    async def drain(body: Drain) -> dict[str, Any]:
        sessions().departures.drain(body.grace_s)
        return {"draining": True, "sessions": len(sessions().live)}

    @router.post("/dead-replicas")
    async def declare_dead(body: DeadReplica) -> dict[str, Any]:
        sessions().declare_dead(body.replica or body.pod_uid or "")
        return body.model_dump(by_alias=True, exclude_none=True)

    @router.get("/feed")
    async def listen() -> Response:
        if feed.full:
            raise PlacementRefused(Refusal.NO_SLOT, "too many listen to this feed")
        return FeedResponse(feed)

    _ = (open_session, list_sessions, get_session, park_session, end_session, erase_session)
    _ = (prepare_session, hand_over_session, drain, declare_dead, listen)
    return router


def _take_voice(voices: GivenVoices, named: Voice | None, content: bytes | None) -> None:
    """Raises UnservedManifestError unless file and name belong together."""
    name = named.name if named is not None else None
    expected = None if content is None else given_voice_name(content)
    if expected is None and not (name and is_given(name)):
        return
    if content is None or name != expected:
        message = "a voice of this name comes with its file, any other comes without one"
        raise UnservedManifestError((Problem("spec.voice.name", message, ""),))
    try:
        voices.take(content)
    except CheckpointError as error:
        problem = Problem("spec.voice", f"is no usable voice file: {error.reason}", "")
        raise UnservedManifestError((problem,)) from error


def install_error_handlers(app: FastAPI) -> None:
    """Typed bodies: {"error": {code, message, param}} or {"error": {code, message, problems}}."""

    async def client_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ClientError)
        body = error_body(error.code, error.detail, error.param)
        return JSONResponse(body, _HTTP_STATUS.get(error.code, 400))

    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, PlacementRefused)
        found = error_body(error.code, error.detail)
        body = {"error": found["error"] | {"code": error.refusal}}
        return JSONResponse(body, _REFUSAL_STATUS[error.refusal])

    async def bad_request(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # What was sent is not sent back: it may be a token.
        problems = [Problem(_path(found), found["msg"], "") for found in error.errors()]
        return _told(INVALID_REQUEST, problems)

    async def not_served(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:
            # A body that is no JSON in a way of its own: nested without end, not UTF-8.
            return _told(INVALID_REQUEST, [Problem("", "the body cannot be read as JSON", "")])
        body = {"error": {"code": NOT_SERVED, "message": error.detail}}
        return JSONResponse(body, error.status_code, error.headers)

    async def bad_manifest(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, _MANIFEST_ERRORS)
        return _told(getattr(error, "code", "invalid_manifest"), error.problems)

    app.add_exception_handler(ClientError, client_error)
    app.add_exception_handler(PlacementRefused, refused)
    app.add_exception_handler(RequestValidationError, bad_request)
    app.add_exception_handler(HTTPException, not_served)
    for kind in _MANIFEST_ERRORS:
        app.add_exception_handler(kind, bad_manifest)


def _path(found: dict[str, Any]) -> str:
    """Of one of pydantic's errors, within the body; of a body that is no JSON there is none."""
    return (
        "" if found["type"] == "json_invalid" else ".".join(str(part) for part in found["loc"][1:])
    )


def _told(code: str, problems: Sequence[Problem]) -> JSONResponse:
    """message: the first problem, and how many there are beside it."""
    message = "".join(str(replace(problem, line=None)) for problem in problems[:1])
    if len(problems) > 1:
        message += f"; and {len(problems) - 1} more, see problems"
    told = [
        {"path": problem.path, "message": problem.message, "allowed": problem.allowed}
        for problem in problems
    ]
    return JSONResponse({"error": {"code": code, "message": message, "problems": told}}, 422)
