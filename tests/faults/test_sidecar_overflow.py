"""A conversation that no longer fits the model ends, by name; nobody else notices."""

import asyncio
import base64

import pytest
from support.arena import MAX_MODEL_TOKENS, Arena
from support.ledgers import committed_units, tokens_of
from support.material import manifest, picture, speech
from support.realtime import Heard, RealtimeClient, dialled, joined, new_session
from support.talks import CONTEXT, undisturbed

from duplex_sidecar.client.local_sidecar import LocalSidecar

pytestmark = pytest.mark.fault

OTHER_UNITS = 50
OFF = manifest(window={"mode": "off"}, lifecycle={"disconnectGrace": "60s"})


def context(units: int) -> str:
    window = {"mode": "context", "contextMaxUnits": units, "contextPreviousMaxTokens": 200}
    return manifest(window=window, lifecycle={"disconnectGrace": "60s"})


@pytest.mark.parametrize(
    ("text", "slides"),
    [(OFF, False), (context(60), False), (context(29), True)],
    ids=["off", "a first slide too late", "a rebuild too long"],
)
async def test_a_conversation_at_the_limit_ends_alone(
    arena: Arena, text: str, slides: bool
) -> None:
    """The units that a window keeps whole, and the text of those that it dropped, can be more than
    the model holds."""
    sidecar = arena.one()
    alone = await undisturbed(sidecar, CONTEXT, OTHER_UNITS)
    session, token = await asyncio.to_thread(new_session, sidecar, text, "long")
    other, other_token = await asyncio.to_thread(new_session, sidecar, CONTEXT, "other")
    async with (
        joined(sidecar, session, token) as client,
        joined(sidecar, other, other_token) as neighbour,
    ):
        await asyncio.gather(client.speak(speech(60)), neighbour.speak(speech(OTHER_UNITS)))
        ended, _ = await asyncio.gather(
            client.until("session.closed"), neighbour.until_unit(OTHER_UNITS)
        )
        assert ended["reason"] == "context_length_exceeded"
        assert f"a context of {MAX_MODEL_TOKENS}" in ended["message"]
        assert [error["code"] for error in client.heard.errors] == ["context_length_exceeded"]
        assert client.heard.errors[0]["retryable"] is False
        assert await client.until_closed() == (4010, "context_length_exceeded")
        client.heard.assert_whole()
        longest = client.heard.units[-1]["window_tokens"]
        assert MAX_MODEL_TOKENS - 60 < longest <= MAX_MODEL_TOKENS
        rebuilt = {unit["rebuild_cause"] for unit in client.heard.units} - {None}
        assert rebuilt == ({"slide"} if slides else set())
        neighbour.heard.assert_whole()
        assert neighbour.heard.errors == []
        records = await committed_units(arena.bed.valkey.url, other)
        assert tokens_of(records) == alone.tokens
        await neighbour.close_session()
    await assert_stays_ended(sidecar, session, token, client.heard)
    # Its own record is whole up to the last unit that fitted.
    records = await committed_units(arena.bed.valkey.url, session)
    assert len(records) == len(client.heard.units)


async def assert_stays_ended(sidecar: LocalSidecar, session: str, token: str, heard: Heard) -> None:
    async with dialled(sidecar, session, token, resume=True) as client:
        resume = {"type": "session.resume", "last_received_server_event_seq": heard.last_sequence}
        await client.send(resume)
        error = (await client.until("error"))["error"]
        assert error["code"] == "session_ended"
        assert error["message"] == "The session has ended: context_length_exceeded."


async def test_a_single_append_that_cannot_fit_ends_the_session_alone(arena: Arena) -> None:
    """Two high-resolution frames take more positions than are left."""
    sidecar = arena.one()
    text = manifest(camera={"framesPerUnit": 2, "highResolution": True})
    session, token = await asyncio.to_thread(new_session, sidecar, text, "wide")
    async with joined(sidecar, session, token) as client:
        await show_until_it_ends(client)
        assert await client.until_closed() == (4010, "context_length_exceeded")


async def show_until_it_ends(client: RealtimeClient) -> None:
    frames = [encoded(picture(1_280, 960, shade=shade)) for shade in (10, 200)]
    for second in range(12):
        await client.append(speech(1, second), video_frames=frames)
        event = await client.until(("duplex.unit", "session.closed"))
        if event["type"] == "session.closed":
            assert event["reason"] == "context_length_exceeded"
            return
    raise AssertionError("it never ended")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
