"""The way out to the ledger's route records, leases and wake stream.

The operator alone writes route records. It reads leases to learn whether a silent pod's sessions
are still owned. No call waits longer than `CALL_TIMEOUT_S`; what fails is `LedgerAwayError`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from redis.exceptions import RedisError

from duplex_api.ledger_outage import SETTLED_S, LedgerOutage
from duplex_api.routes import (
    ROUTE_PATTERN,
    WAKE_FIELD,
    WAKE_STREAM,
    RouteRecord,
    call_key,
    route_key,
    route_uid,
)
from duplex_operator.cancelling import raise_if_cancelled
from duplex_operator.ledger_server import open_ledger

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
WAKE_BLOCK_MS = 2_000
WAKE_BATCH = 100
SCAN_BATCH = 500

_T = TypeVar("_T")


class LedgerAwayError(Exception):
    """Redis did not answer in time."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """held: somebody's lease has not run out; left_ms: when it will. fence: the largest ever taken.
    phase, reason: the ledger's own words."""

    held: bool
    left_ms: int
    fence: int
    phase: str
    reason: str


class Routes:
    """redis_url: as in `ledger_server`. `close` it. That the ledger is away is in the log by the
    time that a caller learns of it."""

    def __init__(self, redis_url: str) -> None:
        self._clients = open_ledger(redis_url, CALL_TIMEOUT_S)
        self._redis = self._clients.redis
        self._outage = LedgerOutage(log, settled_s=SETTLED_S)
        self.calls = 0
        self.failures = 0

    async def close(self) -> None:
        await self._clients.close()

    async def read(self, uid: str) -> RouteRecord | None:
        """None: there is none, or it cannot be read (it is written anew then)."""
        fields = await self._do(lambda: self._redis.hgetall(route_key(uid)))
        try:
            return RouteRecord.from_hash(cast("dict[str, str]", fields))
        except ValidationError:
            log.warning("the route record of %s cannot be read", uid)
            return None

    async def write(self, uid: str, record: RouteRecord, keep_ms: int) -> None:
        """Replaces the record. It expires `keep_ms` from now unless written or touched again."""
        key = route_key(uid)

        async def replace() -> object:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.delete(key)
                pipeline.hset(key, mapping=cast("dict[Any, Any]", record.to_hash()))
                pipeline.pexpire(key, keep_ms)
                return await pipeline.execute()

        await self._do(replace)

    async def drop(self, uid: str) -> None:
        """The record, and what the gateways keep beside it."""
        await self._do(lambda: self._redis.delete(route_key(uid), call_key(uid)))

    async def lease(self, uid: str) -> LeaseView:
        """The session's lease by the ledger server's clock."""

        async def look() -> object:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.time()
                pipeline.hmget(_meta_key(uid), "until", "nonce", "fence", "phase", "reason")
                return await pipeline.execute()

        time_of_day, fields = cast("tuple[tuple[int, int], list[str | None]]", await self._do(look))
        until, nonce, fence, phase, reason = fields
        now_ms = time_of_day[0] * 1000 + time_of_day[1] // 1000
        left_ms = max(0, int(until or 0) - now_ms) if nonce else 0
        return LeaseView(
            held=left_ms > 0,
            left_ms=left_ms,
            fence=int(fence or 0),
            phase=phase or "",
            reason=reason or "",
        )

    async def token_let_in(self, uid: str) -> str:
        """sha256 of the token that lets clients in by the ledger, until a message has come under
        the one that it was offered; "" for a session that has no ledger."""
        return cast("str | None", await self._do(lambda: self._hget(_meta_key(uid), "token"))) or ""

    def _hget(self, key: str, field: str) -> Awaitable[Any]:
        return cast("Awaitable[Any]", self._redis.hget(key, field))

    async def records(
        self, known: Callable[[str], bool] = lambda _: False
    ) -> AsyncIterator[tuple[str, RouteRecord]]:
        """Every route record there is: (session uid, record). Those of `known` uids are passed over
        unread."""
        cursor = 0
        while True:
            found = await self._do(
                lambda at=cursor: self._redis.scan(at, match=ROUTE_PATTERN, count=SCAN_BATCH)
            )
            cursor, keys = cast("tuple[int, list[str]]", found)
            for key in keys:
                uid = route_uid(key)
                if uid is None or known(uid):
                    continue
                record = await self.read(uid)
                if record is not None:
                    yield uid, record
            if cursor == 0:
                return

    async def wakes(self, wake: Callable[[str], None]) -> None:
        """Tells `wake` each uid that a client waits for, from now on, until cancelled. While the
        ledger is away nothing is told; a client that goes on waiting asks again."""
        last = ""
        while True:
            try:
                # By its name, and not "from now on" with each look: one between two would be lost.
                last = last or await self._newest_wake()
                answer = await self._do(
                    lambda at=last: self._redis.xread(
                        {WAKE_STREAM: at}, count=WAKE_BATCH, block=WAKE_BLOCK_MS
                    )
                )
                if not answer:
                    # A stream that begins anew under an earlier clock (a failover, an emptied
                    # server) has names below the one that was heard last.
                    newest = await self._newest_wake()
                    last = newest if _order(newest) < _order(last) else last
            except LedgerAwayError:
                await asyncio.sleep(1.0)
                continue
            for entry, uid in _entries(answer):
                last = entry
                wake(uid)

    async def _newest_wake(self) -> str:
        found = await self._do(lambda: self._redis.xrevrange(WAKE_STREAM, count=1))
        entries = cast("list[tuple[str, dict[str, str]]]", found)
        return entries[0][0] if entries else "0-0"

    async def _do(self, call: Callable[[], Awaitable[_T]]) -> _T:
        self.calls += 1
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await call()
        except (RedisError, OSError, TimeoutError) as error:
            raise_if_cancelled()
            self.failures += 1
            # No text: it may quote the address, and so a password.
            self._outage.failed(type(error).__name__)
            raise LedgerAwayError(type(error).__name__) from error
        raise_if_cancelled()
        self._outage.answered()
        return answer


def _entries(answer: object) -> Iterable[tuple[str, str]]:
    """(entry id, session uid) of an XREAD's answer: [[stream, [[id, fields], ...]], ...]."""
    streams = cast("list[tuple[str, list[tuple[str, dict[str, str]]]]]", answer or [])
    for _, entries in streams:
        for entry, fields in entries:
            yield entry, fields.get(WAKE_FIELD, "")


def _order(entry: str) -> tuple[int, int]:
    """An entry's id as it is compared: <ms>-<number>."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)


def _meta_key(uid: str) -> str:
    """The ledger's record of the lease. Raises ValueError as `route_key`."""
    return route_key(uid).removesuffix("route") + "meta"
