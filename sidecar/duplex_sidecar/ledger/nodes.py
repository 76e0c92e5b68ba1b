"""Which server holds a key: always the one there is, or the node of a cluster that has its slot.

All keys of a session share a hash tag, so each script, and each snapshot, is one node's. A node
that has it no longer says so (MOVED, ASK): nothing was executed, and the command goes where it
points.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError

from duplex_api.ledger_address import ClusterAddress, parse_address
from duplex_sidecar.ledger.pools import make_pool, node_pool

SLOTS = 16_384


class Node:
    """redis: a client over the same pool, for pipelines."""

    def __init__(self, pool: BlockingConnectionPool) -> None:
        self.pool = pool
        self.redis: Redis = Redis(connection_pool=pool)
        self._at_hand: list[AbstractConnection] = []
        """For scripts, taken from the pool for good: asking it each time costs more than the call.
        At most half of it, so that reads find some there."""
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[AbstractConnection]:
        """After a fault nothing is kept at hand: the pool looks at each connection before it gives
        it out again, and the call that follows must not meet one that died with this one."""
        connection = self._at_hand.pop() if self._at_hand else await self.pool.get_connection()
        try:
            yield connection
        except BaseException:
            self._at_hand.append(connection)
            await self._give_back()
            raise
        self._at_hand.append(connection)
        if self._closed or len(self._at_hand) > self.pool.max_connections // 2:
            await self._give_back()

    async def drop_idle(self) -> None:
        """Connections that nobody uses: new ones look for the primary again."""
        await self._give_back()
        await self.pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        self._closed = True
        await self.redis.aclose(close_connection_pool=True)

    async def _give_back(self) -> None:
        while self._at_hand:
            connection = self._at_hand.pop()
            try:
                await self.pool.release(connection)
            except asyncio.CancelledError:
                self._at_hand.append(connection)
                raise
            if self._closed:
                await connection.disconnect()


class OneServer:
    """One server, or whichever is the primary."""

    def __init__(self, pool: BlockingConnectionPool) -> None:
        self._node = Node(pool)

    def holding(self, key: str) -> Node:
        """key: "" for none in particular."""
        return self._node

    def all(self) -> tuple[Node, ...]:
        """Those that hold keys."""
        return (self._node,)

    def pointed_to(self, error: AskError) -> Node | None:
        """Where the command has to go instead; None: that is not followed here."""
        return None

    async def look_again(self) -> None:
        """The primary may be another server now."""
        await self._node.drop_idle()

    async def close(self) -> None:
        await self._node.close()


class Cluster:
    """All primaries of a cluster. `look_again` asks for them, once before anything else. timeout_s:
    of each question."""

    def __init__(
        self,
        seeds: tuple[tuple[str, int], ...],
        pool_at: Callable[[str, int], Node],
        timeout_s: float,
    ) -> None:
        self._seeds = seeds
        self._timeout_s = timeout_s
        self._pool_at = pool_at
        self._nodes: dict[tuple[str, int], Node] = {}
        self._slots: list[tuple[str, int]] = [seeds[0]] * SLOTS
        self._primaries: tuple[tuple[str, int], ...] = ()
        self._unanswered: set[tuple[str, int]] = set()
        """Asked lately for who has which slots, without an answer yet."""

    def holding(self, key: str) -> Node:
        return self._at(self._slots[key_slot(key.encode()) if key else 0])

    def all(self) -> tuple[Node, ...]:
        return tuple(self._at(place) for place in self._primaries)

    def pointed_to(self, error: AskError) -> Node | None:
        """A slot that has moved is remembered; one that is being moved is asked for each time."""
        place = (error.host, error.port)
        if isinstance(error, MovedError):
            self._slots[error.slot_id] = place
            if place not in self._primaries:
                self._primaries = (*self._primaries, place)
        return self._at(place)

    async def look_again(self) -> None:
        """Ask the nodes one after another who has which slots. Raises the last one's error. There
        may be time for no more than one question: who did not answer the last one is asked last."""
        failed: Exception | None = None
        places = dict.fromkeys((*self._primaries, *self._seeds))
        if self._unanswered.issuperset(places):
            self._unanswered.clear()
        for place in sorted(places, key=self._unanswered.__contains__):
            node = self._at(place)
            self._unanswered.add(place)
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await node.redis.execute_command("CLUSTER", "SLOTS")
                self._learn(place, cast("list[list[Any]]", answer))
                self._unanswered.discard(place)
                return
            except (RedisError, OSError, TimeoutError) as error:
                failed = error
        assert failed is not None  # there is a seed
        raise failed

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()

    def _learn(self, asked: tuple[str, int], ranges: "list[list[Any]]") -> None:
        """Each range: first slot, last slot, [host, port, ...] of the primary, replicas. A node
        without a host is the one that was asked."""
        primaries: dict[tuple[str, int], None] = {}
        for first, last, primary, *_ in ranges:
            host = _text(primary[0]) or asked[0]
            place = (host, int(primary[1]))
            primaries[place] = None
            for slot in range(int(first), int(last) + 1):
                self._slots[slot] = place
        self._primaries = tuple(primaries)

    def _at(self, place: tuple[str, int]) -> Node:
        if place not in self._nodes:
            self._nodes[place] = self._pool_at(*place)
        return self._nodes[place]


Nodes = OneServer | Cluster


def make_nodes(url: str, *, connections: int, timeout_s: float) -> Nodes:
    """Connects nowhere yet. connections: to each node. Raises ValueError."""
    address = parse_address(url)
    if not isinstance(address, ClusterAddress):
        return OneServer(make_pool(address, connections=connections, timeout_s=timeout_s))

    def pool_at(host: str, port: int) -> Node:
        return Node(node_pool(address, host, port, connections=connections, timeout_s=timeout_s))

    return Cluster(address.nodes, pool_at, timeout_s)


def key_of(command: "tuple[Any, ...]") -> str:
    """The key that a command of the ledger is about, "" for one without."""
    word = command[1] if len(command) > 1 else ""
    return word if isinstance(word, str) and word.startswith("duplex:") else ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
