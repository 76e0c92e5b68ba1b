"""Which node of a cluster is asked for the others, and which connections a call may use."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
from redis.asyncio import BlockingConnectionPool

from duplex_sidecar.ledger.nodes import SLOTS, Cluster, Node

pytestmark = pytest.mark.unit

Place = tuple[str, int]


class Servers:
    """Nodes of a cluster, of which some answer nothing and refuse nothing."""

    def __init__(self, primary: Place) -> None:
        self.primary = primary
        self.silent: set[Place] = set()
        self.asked: list[Place] = []

    def at(self, host: str, port: int) -> Node:
        servers, place = self, (host, port)

        class Client:
            async def execute_command(self, *_: str) -> list[Any]:
                servers.asked.append(place)
                if place in servers.silent:
                    await asyncio.Event().wait()
                return [[0, SLOTS - 1, [servers.primary[0].encode(), servers.primary[1]]]]

        class Asked:
            redis = Client()
            name = place

        return cast("Node", Asked())


async def look(cluster: Cluster) -> None:
    """As after a call that failed: with no more time than one question has."""
    try:
        async with asyncio.timeout(0.02):
            await cluster.look_again()
    except TimeoutError:
        pass


async def test_a_node_that_says_nothing_keeps_nobody_from_asking_the_others() -> None:
    a, b = ("a", 1), ("b", 1)
    servers = Servers(a)
    cluster = Cluster((a, b), servers.at, 0.02)
    await look(cluster)
    servers.primary = b
    servers.silent = {a}
    await look(cluster)
    await look(cluster)
    assert servers.asked == [a, a, b]
    assert cast("Any", cluster.holding("duplex:x")).name == b
    # All were silent: each is asked again.
    servers.silent = {a, b}
    for _ in range(4):
        await look(cluster)
    assert set(servers.asked[3:]) == {a, b}
    servers.primary, servers.silent = a, {b}
    for _ in range(3):
        await look(cluster)
    assert cast("Any", cluster.holding("duplex:x")).name == a


class Pool(BlockingConnectionPool):
    """Counts what is asked of it. out: connections that are with somebody."""

    def __init__(self) -> None:
        super().__init__(max_connections=4)
        self.asked = 0
        self.out: set[object] = set()

    async def get_connection(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        connection = object()
        self.out.add(connection)
        return connection

    async def release(self, connection: object) -> None:
        self.out.remove(connection)


async def use_at_once(node: Node, count: int) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(node.connection())


async def test_a_connection_is_kept_at_hand_and_some_are_left_for_others() -> None:
    pool = Pool()
    node = Node(pool)
    for _ in range(3):
        await use_at_once(node, 2)
    assert (pool.asked, len(pool.out)) == (2, 2)
    await use_at_once(node, 3)
    assert pool.out == set(), "more than half of the pool"


async def test_after_a_fault_no_connection_is_used_that_the_pool_has_not_looked_at() -> None:
    """The server that ended one has ended the others, too."""
    pool = Pool()
    node = Node(pool)
    await use_at_once(node, 2)
    with pytest.raises(ConnectionError):
        async with node.connection():
            raise ConnectionError("gone")
    assert pool.out == set()
    await use_at_once(node, 1)
    assert pool.asked == 3
