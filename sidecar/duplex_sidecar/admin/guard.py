"""In front of what is not everybody's: the token, then a bound on the body; before anything is read
of it. Every answer behind it names the version of the admin API.
"""

from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duplex_api.admin import ADMIN_PREFIX, ADMIN_VERSION, ADMIN_VERSION_HEADER
from duplex_sidecar.admin.tokens import AdminToken
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

STATUS_PATHS = ("/metrics", "/statusz")
MAX_BODY_BYTES = 2 * 1024 * 1024
"""A manifest and a voice file."""


def error_body(
    code: ErrorCode, message: str, param: str | None = None
) -> dict[str, dict[str, object]]:
    """The typed body of every refusal that is not about a manifest's fields."""
    entry = ERRORS[code]
    error: dict[str, object] = {
        "code": code,
        "type": entry.type,
        "message": message,
        "param": param,
        "retryable": entry.retryable,
    }
    return {"error": error}


def guards_admin(path: str) -> bool:
    return path.startswith(ADMIN_PREFIX)


def guards_status(path: str) -> bool:
    """Where strangers can reach the port, numbers and names of sessions are not theirs."""
    return path.startswith((ADMIN_PREFIX, *STATUS_PATHS))


def guards_all(_: str) -> bool:
    return True


class AdminGuard:
    """ASGI middleware. guarded: which paths of this application want the token."""

    def __init__(self, app: ASGIApp, token: AdminToken, guarded: Callable[[str], bool]) -> None:
        self._app = app
        self._token = token
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers, send = Headers(scope=scope), _versioned(send)
        if not self._authorized(headers):
            message = "the admin token is missing or wrong"
            answer = JSONResponse(error_body(ErrorCode.UNAUTHORIZED, message), 401)
            await answer(scope, receive, send)
            return
        if headers.get(ADMIN_VERSION_HEADER, ADMIN_VERSION) != ADMIN_VERSION:
            message = f"this release speaks version {ADMIN_VERSION} of the admin API"
            body = {"error": {"code": "unsupported_version", "message": message}}
            await JSONResponse(body, 400)(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            message = f"a body has at most {MAX_BODY_BYTES} bytes"
            answer = JSONResponse(error_body(ErrorCode.EVENT_TOO_LARGE, message), 413)
            await answer(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    def _authorized(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return self._token.matches(given) and scheme.lower() == "bearer"


def _versioned(send: Send) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[ADMIN_VERSION_HEADER] = ADMIN_VERSION
        await send(message)

    return send_with_version


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None when it is too long. A client that leaves ends it."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
