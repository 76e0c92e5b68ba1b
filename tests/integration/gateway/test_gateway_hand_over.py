"""Hand-overs behind the gateway: the client's socket stays open, it knows of nothing, and what it
waits longer than a client of a session that never moves is a small part of a second."""

import asyncio
import itertools
import statistics
import sys
import time
from pathlib import Path

import pytest
from support.realtime import RealtimeClient
from support.standstill import Standstill

from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import calling, gate, yard
from session_kit import RATE_HZ, Terms, eventually, second

pytestmark = pytest.mark.integration
MOVES = 8
PACE_S = 0.25
"""The caller speaks four times as fast as people do, so that it takes less of everybody's time."""
UNITS_A_MOVE = 3
SILENCE_S = 1.0


async def speak(client: RealtimeClient, units: int) -> None:
    """On a clock of its own, whatever comes back."""
    began = time.monotonic()
    for number in range(1, units + 1):
        await client.append(second(number))
        await asyncio.sleep(max(0.0, began + number * PACE_S - time.monotonic()))


async def listen(client: RealtimeClient, units: int) -> list[float]:
    """When each unit was done."""
    done: list[float] = []
    for number in range(1, units + 1):
        await client.until_unit(number)
        done.append(time.monotonic())
    return done


async def test_a_client_hardly_notices(valkey: EmbeddedValkey) -> None:
    with Standstill() as stood:
        moves, done = await moved_to_and_fro(valkey)
    silences = sorted(
        max(
            after - before - stood.between_s(before, after)
            for before, after in itertools.pairwise(done)
            if abs(after - at) < 1.0 or before <= at <= after
        )
        - PACE_S
        for at in moves
    )
    p50, worst = statistics.median(silences), silences[-1]
    figures = f"p50 {p50 * 1000:.0f} ms, worst {worst * 1000:.0f} ms"
    print(f"silence beyond the pace, {MOVES} moves: {figures}")
    assert worst <= SILENCE_S


async def moved_to_and_fro(valkey: EmbeddedValkey) -> tuple[list[float], list[float]]:
    """When the session had moved, each time, and when each of its units was done."""
    units = UNITS_A_MOVE * (MOVES + 1)
    async with yard(valkey.url) as ground, gate(valkey.url) as front:
        await ground.build()
        await ground.build()
        here, there = ground.houses
        for house in ground.houses:  # nobody is dead here
            house.replica.registry._owners.dead._names.clear()
        ground.operator.targets[:] = [here]
        await ground.operator.declare("moves", Terms("context"))
        async with calling(front, "moves") as client:
            await client.until("session.created")
            await client.format()
            speaking = asyncio.create_task(speak(client, units))
            listening = asyncio.create_task(listen(client, units))
            moves: list[float] = []
            for move in range(MOVES):
                wanted = UNITS_A_MOVE * (move + 1)
                await eventually(lambda w=wanted: len(client.heard.units) >= w)
                await ground.operator.move("moves", here, there)
                moves.append(time.monotonic())
                here, there = there, here
            await speaking
            done = await listening
            await client.close_session()
        client.heard.assert_whole()
        moved = client.heard.of_type("session.moved")
        assert [event["duplex"]["fence"] for event in moved] == list(range(2, MOVES + 2))
        causes = [unit["rebuild_cause"] for unit in client.heard.units]
        assert causes.count("move") == MOVES
        heard = await ground.heard_input("moves")
        assert [(start, end) for start, end, _ in heard] == [
            (RATE_HZ * n, RATE_HZ * (n + 1)) for n in range(units)
        ]
    return moves, done
