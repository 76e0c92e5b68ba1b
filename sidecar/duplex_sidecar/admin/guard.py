"""In front of the admin API: the token, then a bound on the body; before anything is read of it."""

import hmac

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

ADMIN_PREFIX = "/admin/v1"
MAX_BODY_BYTES = 1024 * 1024


def error_body(code: ErrorCode, message: str, param: str | None = None) -> dict[str, object]:
    """The typed body of every refusal that is not about a manifest's fields."""
    entry = ERRORS[code]
    error = {
        "code": code,
        "type": entry.type,
        "message": message,
        "param": param,
        "retryable": entry.retryable,
    }
    return {"error": error}


class AdminGuard:
    """ASGI middleware. token: empty lets nobody in."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(ADMIN_PREFIX):
            await self._app(scope, receive, send)
            return
        if not self._authorized(Headers(scope=scope)):
            message = "the admin token is missing or wrong"
            answer = JSONResponse(error_body(ErrorCode.UNAUTHORIZED, message), 401)
            await answer(scope, receive, send)
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
        right = hmac.compare_digest(given.encode(), self._token.encode())
        return bool(self._token) and scheme.lower() == "bearer" and right


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
