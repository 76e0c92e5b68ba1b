"""The one way to the server: a deadline on every call, no hidden retries, typed errors.

redis-py retries ten times by default; with scripts that hides an unknown outcome. Here a script is
sent at most twice, the second time only when the first outcome is unknown, with the same operation
id, and what is still unknown then goes to the caller as `LedgerUnavailable.pending`. What each
error of the server means stands in `ledger.failures`. In a cluster a command goes to the node that
has its key, and where that node points.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, cast

from redis.exceptions import (
    AskError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    WatchError,
)

from duplex_api.ledger_address import BAD_ADDRESS
from duplex_sidecar.ledger import scripts
from duplex_sidecar.ledger.call import Argument, PendingCall, ScriptName
from duplex_sidecar.ledger.cancelling import raise_if_cancelled
from duplex_sidecar.ledger.errors import (
    LedgerError,
    LedgerUnavailable,
    LedgerUnsuitable,
    ServerFull,
)
from duplex_sidecar.ledger.failures import Action, action_of, refusal, untrusted, words_of
from duplex_sidecar.ledger.nodes import Node, Nodes, OneServer, key_of, make_nodes
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
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_REDIRECTS = 3
"""So often a command follows where nodes point, before it counts as refused for now."""


class _NotReplicated(TimeoutError):
    """The primary has executed the call, too few replicas have confirmed it in time."""


class Connection:
    """Connections to the ledger's server or servers, shared by all sessions of a process."""

    def __init__(
        self,
        nodes: Nodes,
        call_timeout_ms: int,
        load_timeout_ms: int,
        durability: Durability = Durability.MEMORY,
    ) -> None:
        self._nodes = nodes
        self._call_timeout_s = call_timeout_ms / 1000
        self._load_timeout_s = load_timeout_ms / 1000
        self._wait = b""
        self._closed = False
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
        """Raises `LedgerUnavailable` (unreachable) or `LedgerUnsuitable` (wrong kind of server, one
        that cannot promise `durability`, or whose certificate is not trusted). url: as in
        `duplex_api.ledger_address`."""
        try:
            nodes = make_nodes(url, connections=connections, timeout_s=call_timeout_ms / 1000)
        except ValueError:
            # Its text quotes parts of the address, and so perhaps of a password.
            raise LedgerUnsuitable("", BAD_ADDRESS) from None
        connection = cls(nodes, call_timeout_ms, load_timeout_ms, durability)
        try:
            await connection._look_again()
            for node in nodes.all():
                await connection._check_server(node, durability)
            await connection.load_scripts()
        except BaseException as error:
            await connection.close()
            if isinstance(error, LedgerUnavailable) and (why := untrusted(error)):
                # Waiting mends nothing; later, in a running process, it might.
                raise LedgerUnsuitable("", why) from error
            raise
        return connection

    async def close(self) -> None:
        """Whoever asks from now on is refused: nobody would close what he opens."""
        self._closed = True
        await self._nodes.close()

    async def load_scripts(self) -> None:
        commands = [("SCRIPT", "LOAD", scripts.source(name)) for name in ScriptName]
        for node in self._nodes.all():
            await self._read("", commands, node)

    async def ping(self) -> None:
        """Returns when every server that holds keys has said that it takes writes; raises
        `LedgerUnavailable`, or what else its refusal means, in the time of one call and one
        search."""
        self._require_open("")
        ask = pack(("EVALSHA", scripts.sha1(ScriptName.REACH), 0))
        try:
            async with asyncio.timeout(self._call_timeout_s):
                for node in self._nodes.all():
                    try:
                        await self._send(ask, node)
                    except NoScriptError:
                        await self._send(_loading(ScriptName.REACH), node)
                        await self._send(ask, node)
            raise_if_cancelled()
        except _ERRORS as error:
            raise_if_cancelled()
            action = action_of(error)
            if action in (Action.FIND_PRIMARY, Action.RESOLVE):
                await self._find_again(action)
            raise self._refusal("", error) from error

    async def _look_again(self) -> None:
        """For the primary, or for who has which slots."""
        try:
            await self._nodes.look_again()
        except _ERRORS as error:
            raise refusal("", error) from error

    async def _check_server(self, node: Node, durability: Durability) -> None:
        sections = [("INFO", section) for section in ("server", "memory", "replication")]
        server, memory, replication = cast("list[Info]", await self._read("", sections, node))
        check_server(server, memory)
        if durability is not Durability.MEMORY:
            check_durability(durability, replication, await self._config(node))

    async def _config(self, node: Node) -> dict[str, str] | None:
        """None where the server does not tell its settings."""
        command: Command = ("CONFIG", "GET", *CONFIG_NAMES)
        try:
            answer = cast(list[bytes], (await self._read("", (command,), node))[0])
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
                if action in (Action.FIND_PRIMARY, Action.RESOLVE):
                    await self._find_again(action)
                if action is Action.RESOLVE and attempt == 1:
                    continue
                refused = self._refusal(call.session, error, call.keys[0])
                if attempt == 2 and isinstance(refused, (LedgerUnavailable, ServerFull)):
                    # It is of the repeat: what was sent before may have been executed.
                    reason = f"no answer to {call.script}: {words_of(error)}"
                    raise LedgerUnavailable(call.session, reason, pending=call) from error
                raise refused from error
        raise AssertionError("unreachable")

    async def repeat_for_all_replicas(self, call: PendingCall) -> None:
        """Run a script again that changes nothing the second time; returns when every replica that
        is connected has it. Raises `LedgerUnavailable` when one does not say so in time."""
        node = self._nodes.holding(call.keys[0])
        info = (await self._read(call.session, (("INFO", "replication"),), node))[0]
        replicas = int(cast(Info, info).get("connected_slaves", 0))
        if not replicas:
            return
        wait = pack(("WAIT", replicas, round(self._call_timeout_s * 500)))
        try:
            async with asyncio.timeout(self._call_timeout_s):
                _, have = await self._send(_packed(call) + wait, node, 2)
            raise_if_cancelled()
        except _ERRORS as error:
            raise self._refusal(call.session, error, call.keys[0]) from error
        if int(cast(int, have)) < replicas:
            text = f"{have} of {replicas} replicas have confirmed {call.script}"
            raise LedgerUnavailable(call.session, text)

    async def _find_again(self, action: Action) -> None:
        """After a refusal or no answer: where the key's server may be now. What cannot be found is
        looked for again by the next call."""
        if action is Action.RESOLVE and isinstance(self._nodes, OneServer):
            return  # a new connection finds it
        with suppress(*_ERRORS):
            async with asyncio.timeout(self._call_timeout_s):
                await self._nodes.look_again()
        raise_if_cancelled()

    async def _evalsha(self, call: PendingCall) -> Reply:
        key, command = call.keys[0], _packed(call)
        async with asyncio.timeout(self._call_timeout_s):
            try:
                return await self._confirmed(command, key)
            except NoScriptError:
                # A restarted server forgets scripts. Nothing was executed. It alone gets this one
                # again: another one that is away would be in the way of that.
                load = _loading(call.script)
                await self._send(load, self._nodes.holding(key))
                with suppress(NoScriptError):
                    return await self._confirmed(command, key)
                for node in self._nodes.all():  # the key is on its way to one of them
                    await self._send(load, node)
                return await self._confirmed(command, key)

    async def _confirmed(self, command: bytes, key: str) -> Reply:
        """The answer to a script; with durability `replicated` once enough replicas have it. `WAIT`
        goes over the script's own connection: on any other it would speak of other writes. A repeat
        that changes nothing waits for everything before it, so for the first execution too."""
        node = self._nodes.holding(key)
        if not self._wait:
            return cast(Reply, (await self._send(command, node))[0])
        answer, replicas = await self._send(command + self._wait, node, 2)
        if int(cast(int, replicas)) < NEEDED_REPLICAS:
            raise _NotReplicated(f"{replicas} of {NEEDED_REPLICAS} replicas have confirmed it")
        return cast(Reply, answer)

    async def _send(self, packed: bytes, node: Node, answers: int = 1) -> list[Any]:
        """Packed commands, of which the first one decides where they belong. Raises the error that
        the server answers, once all answers are there; behind a first one that was executed it only
        says that nobody knows who has it (a primary that is demoted ends the wait so)."""
        found = await self._exchange(packed, node, answers)
        for _ in range(_REDIRECTS):
            pointer = found[0]
            there = self._nodes.pointed_to(pointer) if isinstance(pointer, AskError) else None
            if there is None:
                break
            if isinstance(pointer, MovedError):
                found = await self._exchange(packed, there, answers)
            else:
                found = (await self._exchange(_ASKING + packed, there, answers + 1))[1:]
        if isinstance(found[0], Exception):
            raise found[0]
        for answer in found[1:]:
            if isinstance(answer, Exception):
                raise _NotReplicated(words_of(answer)) from answer
        return found

    async def _exchange(self, packed: bytes, node: Node, answers: int) -> list[Any]:
        """Packed commands over a connection of the pool. The client's own way through retries and
        hooks that are off here costs more processor time than the call itself.

        Whatever goes wrong between sending and the answer, a cancellation too, closes the
        connection: an answer that comes late is never taken for the next command's. Errors that the
        server answers are among the answers.
        """
        async with node.connection() as connection:
            self._require_open("")
            await connection.send_packed_command(packed)
            found: list[Any] = []
            for _ in range(answers):
                try:
                    found.append(await connection.read_response())
                except ResponseError as error:
                    found.append(error)
        return found

    def _refusal(self, session: str, error: Exception, key: str = "") -> LedgerError:
        if isinstance(error, AskError) and not isinstance(self._nodes, OneServer):
            return LedgerUnavailable(session, "server refuses for now: a slot is being moved")
        return refusal(session, error, key)

    # --- reads ----------------------------------------------------------------------------------

    async def read(self, session: str, command: Command) -> Any:
        """One command that changes no session, tried twice."""
        return (await self.read_many(session, (command,)))[0]

    async def read_at_once(self, session: str, commands: Sequence[Command]) -> list[Any]:
        """Commands of one session as a snapshot: nothing happens between them."""
        node = self._nodes.holding(key_of(commands[0]))
        return await self._read(session, commands, node, transaction=True)

    async def read_many(self, session: str, commands: Sequence[Command]) -> list[Any]:
        """Commands in one round trip to each server that holds any of their keys, not a
        snapshot."""
        asked: dict[Node, list[int]] = {}
        for number, command in enumerate(commands):
            asked.setdefault(self._nodes.holding(key_of(command)), []).append(number)
        found: dict[int, Any] = {}
        for node, numbers in asked.items():
            answers = await self._read(session, [commands[number] for number in numbers], node)
            found.update(zip(numbers, answers, strict=True))
        return [found[number] for number in range(len(commands))]

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Names of keys, in no order."""
        for node in self._nodes.all():
            cursor = b"0"
            while True:
                command: Command = ("SCAN", cursor, "MATCH", pattern, "COUNT", 500)
                cursor, names = (await self._read("", (command,), node))[0]
                for name in cast("list[bytes]", names):
                    yield name
                if int(cursor) == 0:
                    break

    async def create_keys(
        self, meta_key: str, commands: Sequence[Command], timeout_s: float
    ) -> bool:
        """All commands at once, unless `meta_key` is there already: then none, and False. For
        tools; what is unknown after `LedgerUnavailable` shows in the key."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._nodes.holding(meta_key).redis.pipeline(transaction=True) as pipeline,
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
            raise self._refusal("", error, meta_key) from error
        return True

    async def _read(
        self,
        session: str,
        commands: Sequence[Command],
        node: Node,
        *,
        transaction: bool = False,
    ) -> list[Any]:
        self._require_open(session)
        redirects = tries = 0
        while True:
            try:
                async with asyncio.timeout(self._load_timeout_s if tries == 0 else 1.0):
                    pipeline = node.redis.pipeline(transaction=transaction)
                    for command in commands:
                        pipeline.execute_command(*command)
                    answers = await pipeline.execute(raise_on_error=False)
                raise_if_cancelled()
                pointer = next((one for one in answers if isinstance(one, AskError)), None)
                if pointer is not None:
                    raise pointer
            except MovedError as error:
                there = self._nodes.pointed_to(error) if redirects < _REDIRECTS else None
                if there is None:
                    raise self._refusal(session, error) from error
                node, redirects = there, redirects + 1
            except _ERRORS as error:
                raise_if_cancelled()
                tries += 1
                action = action_of(error)
                if action in (Action.FIND_PRIMARY, Action.RESOLVE):
                    await self._find_again(action)
                if action is not Action.RESOLVE:
                    raise self._refusal(session, error) from error
                if tries == 2:
                    reason = f"cannot be read: {words_of(error)}"
                    raise LedgerUnavailable(session, reason) from error
                node = self._nodes.holding(key_of(commands[0]))
            else:
                return [_checked(session, *pair) for pair in zip(commands, answers, strict=True)]


def _loading(script: ScriptName) -> bytes:
    return pack(("SCRIPT", "LOAD", scripts.source(script)))


def _packed(call: PendingCall) -> bytes:
    number = len(call.keys)
    return pack(("EVALSHA", scripts.sha1(call.script), number, *call.keys, *call.arguments))


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
