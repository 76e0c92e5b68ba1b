"""Which node of a cluster is asked for the others."""

import asyncio
from typing import Any, cast

import pytest

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
