"""How a call of the API server fails: one class for each thing that a caller can do about it."""

import msgspec

LONGEST_MESSAGE = 1024


class ApiError(Exception):
    """status: HTTP, 0 when no answer came. reason: Kubernetes' one word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}"[:LONGEST_MESSAGE])
        self.status = status
        self.reason = reason
        self.message = message[:LONGEST_MESSAGE]


class ConflictError(ApiError):
    """409: the object changed since it was read, or exists already. Observe again, decide again."""


class MissingError(ApiError):
    """404, or 410 for an object: it is gone. For a create: its namespace is gone or ending."""


class RefusedError(ApiError):
    """Any other 4xx: the same request will be refused again."""


class UnavailableError(ApiError):
    """No usable answer after all attempts: later, with backoff."""


class NotLeadingError(Exception):
    """Another operator may be leading: nothing may be written now."""


class _Status(msgspec.Struct):
    """Kubernetes' object of that name."""

    reason: str = ""
    message: str = ""


def failure_of(status: int, content: bytes) -> ApiError:
    """What an answer other than 2xx means. content: of any kind, a proxy's page for example."""
    try:
        body = msgspec.json.decode(content, type=_Status)
    except msgspec.MsgspecError:
        body = _Status(message=content[:256].decode(errors="replace"))
    kind = {404: MissingError, 409: ConflictError, 410: MissingError}.get(
        status, RefusedError if status < 500 and status not in (401, 429) else UnavailableError
    )
    return kind(status, body.reason or str(status), body.message)
