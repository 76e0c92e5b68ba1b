"""The one way to the server: a deadline on every call, no hidden retries, typed errors.

redis-py retries ten times by default; with scripts that hides an unknown outcome. Here a script is
sent at most twice, the second time only when the first outcome is unknown, with the same operation
id, and what is still unknown then goes to the caller as `LedgerUnavailable.pending`. What each
error of the server means stands in `ledger.failures`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError, WatchError

from duplex_api.ledger_address import BAD_ADDRESS
from duplex_sidecar.ledger import scripts
from duplex_sidecar.ledger.call import Argument, PendingCall, ScriptName
from duplex_sidecar.ledger.cancelling import raise_if_cancelled
from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable, LedgerUnsuitable
from duplex_sidecar.ledger.failures import Action, action_of, refusal, words_of
from duplex_sidecar.ledger.pools import make_pool
from duplex_sidecar.ledger.server import (
    CONFIG_NAMES,
    NEEDED_REPLICAS,
    Durability,
    Info,
    check_durability,
    check_server,
)

Reply = list[bytes]
Command = tuple[Argument, ...]

_ERRORS = (RedisError, TimeoutError, OSError)


class _NotReplicated(TimeoutError):
    """The primary has executed the call, too few replicas have confirmed it in time."""


class Connection:
    """A pool of connections to one server, shared by all sessions of a process."""

    def __init__(
        self,
        pool: BlockingConnectionPool,
        call_timeout_ms: int,
        load_timeout_ms: int,
        durability: Durability = Durability.MEMORY,
    ) -> None:
        self._pool = pool
        self._redis = Redis(connection_pool=pool)
        self._call_timeout_s = call_timeout_ms / 1000
        self._load_timeout_s = load_timeout_ms / 1000
        self._wait = b""
        self._closed = False
        self._at_hand: list[AbstractConnection] = []
        """For scripts, taken from the pool for good: asking it each time costs more than the call.
        At most half of it, so that reads find some there."""
        if durability is Durability.REPLICATED:
            self._wait = pack(("WAIT", NEEDED_REPLICAS, call_timeout_ms // 2))

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        call_timeout_ms: int,
        load_timeout_ms: int,
        connections: int,
        durability: Durability = Durability.MEMORY,
    ) -> "Connection":
        """Raises `LedgerUnavailable` (unreachable) or `LedgerUnsuitable` (wrong kind of server, or
        one that cannot promise `durability`). url: as in `duplex_api.ledger_address`."""
        try:
            pool = make_pool(url, connections=connections, timeout_s=call_timeout_ms / 1000)
        except ValueError:
            # Its text quotes parts of the address, and so perhaps of a password.
            raise LedgerUnsuitable("", BAD_ADDRESS) from None
        connection = cls(pool, call_timeout_ms, load_timeout_ms, durability)
        try:
            await connection._check_server(durability)
            await connection.load_scripts()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def close(self) -> None:
        """Whoever asks from now on is refused: nobody would close what he opens."""
        self._closed = True
        await self._redis.aclose(close_connection_pool=True)

    async def load_scripts(self) -> None:
        for name in ScriptName:
            await self.read("", ("SCRIPT", "LOAD", scripts.source(name)))

    async def _check_server(self, durability: Durability) -> None:
        server, memory, replication = [
            cast(Info, await self.read("", ("INFO", section)))
            for section in ("server", "memory", "replication")
        ]
        check_server(server, memory)
        if durability is not Durability.MEMORY:
            check_durability(durability, replication, await self._config())

    async def _config(self) -> dict[str, str] | None:
        """None where the server does not tell its settings."""
        try:
            answer = cast(list[bytes], await self.read("", ("CONFIG", "GET", *CONFIG_NAMES)))
        except LedgerUnavailable:
            raise
        except LedgerError:
            return None
        words = [word.decode(errors="replace") for word in answer]
        return dict(zip(words[::2], words[1::2], strict=True))

    def _require_open(self, session: str) -> None:
        if self._closed:
            raise LedgerUnavailable(session, "its connection is closed")

    # --- scripts --------------------------------------------------------------------------------

    async def call(self, call: PendingCall) -> Reply:
        """Run a script; sent a second time (same operation id) if the outcome is unknown."""
        self._require_open(call.session)
        for attempt in (1, 2):
            try:
                answer = await self._evalsha(call)
                raise_if_cancelled()
                return answer
            except _ERRORS as error:
                raise_if_cancelled()
                action = action_of(error)
                if action is Action.FIND_PRIMARY:
                    await self._give_back()
                    await self._pool.disconnect(inuse_connections=False)
                if action is not Action.RESOLVE:
                    raise refusal(call.session, error, call.keys[0]) from error
                if attempt == 2:
                    reason = f"no answer to {call.script}: {words_of(error)}"
                    raise LedgerUnavailable(call.session, reason, pending=call) from error
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
                return await self._confirmed(command)
            except NoScriptError:
                # A restarted server forgets scripts. Nothing was executed.
                await self._send(pack(("SCRIPT", "LOAD", scripts.source(call.script))))
                return await self._confirmed(command)

    async def _confirmed(self, command: bytes) -> Reply:
        """The answer to a script; with durability `replicated` once enough replicas have it. `WAIT`
        goes over the script's own connection: on any other it would speak of other writes. A repeat
        that changes nothing waits for everything before it, so for the first execution too."""
        if not self._wait:
            return cast(Reply, (await self._send(command))[0])
        answer, replicas = await self._send(command + self._wait, 2)
        if int(cast(int, replicas)) < NEEDED_REPLICAS:
            raise _NotReplicated(f"{replicas} of {NEEDED_REPLICAS} replicas have confirmed it")
        return cast(Reply, answer)

    async def _send(self, packed: bytes, answers: int = 1) -> list[Any]:
        """Packed commands over a connection of the pool. The client's own way through retries and
        hooks that are off here costs more processor time than the call itself.

        Whatever goes wrong between sending and the answer, a cancellation too, closes the
        connection: an answer that comes late is never taken for the next command's. Raises the
        first error that the server answers, once all answers are there.
        """
        async with self._connection() as connection:
            self._require_open("")
            await connection.send_packed_command(packed)
            found: list[Any] = []
            for _ in range(answers):
                try:
                    found.append(await connection.read_response())
                except ResponseError as error:
                    found.append(error)
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[AbstractConnection]:
        """After a fault nothing is kept at hand: the pool looks at each connection before it gives
        it out again, and the call that follows must not meet one that died with this one."""
        pool = self._pool
        connection = self._at_hand.pop() if self._at_hand else await pool.get_connection()
        try:
            yield connection
        except BaseException:
            self._at_hand.append(connection)
            await self._give_back()
            raise
        self._at_hand.append(connection)
        if self._closed or len(self._at_hand) > pool.max_connections // 2:
            await self._give_back()

    async def _give_back(self) -> None:
        while self._at_hand:
            connection = self._at_hand.pop()
            try:
                await self._pool.release(connection)
            except asyncio.CancelledError:
                self._at_hand.append(connection)
                raise
            if self._closed:
                await connection.disconnect()

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

    async def create_keys(
        self, meta_key: str, commands: Sequence[Command], timeout_s: float
    ) -> bool:
        """All commands at once, unless `meta_key` is there already: then none, and False. For
        tools; what is unknown after `LedgerUnavailable` shows in the key."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._redis.pipeline(transaction=True) as pipeline,
            ):
                await pipeline.watch(meta_key)
                if await pipeline.exists(meta_key):
                    return False
                pipeline.multi()
                for command in commands:
                    pipeline.execute_command(*command)
                await pipeline.execute()
            raise_if_cancelled()
        except WatchError:
            return False
        except _ERRORS as error:
            raise refusal("", error, meta_key) from error
        return True

    async def _read(
        self, session: str, commands: Sequence[Command], *, transaction: bool
    ) -> list[Any]:
        self._require_open(session)
        for attempt in (1, 2):
            try:
                async with asyncio.timeout(self._load_timeout_s if attempt == 1 else 1.0):
                    pipeline = self._redis.pipeline(transaction=transaction)
                    for command in commands:
                        pipeline.execute_command(*command)
                    answers = await pipeline.execute(raise_on_error=False)
                raise_if_cancelled()
            except _ERRORS as error:
                raise_if_cancelled()
                if action_of(error) is not Action.RESOLVE:
                    raise refusal(session, error) from error
                if attempt == 2:
                    reason = f"cannot be read: {words_of(error)}"
                    raise LedgerUnavailable(session, reason) from error
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
    if isinstance(answer, Exception):
        raise refusal(session, answer, str(command[1]))
    return answer
