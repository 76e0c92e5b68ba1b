"""The published `openai` SDK, unmodified: its own calls in, its own typed events out."""

import asyncio
import base64
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import (
    ConversationItemTruncatedEvent,
    InputAudioBufferClearedEvent,
    InputAudioBufferCommittedEvent,
    RealtimeErrorEvent,
    RealtimeServerEvent,
    ResponseAudioDeltaEvent,
    ResponseAudioDoneEvent,
    ResponseAudioTranscriptDeltaEvent,
    ResponseAudioTranscriptDoneEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseDoneEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    SessionCreatedEvent,
    SessionUpdatedEvent,
)
from support.material import manifest, speech
from support.realtime import UNIT_BYTES, new_session

from duplex_sidecar.client.local_sidecar import LocalSidecar

pytestmark = pytest.mark.client

UNITS = 24
MANY_UNITS = 60
TURN_EVENTS = (
    ResponseCreatedEvent,
    ResponseOutputItemAddedEvent,
    ResponseContentPartAddedEvent,
    ResponseAudioTranscriptDeltaEvent,
    ResponseAudioDeltaEvent,
    ResponseAudioDoneEvent,
    ResponseAudioTranscriptDoneEvent,
    ResponseContentPartDoneEvent,
    ResponseOutputItemDoneEvent,
    ResponseDoneEvent,
)


async def next_event(connection: AsyncRealtimeConnection) -> RealtimeServerEvent:
    async with asyncio.timeout(60):
        return await connection.recv()


async def unit_events(connection: AsyncRealtimeConnection, last: int) -> list[RealtimeServerEvent]:
    """All events up to the facts of unit `last`."""
    events: list[RealtimeServerEvent] = []
    while True:
        events.append(await next_event(connection))
        if events[-1].to_dict().get("unit") == last:
            return events


async def test_a_conversation_with_the_sdks_own_calls_and_typed_events(
    sidecar: LocalSidecar,
) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest(), "sdk")
    client = AsyncOpenAI(base_url=sidecar.realtime_url, api_key=token)
    query = {"session": session}
    async with client.realtime.connect(model="duplex", extra_query=query) as connection:
        created = await next_event(connection)
        assert isinstance(created, SessionCreatedEvent)
        await connection.session.update(
            session={
                "type": "realtime",
                "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}}},  # type: ignore[typeddict-item]
            }
        )
        assert isinstance(await next_event(connection), SessionUpdatedEvent)
        pcm = speech(UNITS)
        for start in range(0, len(pcm), UNIT_BYTES // 4):
            piece = pcm[start : start + UNIT_BYTES // 4]
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
        events = await unit_events(connection, UNITS)
        await connection.input_audio_buffer.clear()
        assert isinstance(await next_event(connection), InputAudioBufferClearedEvent)
        await connection.input_audio_buffer.append(audio=base64.b64encode(pcm[:9_600]).decode())
        await connection.input_audio_buffer.commit()  # the tail, padded, is a unit too
        events += await unit_events(connection, UNITS + 1)
        await connection.send_raw(json.dumps({"type": "session.close"}))
        assert (await next_event(connection)).type == "session.closed"
    await client.close()

    for event in events:
        if not event.type.startswith(("duplex.", "session.")):
            type(event).model_validate_json(event.to_json())  # every field that the SDK requires
    committed = [event for event in events if isinstance(event, InputAudioBufferCommittedEvent)]
    assert len(committed) == UNITS + 1
    for kind in TURN_EVENTS:
        assert any(isinstance(event, kind) for event in events), kind.__name__
    assert_turns_are_whole(events)


def assert_turns_are_whole(events: list[RealtimeServerEvent]) -> None:
    """Deltas of a response add up to its closing events."""
    text: dict[str, str] = {}
    audio: dict[str, int] = {}
    for event in events:
        if isinstance(event, ResponseAudioTranscriptDeltaEvent):
            text[event.response_id] = text.get(event.response_id, "") + event.delta
        elif isinstance(event, ResponseAudioDeltaEvent):
            samples = len(base64.b64decode(event.delta, validate=True)) // 2
            audio[event.response_id] = audio.get(event.response_id, 0) + samples
        elif isinstance(event, ResponseAudioTranscriptDoneEvent):
            assert event.transcript == text[event.response_id] != ""
        elif isinstance(event, ResponseDoneEvent):
            assert event.response.status == "completed"
            assert event.response.id is not None
            facts: Any = event.to_dict()
            assert facts["duplex"]["samples"] == audio[event.response.id] > 0


async def test_an_event_that_is_not_served_is_a_typed_error(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest(), "sdk")
    client = AsyncOpenAI(base_url=sidecar.realtime_url, api_key=token)
    query = {"session": session}
    async with client.realtime.connect(model="duplex", extra_query=query) as connection:
        await next_event(connection)
        await connection.response.create(event_id="mine")
        error = await next_event(connection)
        assert isinstance(error, RealtimeErrorEvent)
        assert error.error.code == "unsupported_event"
        assert error.error.type == "invalid_request_error"
        assert error.error.event_id == "mine"
        await connection.input_audio_buffer.commit(event_id="of nothing")
        empty = await next_event(connection)
        assert isinstance(empty, RealtimeErrorEvent)
        assert empty.error.code == "input_audio_buffer_commit_empty"
        assert empty.error.type == "invalid_request_error"
        assert empty.error.event_id == "of nothing"
        assert empty.event_id != error.event_id
        await connection.send_raw(json.dumps({"type": "session.close"}))
        assert (await next_event(connection)).type == "session.closed"
    await client.close()


async def until_in_mid_reply(connection: AsyncRealtimeConnection) -> tuple[int, str, int]:
    """Speak second by second until a reply has sounded and is not finished: the last unit, the
    reply's item, its samples."""
    item, samples, finished = "", 0, True
    for unit in range(1, MANY_UNITS):
        pcm = speech(1, start_s=unit - 1)
        await connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())
        for event in await unit_events(connection, unit):
            if isinstance(event, ResponseCreatedEvent):
                samples, finished = 0, False
            elif isinstance(event, ResponseAudioDeltaEvent):
                item = event.item_id
                samples += len(base64.b64decode(event.delta)) // 2
            elif isinstance(event, ResponseDoneEvent):
                finished = True
        if samples and not finished:
            return unit, item, samples
    raise AssertionError("the model never speaks for longer than a second")


async def test_a_reply_is_stopped_and_taken_back_with_the_sdks_own_calls(
    sidecar: LocalSidecar,
) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest(), "sdk")
    client = AsyncOpenAI(base_url=sidecar.realtime_url, api_key=token)
    async with client.realtime.connect(
        model="duplex", extra_query={"session": session}
    ) as connection:
        await next_event(connection)
        await connection.session.update(
            session={
                "type": "realtime",
                "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}}},  # type: ignore[typeddict-item]
            }
        )
        await next_event(connection)
        unit, item, samples = await until_in_mid_reply(connection)
        heard_ms = samples // 24 // 2
        await connection.response.cancel()
        await connection.conversation.item.truncate(
            item_id=item, content_index=0, audio_end_ms=heard_ms
        )
        events = [await next_event(connection) for _ in range(6)]
        done, truncated = events[4:]
        assert isinstance(done, ResponseDoneEvent)
        assert done.response.status == "cancelled"
        assert done.response.status_details is not None
        assert done.response.status_details.reason == "client_cancelled"
        assert isinstance(truncated, ConversationItemTruncatedEvent)
        assert (truncated.item_id, truncated.audio_end_ms) == (item, heard_ms)
        for event in events:
            type(event).model_validate_json(event.to_json())

        await connection.response.cancel(event_id="twice")
        error = await next_event(connection)
        assert isinstance(error, RealtimeErrorEvent)
        assert (error.error.code, error.error.event_id) == ("response_cancel_not_active", "twice")
        pcm = speech(1, start_s=unit)
        await connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())
        facts = (await unit_events(connection, unit + 1))[-1].to_dict()
        assert (facts["decision"], facts["rebuild_cause"]) == ("listen", "truncation")
        await connection.send_raw(json.dumps({"type": "session.close"}))
        assert (await next_event(connection)).type == "session.closed"
    await client.close()


async def test_the_synchronous_sdk_talks_too(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest(), "sdk")

    def talk() -> tuple[list[str], list[str]]:
        kinds: list[str] = []
        decisions: list[str] = []
        query = {"session": session}
        with (
            OpenAI(base_url=sidecar.realtime_url, api_key=token) as client,
            client.realtime.connect(model="duplex", extra_query=query) as connection,
        ):
            # The default format: 24 kHz. One second and a bit is one unit, the rest is committed.
            connection.input_audio_buffer.append(audio=base64.b64encode(bytes(60_000)).decode())
            connection.input_audio_buffer.commit()
            while len(decisions) < 2:
                event = connection.recv()
                kinds.append(event.type)
                if "decision" in (facts := event.to_dict()):
                    decisions.append(str(facts["decision"]))
            connection.send_raw(json.dumps({"type": "session.close"}))
        return kinds, decisions

    kinds, decisions = await asyncio.wait_for(asyncio.to_thread(talk), 180)
    assert kinds[0] == "session.created"
    assert len(decisions) == 2
