"""Several clients that say more than a gateway may keep for all of them."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.realtime import RealtimeClient, append_event

from duplex_gateway.relay import Call
from duplex_gateway.routing import Directory
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, Yard, calling, gate, http_get, yard

pytestmark = pytest.mark.integration

MEBI = 1024 * 1024


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    """Nobody runs a session: what clients say is kept."""
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url, max_held_bytes=64 * MEBI, max_calls=1_000) as front:
        yield front


async def new_session(ground: Yard) -> str:
    session = f"b-{secrets.token_hex(4)}"
    await ground.operator.declare(session)
    return session


async def say_much(client: RealtimeClient, size: int = 13 * MEBI) -> None:
    await client.send(append_event(bytes(2), video_frames=["x" * size]))


async def until_held(front: Gate, least: int, most: int) -> None:
    """Until the metrics page has a number between these, in bytes."""
    async with asyncio.timeout(PATIENCE_S):
        while not least <= await held(front) <= most:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def held(front: Gate) -> float:
    _, page = await http_get(front.health_port, "/metrics")
    lines = [line for line in page.splitlines() if line.startswith("duplex_gateway_held_bytes ")]
    return float(lines[0].split()[1])


async def test_one_that_wants_more_than_is_left_is_refused_and_others_are_not(
    ground: Yard, front: Gate
) -> None:
    sessions = [await new_session(ground) for _ in range(3)]
    async with AsyncExitStack() as stack:
        first, second, third = [
            await stack.enter_async_context(calling(front, session)) for session in sessions
        ]
        await say_much(first)
        await say_much(first)
        await say_much(first, size=6 * MEBI - 40_000)
        await until_held(front, 31 * MEBI, 32 * MEBI)
        share = append_event(bytes(15_000))
        await second.send(share)
        await second.send(share | {"event_id": "too much"})
        error = (await second.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("input_overflow", "too much")
        before = await held(front)
        await third.append(bytes(2_000))
        await until_held(front, int(before) + 2_000, 32 * MEBI)
        await first.socket.close()
        await until_held(front, 2_000, MEBI)
        await say_much(second)
        await until_held(front, 13 * MEBI, 14 * MEBI)
    await until_held(front, 0, 0)
    _, page = await http_get(front.health_port, "/metrics")
    assert "duplex_gateway_input_refused_total 1.0" in page


@pytest.mark.parametrize("end", ["cut off", "taken over", "hung up", "in error"])
async def test_what_a_call_kept_is_given_back_however_it_ends(
    ground: Yard, front: Gate, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = []
    run = Call.run

    async def noted(call: Call) -> object:
        calls.append(call)
        return await run(call)

    monkeypatch.setattr(Call, "run", noted)
    session = await new_session(ground)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(calling(front, session))
        await say_much(client)
        await until_held(front, 13 * MEBI, 14 * MEBI)
        match end:
            case "cut off":
                client.socket.transport.abort()
            case "taken over":
                await stack.enter_async_context(calling(front, session))
                assert (await client.until_closed())[0] == 4001
            case "hung up":
                calls[0].hang_up()
                assert (await client.until_closed())[0] == 1012
            case _:

                async def broken(*_: object) -> None:
                    raise RuntimeError("broken")

                monkeypatch.setattr(Directory, "find", broken)
                assert (await client.until("error"))["error"]["code"] == "not_ready"
        await until_held(front, 0, 0)


async def test_the_format_in_force_counts_as_long_as_the_call_lasts(
    ground: Yard, front: Gate
) -> None:
    await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await until_held(front, 0, 0)
        update = {"type": "session.update", "session": {"type": "realtime"}, "more": "x" * 60_000}
        await client.send(update)
        await client.until("session.updated")
        await until_held(front, 60_000, 62_000)
        await client.send(update | {"more": ""})
        await client.until("session.updated")
        await until_held(front, 1, 2_000)
        await client.send(update)
        await client.until("session.updated")
        await until_held(front, 60_000, 62_000)
        client.socket.transport.abort()
        await until_held(front, 0, 0)
