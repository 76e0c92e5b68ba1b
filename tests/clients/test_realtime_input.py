"""What clients of other kinds send: other rates and encodings, a browser's handshake, a camera."""

import asyncio
import base64
import json

import numpy as np
import pytest
from support.material import EXAMPLES, manifest, resampled, speech, to_s16le, to_ulaw
from support.realtime import (
    UNIT_SAMPLES,
    Heard,
    RealtimeClient,
    append_event,
    conversing,
    new_session,
    realtime_url,
)
from websockets.asyncio.client import connect
from websockets.typing import Origin, Subprotocol

from duplex_sidecar.client.conversation import Conversation
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.client.media import read_frames

pytestmark = pytest.mark.client

UNITS = 14
ACCEPTED = "input_audio_buffer.committed"


async def converse(
    sidecar: LocalSidecar, kind: str, rate_hz: int, audio: bytes, sample_bytes: int
) -> Heard:
    """A conversation of UNITS units in that format, sent in odd pieces."""
    async with conversing(sidecar, manifest()) as client:
        await client.format(kind, rate_hz)
        piece = 1_111 * sample_bytes
        for start in range(0, len(audio), piece):
            await client.append(audio[start : start + piece])
        await client.send({"type": "input_audio_buffer.commit"})
        await client.until_unit(UNITS)
        assert client.heard.errors == []
        client.heard.assert_whole()
        accepted = [event["duplex"] for event in client.heard.of_type(ACCEPTED)][:UNITS]
        assert [facts["from_sample"] for facts in accepted] == [n * rate_hz for n in range(UNITS)]
        assert all(facts["to_sample"] - facts["from_sample"] == rate_hz for facts in accepted)
        return client.heard


def said(heard: Heard) -> list[tuple[str, int, int]]:
    return [(unit["decision"], unit["tokens"], unit["audio_samples"]) for unit in heard.units]


async def test_float_samples_are_heard_exactly_as_the_same_16_bit_samples(
    sidecar: LocalSidecar,
) -> None:
    pcm = speech(UNITS)
    floats = (np.frombuffer(pcm, "<i2").astype("<f4") / 32_768).tobytes()
    as_integers = await converse(sidecar, "audio/pcm", UNIT_SAMPLES, pcm, 2)
    as_floats = await converse(sidecar, "audio/x-f32le", UNIT_SAMPLES, floats, 4)
    assert said(as_integers) == said(as_floats)
    assert {"listen", "speak"} == {unit["decision"] for unit in as_integers.units}
    assert as_integers.audio_bytes == as_floats.audio_bytes > 0


@pytest.mark.parametrize(
    ("kind", "rate_hz", "sample_bytes"),
    [("audio/pcm", 24_000, 2), ("audio/pcmu", 8_000, 1), ("audio/pcm", 44_100, 2)],
)
async def test_other_rates_make_whole_units_too(
    sidecar: LocalSidecar, kind: str, rate_hz: int, sample_bytes: int
) -> None:
    samples = resampled(speech(UNITS), rate_hz)
    audio = to_ulaw(samples) if kind == "audio/pcmu" else to_s16le(samples)
    heard = await converse(sidecar, kind, rate_hz, audio, sample_bytes)
    assert {"listen", "speak"} == {unit["decision"] for unit in heard.units}


async def test_a_browser_gives_its_token_as_a_subprotocol(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    offered = ["realtime", f"openai-insecure-api-key.{token}", "openai-beta.realtime-v1"]
    connection = connect(
        realtime_url(sidecar, session),
        subprotocols=[Subprotocol(name) for name in offered],
        origin=Origin("https://example.org"),
        compression="deflate",  # a browser offers it; the server may decline
    )
    async with connection as socket:
        assert socket.subprotocol == "realtime"
        client = RealtimeClient(socket, session)
        await client.until("session.created")
        await client.append(bytes(2 * 26_400), is_speech=False)
        assert (await client.until_unit(1))["unit"] == 1
        await client.close_session()


async def test_text_and_binary_messages_mean_the_same(sidecar: LocalSidecar) -> None:
    async with conversing(sidecar, manifest()) as client:
        event = json.dumps(append_event(speech(1)))
        await client.send(event)
        await client.send(event.encode())
        await client.until_unit(2)
        client.heard.assert_whole()


async def test_the_camera_example_is_seen_and_its_window_slides(sidecar: LocalSidecar) -> None:
    text = (EXAMPLES / "session-camera.yaml").read_text()
    clip = read_frames(EXAMPLES / "video" / "camera.mp4")
    seconds = 26
    frames = [clip[second % len(clip)] for second in range(seconds)]
    session, token = await asyncio.to_thread(new_session, sidecar, text, "camera")
    conversation = Conversation(
        sidecar.realtime_url, session, token, speech(seconds), frames, speed=20.0
    )
    talk = await asyncio.wait_for(conversation.run(), 240)
    assert talk.errors == []
    assert [unit["unit"] for unit in talk.units] == list(range(1, seconds + 1))
    tokens = [unit["window_tokens"] for unit in talk.units]
    assert tokens[1] - tokens[0] >= 66, "an image takes 66 positions"
    slides = [unit for unit in talk.units if unit["rebuild_cause"] == "slide"]
    assert slides
    assert all(unit["dropped_units"] > 0 for unit in slides)
    assert max(tokens) <= 1_600


async def test_two_frames_a_second_where_the_manifest_allows_them(sidecar: LocalSidecar) -> None:
    frames = read_frames(EXAMPLES / "video" / "camera.mp4")
    encoded = [base64.b64encode(frame).decode() for frame in frames[:2]]
    async with conversing(sidecar, manifest(camera={"framesPerUnit": 2})) as client:
        await client.append(speech(1), video_frames=encoded)
        await client.append(speech(1, 1))
        await client.until_unit(2)
        one, two = (unit["window_tokens"] for unit in client.heard.units)
        assert one > 2 * 66
        assert two - one < 66
