"""What the gateway reads from and writes to the ledger: route records and leases, the wake stream,
and which of a session's calls is the newest."""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

from pydantic import ValidationError

from duplex_api.ledger_outage import SETTLED_S, LedgerOutage
from duplex_api.routes import (
    WAKE_FIELD,
    WAKE_MOST_ENTRIES,
    WAKE_STREAM,
    RouteRecord,
    call_key,
    route_key,
)
from duplex_gateway.decide import LeaseView
from duplex_sidecar.ledger.connection import Command, Connection
from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable
from duplex_sidecar.ledger.keys import session_keys

log = logging.getLogger(__name__)

CALL_KEPT_S = 24 * 3600
MAX_TOKEN_CHARACTERS = 512
_MARK_CHARACTERS = 16
"""Of the hash of the token that a call came with, in its mark."""
_META_FIELDS = ("fence", "until", "address", "phase", "reason", "token")
_NO_HASH = "0" * 64
"""Compared with where there is nothing to compare with, so that both take the same time."""
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):[0-9]{1,5}")


class Directory:
    """Every method raises `LedgerError`, usually `LedgerUnavailable`; the log has it by then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reads = LedgerOutage(log, settled_s=SETTLED_S)
        self._writes = LedgerOutage(log, verb="take what is written", settled_s=SETTLED_S)

    async def close(self) -> None:
        await self._connection.close()

    async def find(self, session: str) -> tuple[RouteRecord | None, LeaseView | None, str]:
        """(route record, lease, mark of the newest call), each None or "" where the ledger has none
        of them. Raises ValueError on a name that no session has."""
        commands: list[Command] = [
            ("HGETALL", route_key(session)),
            ("HMGET", session_keys(session).meta, *_META_FIELDS),
            ("GET", call_key(session)),
            ("TIME",),
        ]
        with _told(self._reads):
            route, meta, mark, now = await self._connection.read_many(session, commands)
        return (
            _route_of(cast("dict[bytes, bytes]", route)),
            _lease_of(cast("list[bytes | None]", meta), _time_ms(now)),
            (mark or b"").decode(),
        )

    async def leases(self, sessions: Sequence[str]) -> list[LeaseView | None]:
        """Of many sessions in one round trip."""
        commands: list[Command] = [("TIME",)]
        commands += [("HMGET", session_keys(name).meta, *_META_FIELDS) for name in sessions]
        with _told(self._reads):
            now, *metas = await self._connection.read_many("", commands)
        return [_lease_of(cast("list[bytes | None]", meta), _time_ms(now)) for meta in metas]

    async def wake(self, session: str) -> None:
        """Tell the operator that a client waits for a session which nobody runs."""
        with _told(self._writes):
            await self._connection.read(
                session,
                ("XADD", WAKE_STREAM, "MAXLEN", "~", WAKE_MOST_ENTRIES, "*", WAKE_FIELD, session),
            )

    async def claim_call(self, session: str, token: str) -> str:
        """A mark that makes this call the session's newest, for all gateways. A ledger that takes
        no writes costs nobody a call: then there is no mark ("")."""
        mark = f"{secrets.token_hex(8)}.{_sha256(token)[:_MARK_CHARACTERS]}"
        try:
            with _told(self._writes):
                await self._connection.read(
                    session, ("SET", call_key(session), mark, "EX", CALL_KEPT_S)
                )
        except LedgerUnavailable:
            raise
        except LedgerError:
            return ""
        return mark


async def connect_directory(url: str, retry_s: float) -> Directory:
    """Waits for a ledger that is not there yet. Raises LedgerUnsuitable."""
    outage = LedgerOutage(log)
    while True:
        try:
            connection = await Connection.connect(
                url, call_timeout_ms=1_000, load_timeout_ms=2_000, connections=16
            )
        except LedgerUnavailable as error:
            outage.failed(error.reason)
            await asyncio.sleep(retry_s)
        else:
            outage.answered()
            return Directory(connection)


@contextmanager
def _told(outage: LedgerOutage) -> Generator[None]:
    """It hears how it went."""
    try:
        yield
    except LedgerError as error:
        outage.failed(error.reason)
        raise
    outage.answered()


def token_matches(token: str, route: RouteRecord | None, lease: LeaseView | None) -> bool:
    """In the same time whether the session is known or not, and whatever the token is."""
    acceptable = 0 < len(token) <= MAX_TOKEN_CHARACTERS
    given = _sha256(token)
    current, following = _tokens_let_in(route, lease)
    matches = hmac.compare_digest(given, current) | hmac.compare_digest(given, following)
    return matches and acceptable and route is not None


def is_newer(mark: str, own: str, route: RouteRecord | None, lease: LeaseView | None) -> bool:
    """Whether `mark`, the session's newest call's, ends the call marked `own`. It does not where it
    came with a token that has been withdrawn: nobody else talks to the session by that."""
    if not own or not mark or mark == own:
        return False
    of_token = mark.partition(".")[2]
    if route is None or not of_token:
        return True
    return any(good.startswith(of_token) for good in _tokens_let_in(route, lease))


def _tokens_let_in(route: RouteRecord | None, lease: LeaseView | None) -> tuple[str, str]:
    """sha256 of the tokens that are good now, `_NO_HASH` in the place of those that are not. The
    operator notices that the newer one has come into use later than the ledger has it."""
    if route is None:
        return _NO_HASH, _NO_HASH
    current, following = route.token_sha256, route.token_sha256_next
    if following is not None and lease is not None and lease.token_sha256 == following:
        current = _NO_HASH
    return current, following or _NO_HASH


def _sha256(token: str) -> str:
    return hashlib.sha256(token[:MAX_TOKEN_CHARACTERS].encode(errors="replace")).hexdigest()


def _route_of(stored: dict[bytes, bytes]) -> RouteRecord | None:
    """A record that cannot be read lets nobody in."""
    known = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in stored.items()
    }
    try:
        return RouteRecord.from_hash(known)
    except ValidationError as error:
        log.error(
            "route record cannot be read", extra={"fields": {"problems": error.error_count()}}
        )
        return None


def _lease_of(meta: list[bytes | None], now_ms: int) -> LeaseView | None:
    if meta[3] is None:
        return None
    texts = [(value or b"").decode(errors="replace") for value in meta]
    until_ms = int(texts[1]) if texts[1].isdigit() else 0
    return LeaseView(
        fence=int(texts[0]) if texts[0].isdigit() else 0,
        remaining_ms=until_ms - now_ms,
        address=texts[2] if _ADDRESS.fullmatch(texts[2]) else "",
        phase=texts[3],
        reason=texts[4],
        token_sha256=texts[5],
    )


def _time_ms(answer: object) -> int:
    seconds, micros = cast("tuple[int, int]", answer)
    return int(seconds) * 1000 + int(micros) // 1000
