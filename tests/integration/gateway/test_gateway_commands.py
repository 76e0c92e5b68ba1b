"""Commands through the gateway: a session that moves under one takes nothing of it away."""

import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.realtime import RealtimeClient

from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, Yard, calling, gate, yard
from session_kit import Terms, second

pytestmark = pytest.mark.integration


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url) as front:
        yield front


async def in_mid_reply(client: RealtimeClient) -> tuple[int, str]:
    """Talk until a reply has sounded and goes on: the last second, the reply's item."""
    number = 0
    while True:
        number += 1
        await client.append(second(number))
        await client.until_unit(number)
        opened = len(client.heard.of_type("response.created"))
        if opened > len(client.heard.of_type("response.done")):
            sounds = client.heard.of_type("response.output_audio.delta")
            if sounds and sounds[-1]["duplex"]["unit"] == number:
                return number, str(sounds[-1]["item_id"])


async def test_a_numbered_command_outlives_the_owner_that_has_heard_it(
    ground: Yard, front: Gate
) -> None:
    """It waits for the end of a unit that never ends there."""
    here = await ground.build()
    session = f"g-{secrets.token_hex(4)}"
    await ground.operator.declare(session, Terms("context"))
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        last, item = await in_mid_reply(client)
        pause = here.replica.stages.thinker.pause(last + 1, after=False)
        await client.append(second(last + 1))
        await pause.reached.wait()
        truncate: dict[str, Any] = {
            "type": "conversation.item.truncate",
            "item_id": item,
            "content_index": 0,
            "audio_end_ms": 0,
            "client_sequence": 7,
            "event_id": "mine",
        }
        await client.send(truncate)
        await client.send({"type": "session.heartbeat"})
        await client.until("session.heartbeat_ack")  # the owner has heard the command before it
        await ground.build()
        await here.replica.registry.close()
        await client.until("session.moved")
        applied = await client.until("session.command_applied")
        assert applied["client_event_id"] == "mine"
        assert applied["duplex"] == {"client_sequence": 7}
        assert len(client.heard.of_type("conversation.item.truncated")) == 1
        await client.append(second(last + 2))
        unit = await client.until_unit(last + 2)
        assert unit["rebuild_cause"] == "truncation"
        await client.send(truncate | {"event_id": "again"})
        again = await client.until("session.command_applied")
        assert again["client_event_id"] == "again"
        await client.close_session()
    assert len(client.heard.of_type("conversation.item.truncated")) == 1
    client.heard.assert_whole()
