"""The way out to one pod's sidecar: its admin API and its feed (the pages of the admin API's
version are told by a header both ways).

A refusal is that pod's final answer. No answer says nothing: every call may be repeated.
"""

import base64
import logging
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from duplex_api.admin import (
    ADMIN_PREFIX,
    ADMIN_VERSION,
    ADMIN_VERSION_HEADER,
    GRACE_SECONDS,
    POD_UID,
    RESUME,
    TOKEN_HASH,
    VOICE_FILE,
)
from duplex_operator.feed import MOST_LINE_BYTES, FeedLine, read_line
from duplex_operator.lines import LineTooLongError, lines_of
from duplex_operator.routes import LedgerAwayError

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
CALLS_AT_ONCE = 64
"""Connections to one pod, its feed among them: more than sessions are looked at together. A call
that waited for a connection would be taken for one that nobody answers, and hand-overs, of which
each waits for a turn's end, would be given up for the ninth talker of a pod."""
KEPT_S = 5.0
"""An unused connection: with many pods they are most of the operator's memory."""
TURN_END_S = 4
"""How long a hand-over waits for a turn's end; with the unit and the ledger behind it, it stays
below the time of a call."""
FEED_SILENCE_S = 10.0
"""A feed without a line (not even a beat) for this long is dialled anew."""
MOST_ANSWER_BYTES = 1_048_576


@dataclass(frozen=True, slots=True)
class AdminCredentials:
    """Of one pool. ca_pem empty: the admin ports speak plain HTTP."""

    token: str
    ca_pem: str

    def __repr__(self) -> str:
        return "AdminCredentials(...)"


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """host: an IP. server_name: what its certificate must say."""

    host: str
    port: int
    server_name: str


class SidecarRefusalError(Exception):
    """The sidecar understood and refused. code: its error code, for example `no_slot`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}"[:512])
        self.status = status
        self.code = code
        self.message = message[:512]


class SidecarUnreachableError(Exception):
    """No usable answer: whether the call took effect is unknown."""


def retry_level(error: Exception) -> int:
    """How loud the log says why something is tried again. That the ledger is away is said by
    `routes`, for all sessions together."""
    away = isinstance(error, LedgerAwayError) or (
        isinstance(error, SidecarRefusalError) and error.code == "ledger_unavailable"
    )
    return logging.DEBUG if away else logging.INFO


class _Problem(msgspec.Struct):
    path: str = ""
    message: str = ""


class _ErrorInside(msgspec.Struct):
    code: str = ""
    message: str = ""
    problems: list[_Problem] = []

    @property
    def sentence(self) -> str:
        """`message`; of a manifest's problems the first."""
        told = [f"{each.path}: {each.message}" for each in self.problems[:1]]
        return self.message or "".join(told)


class _ErrorBody(msgspec.Struct):
    error: _ErrorInside = msgspec.field(default_factory=_ErrorInside)


class _EndAnswer(msgspec.Struct):
    ended: bool = False


class SidecarClient:
    """Calls to one pod. Holds one small connection pool; `close` it."""

    def __init__(self, address: AdminAddress, credentials: AdminCredentials) -> None:
        self._address = address
        scheme = "https" if credentials.ca_pem else "http"
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._base = f"{scheme}://{host}:{address.port}{ADMIN_PREFIX}"
        self._server_name = address.server_name if credentials.ca_pem else None
        tls = ssl.create_default_context(cadata=credentials.ca_pem) if credentials.ca_pem else True
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=CALLS_AT_ONCE, keepalive_timeout=KEPT_S),
            headers={
                "Authorization": f"Bearer {credentials.token}",
                ADMIN_VERSION_HEADER: ADMIN_VERSION,
            },
        )

    async def close(self) -> None:
        await self._http.close()

    async def put_session(
        self,
        uid: str,
        manifest: str,
        token_sha256: str,
        fence: int,
        voice_file: bytes | None = None,
        *,
        resume: bool = False,
    ) -> None:
        """Opens or takes up the session there. Repeating it changes nothing.

        voice_file: of the voice that the manifest names, where it is one that has to come along.
        resume: it has a history; without its ledger it is refused (`ledger_lost`). Only for a
        sidecar that understands it.
        """
        body = _order(manifest, token_sha256, fence, voice_file)
        if resume:
            body[RESUME] = True
        await self._call("PUT", f"/sessions/{uid}", body)

    async def prepare(
        self,
        uid: str,
        manifest: str,
        token_sha256: str,
        fence: int,
        voice_file: bytes | None = None,
    ) -> None:
        """Makes ready there for a session that another pod runs. Repeating it prolongs that.
        voice_file: as for `put_session`."""
        body = _order(manifest, token_sha256, fence, voice_file)
        await self._call("POST", f"/sessions/{uid}/prepare", body)

    async def hand_over(self, uid: str, replica: str, fence: int) -> None:
        """Gives it to a replica that is prepared under that fence. Repeating it changes nothing.
        Raises SidecarRefusalError where it goes on there or is not there."""
        body = {"target": replica, "fence": fence, GRACE_SECONDS: TURN_END_S}
        await self._call("POST", f"/sessions/{uid}/hand-over", body)

    async def park(self, uid: str) -> None:
        """Raises SidecarRefusalError `session_busy`."""
        await self._call("POST", f"/sessions/{uid}/park", {})

    async def end(self, uid: str, reason: str) -> bool:
        """Ends it for good. False: the sidecar did not, since another replica owns it, or since
        there is no such session. One that is over is fine."""
        try:
            content = await self._call("DELETE", f"/sessions/{uid}", {"reason": reason})
        except SidecarRefusalError as error:
            if error.status not in (404, 410):
                raise
            return True
        try:
            return msgspec.json.decode(content, type=_EndAnswer).ended
        except msgspec.MsgspecError:
            return False

    async def drain(self, grace_s: float) -> None:
        await self._call("POST", "/drain", {GRACE_SECONDS: round(grace_s)})

    async def declare_dead(self, pod_uid: str) -> None:
        """Proof that every replica of that pod is dead: the sidecar breaks their leases."""
        await self._call("POST", "/dead-replicas", {POD_UID: pod_uid})

    async def declare_replica_dead(self, replica: str) -> None:
        """The same of one start of a sidecar: its pod may live, with another one."""
        await self._call("POST", "/dead-replicas", {"replica": replica})

    async def erase(self, uid: str) -> None:
        """Erases the session's ledger, tombstone first. Repeating it changes nothing."""
        await self._call("POST", f"/erase/{uid}", {})

    async def feed(self) -> AsyncGenerator[FeedLine]:
        """Lines until the sidecar closes. Raises SidecarUnreachableError, SidecarRefusalError."""
        timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_TIMEOUT_S, sock_read=FEED_SILENCE_S
        )
        try:
            async with self._http.get(
                self._base + "/feed",
                timeout=timeout,
                server_hostname=self._server_name,
                max_line_size=MOST_LINE_BYTES,
            ) as answer:
                if answer.status != 200:
                    raise _refusal(answer.status, await answer.content.read(MOST_LINE_BYTES))
                async for line in lines_of(answer.content, MOST_LINE_BYTES):
                    found = read_line(line)
                    if found is not None:
                        yield found
        except (aiohttp.ClientError, TimeoutError, OSError, LineTooLongError) as error:
            raise SidecarUnreachableError(type(error).__name__) from error

    async def _call(self, method: str, path: str, body: Mapping[str, Any]) -> bytes:
        """The answer's body."""
        try:
            async with self._http.request(
                method,
                self._base + path,
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                server_hostname=self._server_name,
            ) as answer:
                content = await answer.content.read(MOST_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SidecarUnreachableError(f"{method}: {type(error).__name__}") from error
        if answer.status < 300:
            return content
        refusal = _refusal(answer.status, content)
        if answer.status >= 500 and not refusal.code:
            raise SidecarUnreachableError(f"{method}: HTTP {answer.status}")
        raise refusal


def _order(
    manifest: str, token_sha256: str, fence: int, voice_file: bytes | None
) -> dict[str, Any]:
    body: dict[str, Any] = {"manifest": manifest, TOKEN_HASH: token_sha256, "fence": fence}
    if voice_file is not None:
        body[VOICE_FILE] = base64.b64encode(voice_file).decode()
    return body


def _refusal(status: int, content: bytes) -> SidecarRefusalError:
    try:
        error = msgspec.json.decode(content, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = _ErrorInside()
    return SidecarRefusalError(status, error.code, error.sentence)
