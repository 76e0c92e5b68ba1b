"""Whatever a client sends wrongly is answered by name, and the session goes on as if it had not
been sent."""

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from support.material import manifest, picture, speech
from support.realtime import (
    UNIT_BYTES,
    RealtimeClient,
    append_event,
    conversing,
    dialled,
    joined,
    new_session,
    session_update,
)

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.doors.openai_wire import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.client

CAMERA = {"framesPerUnit": 1}
AUDIO = base64.b64encode(bytes(3_200)).decode()


def frame_event(*frames: bytes) -> dict[str, Any]:
    encoded = [base64.b64encode(frame).decode() for frame in frames]
    return append_event(b"", video_frames=encoded)


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


MALFORMED: list[tuple[str, Any, str]] = [
    ("no json", "{", "invalid_json"),
    ("no utf-8", b"\xff\xfe\x00", "invalid_json"),
    ("a json list", "[]", "invalid_event"),
    ("a json number", "7", "invalid_event"),
    ("no type", "{}", "invalid_event"),
    ("a type that is no text", {"type": 5}, "invalid_event"),
    ("an unknown type", {"type": "no.such.event"}, "unknown_event"),
    ("a type of another product", {"type": "response.create"}, "unsupported_event"),
    ("no reply to stop", {"type": "response.cancel"}, "response_cancel_not_active"),
    (
        "an item that was never said",
        {"type": "conversation.item.truncate", "item_id": "item_x_1", "audio_end_ms": 0},
        "playback_item_not_found",
    ),
    ("a setting of another product", update(temperature=1), "immutable_setting"),
    ("audio that is no text", {"type": "input_audio_buffer.append", "audio": 3}, "invalid_event"),
    ("no audio", {"type": "input_audio_buffer.append"}, "invalid_event"),
    ("no base64", {"type": "input_audio_buffer.append", "audio": "%%%"}, "invalid_audio"),
    ("an unknown field", append_event(b"", extra=""), "invalid_event"),
    ("a position that is no number", append_event(b"", from_sample="0"), "invalid_event"),
    ("a negative position", append_event(b"", from_sample=-1), "invalid_event"),
    ("a position beyond 64 bits", append_event(b"", from_sample=2**70), "invalid_event"),
    ("an id without end", {"type": "session.heartbeat", "event_id": "x" * 5_000}, "invalid_event"),
    ("half a sample", append_event(b"\x00\x00\x00"), "invalid_audio"),
    ("settings that are no object", {"type": "session.update", "session": 1}, "invalid_event"),
    ("a rate below 8 kHz", session_update(rate=4_000), "invalid_sample_rate"),
    ("a rate above 192 kHz", session_update(rate=192_001), "invalid_sample_rate"),
    ("a rate that is no number", session_update(rate=True), "invalid_event"),
    ("an unknown format", session_update("audio/opus"), "unsupported_audio_format"),
    ("instructions", update(instructions="be brief"), "immutable_setting"),
    ("a voice", update(voice="alloy"), "immutable_setting"),
    ("a window", update(sliding_window={}), "sliding_window_update_unsupported"),
    (
        "an output rate",
        update(audio={"output": {"format": {"type": "audio/pcm", "rate": 16_000}}}),
        "unsupported_audio_format",
    ),
    ("a resume that is not first", {"type": "session.resume"}, "out_of_order_event"),
    ("frames without a camera", frame_event(picture()), "too_many_frames"),
]


async def assert_goes_on(client: RealtimeClient, unit: int) -> None:
    """The next second of speech is the next unit, at the position where the last one ended."""
    await client.append(speech(1))
    await client.until_unit(unit)
    client.heard.assert_whole()
    accepted = client.heard.of_type("input_audio_buffer.committed")[-1]["duplex"]
    assert accepted["from_sample"] == 16_000 * (unit - 1)


async def test_malformed_events_are_named_and_leave_no_trace(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest()) as client:
        await assert_goes_on(client, 1)
        found: dict[str, str] = {}
        for what, event, _ in MALFORMED:
            if isinstance(event, dict):
                event = {"event_id": f"e-{what}"} | event
            error = await client.refused(event)
            found[what] = error["code"]
            if error["event_id"] is not None:
                assert error["event_id"] == f"e-{what}"
            assert error["message"]
            assert error["type"] == "invalid_request_error"
            assert error["retryable"] is False
        assert found == {what: code for what, _, code in MALFORMED}
        await assert_goes_on(client, 2)


async def test_errors_name_the_event_that_caused_them(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest()) as client:
        for event in (append_event(b"\x00"), session_update(rate=1), {"type": "no.such"}):
            error = await client.refused(event | {"event_id": "mine"})
            assert error["event_id"] == "mine"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_samples_that_are_not_finite(sidecar: LocalSidecar, value: float) -> None:
    async with conversing(sidecar, manifest()) as client:
        await client.format("audio/x-f32le", 16_000)
        bad = struct.pack("<3f", 0.0, value, 0.0)
        assert (await client.refused(append_event(bad)))["code"] == "invalid_audio"
        odd = append_event(bytes(4 * 100 + 2))
        assert (await client.refused(odd))["code"] == "invalid_audio"
        await client.append(bytes(4 * 16_000))
        await client.until_unit(1)


async def test_positions_that_do_not_join(sidecar: LocalSidecar) -> None:
    """A gap is refused; what is sent twice is taken once."""
    async with conversing(sidecar, manifest()) as client:
        await client.append(bytes(UNIT_BYTES), from_sample=0)
        error = await client.refused(append_event(bytes(3_200), from_sample=16_001))
        assert (error["code"], error["param"]) == ("out_of_order_event", "from_sample")
        assert "16000" in error["message"]
        await client.append(bytes(UNIT_BYTES), from_sample=0)  # all of it known
        await client.append(bytes(UNIT_BYTES), from_sample=8_000)  # half of it known
        await client.append(bytes(UNIT_BYTES // 2), from_sample=24_000)
        await client.until_unit(2)
        accepted = [
            event["duplex"] for event in client.heard.of_type("input_audio_buffer.committed")
        ]
        assert [(facts["from_sample"], facts["to_sample"]) for facts in accepted] == [
            (0, 16_000),
            (16_000, 32_000),
        ]


async def test_the_rate_is_fixed_by_the_first_input(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest()) as client:
        await assert_goes_on(client, 1)
        error = await client.refused(session_update(rate=24_000))
        assert error["code"] == "immutable_setting"
        assert error["param"] == "session.audio.input.format.rate"
        await assert_goes_on(client, 2)


async def test_input_behind_a_close_is_out_of_order(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest()) as client:
        await client.append(speech(3))
        await client.send({"type": "session.close"})
        await client.append(bytes(3_200))
        closed = await client.until("session.closed")
        assert closed["reason"] == "session_ended"
        # The units that were whole are done first; the rest is refused or no longer read.
        assert {error["code"] for error in client.heard.errors} <= {
            "out_of_order_event",
            "session_ended",
        }


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"GIF89a not a frame"], "invalid_frame"),
        ([b""], "invalid_frame"),
        ([picture()[:40]], "invalid_frame"),
        ([picture(kind="GIF")], "invalid_frame"),
        ([picture(1_300, 16)], "invalid_frame"),
        ([picture(4_100, 4_100, "PNG")], "frame_too_large"),
        ([b"\xff\xd8\xff" + bytes(4 * 1024 * 1024)], "frame_too_large"),
        ([picture(), picture()], "too_many_frames"),
        ([picture(), picture(), picture()], "too_many_frames"),
    ],
    ids=["text", "empty", "cut", "gif", "strip", "pixels", "bytes", "two", "three"],
)
async def test_bad_frames_are_refused_and_their_sound_with_them(
    sidecar: LocalSidecar, frames: list[bytes], code: str
) -> None:
    async with conversing(sidecar, manifest(camera=CAMERA)) as client:
        encoded = [base64.b64encode(frame).decode() for frame in frames]
        event = append_event(speech(1), video_frames=encoded)
        assert (await client.refused(event))["code"] == code
        await assert_goes_on(client, 1)


async def test_a_frame_whose_pixels_are_broken_costs_its_picture_alone(
    sidecar: LocalSidecar,
) -> None:
    """Its header is good, so the encoder alone can find out."""
    whole = picture(640, 480)
    broken = base64.b64encode(whole[: len(whole) // 2]).decode()
    async with conversing(sidecar, manifest(camera=CAMERA)) as client:
        await client.append(speech(1), video_frames=[broken])
        unit = await client.until_unit(1)
        assert [error["code"] for error in client.heard.errors] == ["invalid_frame"]
        good = base64.b64encode(whole).decode()
        await client.append(speech(1, 1), video_frames=[good])
        seen = await client.until_unit(2)
        assert seen["window_tokens"] - unit["window_tokens"] >= 66
        client.heard.assert_whole()


async def test_more_frames_than_may_wait(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest(camera=CAMERA)) as client:
        small = picture(64, 64)
        for _ in range(16):
            await client.send(frame_event(small))
        error = await client.refused(frame_event(small))
        assert (error["code"], error["type"]) == ("input_overflow", "capacity_error")
        await client.send({"type": "input_audio_buffer.clear"})
        await client.until("input_audio_buffer.cleared")
        await assert_goes_on(client, 1)


@pytest.mark.parametrize("bytes_over", [1, 2 * 1024 * 1024])
async def test_a_message_over_the_limit_closes_with_1009(
    sidecar: LocalSidecar, bytes_over: int
) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    async with joined(sidecar, session, token) as client:
        await assert_goes_on(client, 1)
        event = json.dumps({"type": "session.heartbeat", "event_id": ""})
        event = event[:-2] + "x" * (MAX_MESSAGE_BYTES + bytes_over - len(event)) + event[-2:]
        assert await client.cut_off_by(event) == 1009
    async with joined(sidecar, session, token, heard=client.heard, resume=True) as client:
        await assert_goes_on(client, 2)
        await client.close_session()


async def test_a_stream_of_rubbish_is_cut_off(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    async with joined(sidecar, session, token) as client:
        assert await client.cut_off_by_many("rubbish", 200) == 1008
        errors = client.heard.errors
        assert 0 < len(errors) <= 101
    async with joined(sidecar, session, token, heard=client.heard, resume=True) as client:
        await assert_goes_on(client, 1)
        await client.close_session()


@pytest.mark.parametrize(
    "first",
    [
        {"type": "session.heartbeat"},
        append_event(bytes(3_200)),
        {"type": "session.resume", "last_received_server_event_seq": -1},
        {"type": "session.resume", "last_received_server_event_seq": "0"},
        "{",
    ],
    ids=["heartbeat", "append", "negative", "text", "rubbish"],
)
async def test_resume_needs_its_position_first(sidecar: LocalSidecar, first: Any) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    try:
        async with dialled(sidecar, session, token) as other:
            await other.until("session.created")
            async with dialled(sidecar, session, token, resume=True) as client:
                await client.send(first)
                error = (await client.until("error"))["error"]
                assert error["code"] in ("out_of_order_event", "invalid_event", "invalid_json")
                code, _ = await client.until_closed()
                assert code == 1008
            # Whoever was connected still is.
            await other.format()
            await assert_goes_on(other, 1)
    finally:
        await asyncio.to_thread(sidecar.admin, "DELETE", f"/sessions/{session}")
