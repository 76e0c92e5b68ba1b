"""A sidecar of the first release, as its operator met it: no hand-overs, no voice files, no word of
what it understands, and a field that it does not know refuses the whole request."""

import json
from typing import Any

from aiohttp import web
from support.stand_in_sidecar import StandInSession, StandInSidecar

_KNOWN: dict[str, frozenset[str]] = {
    "PUT": frozenset(("manifest", "token", "tokenHash", "fence")),
    "DELETE": frozenset(("reason",)),
    "park": frozenset(),
    "drain": frozenset(("graceSeconds",)),
    "dead-replicas": frozenset(("replica", "podUID")),
}
_LATER = frozenset(("prepare", "hand-over"))
_SINCE_GONE = {"sinceGone": {"deep": [1]}}
"""A field of answers and of the feed: a caller leaves alone what it does not know."""


class FirstRelease(StandInSidecar):
    """refused: requests with a field that it does not know."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.refused: list[dict[str, Any]] = []

    async def obey(self, request: web.Request, handler: Any) -> web.StreamResponse:
        call = request.path.rpartition("/")[2]
        if call in _LATER:
            return web.json_response({"detail": "Not Found"}, status=404)
        known = _KNOWN.get(call, _KNOWN.get(request.method))
        if known is not None and request.can_read_body:
            body = await request.json()
            if not known.issuperset(body):
                self.refused.append(body)
                problems = [{"path": "", "message": "Extra inputs are not permitted"}]
                error = {"code": "invalid_request", "problems": problems}
                return web.json_response({"error": error}, status=422)
        answer = await super().obey(request, handler)
        if isinstance(answer, web.Response):
            told = json.loads(answer.text or "{}") | _SINCE_GONE
            return web.json_response(told, status=answer.status)
        return answer

    def hello(self) -> dict[str, Any]:
        return _without(super().hello(), "understands", "aFieldOfTheNextRelease", "modelName")

    def line(self, session: StandInSession) -> dict[str, Any]:
        counted = ("rebuilds", "lastRebuild", "windowTokens", "audio")
        return _without(super().line(session), *counted) | _SINCE_GONE


def _without(line: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}
