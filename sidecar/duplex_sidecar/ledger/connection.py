"""The one way to the server: a deadline on every call, no hidden retries, typed errors.

redis-py retries ten times by default; with scripts that hides an unknown outcome. Here a script is
sent at most twice, the second time only when the first outcome is unknown, with the same operation
id, and what is still unknown then goes to the caller as `LedgerUnavailable.pending`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from duplex_sidecar.ledger import scripts
from duplex_sidecar.ledger.call import Argument, PendingCall, ScriptName
from duplex_sidecar.ledger.errors import (
    LedgerCorrupt,
    LedgerError,
    LedgerFull,
    LedgerUnavailable,
    LedgerUnsuitable,
)

Reply = list[bytes]
Command = tuple[Argument, ...]

_NO_OUTCOME = (RedisConnectionError, RedisTimeoutError, TimeoutError, OSError)
"""After these a command may or may not have been executed."""

_PASSING_REFUSALS = (
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "READONLY",
    "TRYAGAIN",
)
"""The server did not execute the command and may do so later."""


def refusal(session: str, error: Exception) -> LedgerError:
    """What a server's error means. The text never holds arguments, only the server's words."""
    words = str(error)
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return LedgerUnsuitable(session, f"server refuses this user: {words}")
    if isinstance(error, OutOfMemoryError) or words.startswith("OOM"):
        return LedgerFull(session, "server has reached its memory limit")
    if words.startswith("WRONGTYPE"):
        return LedgerCorrupt(session, "key", "has a foreign type")
    passing = isinstance(error, BusyLoadingError) or words.startswith(_PASSING_REFUSALS)
    passing = passing or type(error).__name__ in _PASSING_ERRORS
    if passing:
        return LedgerUnavailable(session, f"server refuses for now: {words}")
    return LedgerError(session, f"server error: {words}")


_PASSING_ERRORS = (
    "ClusterDownError",
    "MasterDownError",
    "ReadOnlyError",
    "TryAgainError",
)
"""redis-py cuts the code off the text of these."""


class Connection:
    """A pool of connections to one server, shared by all sessions of a process."""

    def __init__(self, redis: Redis, call_timeout_ms: int, load_timeout_ms: int) -> None:
        self._redis = redis
        self._call_timeout_s = call_timeout_ms / 1000
        self._load_timeout_s = load_timeout_ms / 1000

    @classmethod
    async def connect(
        cls, url: str, *, call_timeout_ms: int, load_timeout_ms: int, connections: int
    ) -> "Connection":
        """Raises `LedgerUnavailable` (unreachable) or `LedgerUnsuitable` (wrong kind of server).
        url: redis://, rediss:// or unix://, with user and password if any."""
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=call_timeout_ms / 1000,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=call_timeout_ms / 1000,
                protocol=2,
                client_name="duplex",
                driver_info=None,
            )
        except ValueError as error:
            raise LedgerUnsuitable("", f"not a ledger address: {error}") from error
        connection = cls(Redis(connection_pool=pool), call_timeout_ms, load_timeout_ms)
        try:
            await connection._check_server()
            await connection.load_scripts()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def load_scripts(self) -> None:
        for name in ScriptName:
            await self.read("", ("SCRIPT", "LOAD", scripts.source(name)))

    async def _check_server(self) -> None:
        server = cast("dict[str, Any]", await self.read("", ("INFO", "server")))
        memory = cast("dict[str, Any]", await self.read("", ("INFO", "memory")))
        check_server(server, memory)

    # --- scripts --------------------------------------------------------------------------------

    async def call(self, call: PendingCall) -> Reply:
        """Run a script; sent a second time (same operation id) if the outcome is unknown."""
        for attempt in (1, 2):
            try:
                return await self._evalsha(call)
            except BusyLoadingError as error:
                raise refusal(call.session, error) from error
            except AuthenticationError as error:
                raise refusal(call.session, error) from error
            except _NO_OUTCOME as error:
                if attempt == 2:
                    reason = f"no answer to {call.script}: {_words(error)}"
                    raise LedgerUnavailable(call.session, reason, pending=call) from error
            except RedisError as error:
                raise refusal(call.session, error) from error
        raise AssertionError("unreachable")

    async def _evalsha(self, call: PendingCall) -> Reply:
        command = pack(
            (
                "EVALSHA",
                scripts.sha1(call.script),
                len(call.keys),
                *call.keys,
                *call.arguments,
            )
        )
        async with asyncio.timeout(self._call_timeout_s):
            try:
                return cast(Reply, await self._send(command))
            except NoScriptError:
                # A restarted server forgets scripts. Nothing was executed.
                await self._send(pack(("SCRIPT", "LOAD", scripts.source(call.script))))
                return cast(Reply, await self._send(command))

    async def _send(self, packed: bytes) -> Any:
        """One packed command over a connection of the pool. The client's own way through retries
        and hooks that are off here costs more processor time than the call itself.

        Whatever goes wrong between sending and the answer, a cancellation too, closes the
        connection: an answer that comes late is never taken for the next command's.
        """
        pool = self._redis.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command(packed)
            return await connection.read_response()
        finally:
            await pool.release(connection)

    # --- reads ----------------------------------------------------------------------------------

    async def read(self, session: str, command: Command) -> Any:
        """One command that changes no session, tried twice."""
        return (await self._read(session, (command,), transaction=False))[0]

    async def read_at_once(self, session: str, commands: Sequence[Command]) -> list[Any]:
        """Commands of one session as a snapshot: nothing happens between them."""
        return await self._read(session, commands, transaction=True)

    async def read_many(self, session: str, commands: Sequence[Command]) -> list[Any]:
        """Commands in one round trip, not a snapshot."""
        return await self._read(session, commands, transaction=False)

    async def _read(
        self, session: str, commands: Sequence[Command], *, transaction: bool
    ) -> list[Any]:
        for attempt in (1, 2):
            try:
                async with asyncio.timeout(self._load_timeout_s if attempt == 1 else 1.0):
                    pipeline = self._redis.pipeline(transaction=transaction)
                    for command in commands:
                        pipeline.execute_command(*command)
                    answers = await pipeline.execute(raise_on_error=False)
            except (BusyLoadingError, AuthenticationError) as error:
                raise refusal(session, error) from error
            except _NO_OUTCOME as error:
                if attempt == 2:
                    reason = f"cannot be read: {_words(error)}"
                    raise LedgerUnavailable(session, reason) from error
            except RedisError as error:
                raise refusal(session, error) from error
            else:
                return [_checked(session, *pair) for pair in zip(commands, answers, strict=True)]
        raise AssertionError("unreachable")


def pack(words: Command) -> bytes:
    """A command as the server reads it: an array of strings, each behind its length in bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts += (b"$%d\r\n" % len(data), data, b"\r\n")
    return b"".join(parts)


def _checked(session: str, command: Command, answer: Any) -> Any:
    if not isinstance(answer, Exception):
        return answer
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        raise LedgerCorrupt(session, f"key {command[1]!s}", "has a foreign type")
    raise refusal(session, answer)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def check_server(server: dict[str, Any], memory: dict[str, Any]) -> None:
    """Redis >= 7.2 or Valkey >= 8, and never one that evicts: all keys of a ledger carry an expiry,
    so any eviction policy would eat them. Raises `LedgerUnsuitable`."""
    valkey = server.get("valkey_version")
    name = "Valkey" if valkey else "Redis"
    version = str(valkey or server.get("redis_version", "0"))
    needed = (8, 0) if valkey else (7, 2)
    parts = version.split(".")
    found = tuple(int(part) if part.isdigit() else 0 for part in (*parts, "0", "0")[:2])
    if found < needed:
        text = f"{name} {version} is too old: Redis >= 7.2 or Valkey >= 8 is needed"
        raise LedgerUnsuitable("", text)
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        text = f"{name} has maxmemory-policy {policy}; a ledger needs noeviction"
        raise LedgerUnsuitable("", text)
