"""The cases of the public change at their full length on the real stages, faster than real time.

The same by their names on fakes, prompt by prompt: tests/integration/test_named_cases.py. Here the
tapes of all sessions are checked from outside at the end.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.material import manifest, picture, speech
from support.realtime import RealtimeClient, conversing
from support.sidecars import Bed

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.contract.check import check_file
from duplex_sidecar.contract.recorder import RECORDED, record

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

MODES = ("off", "basic", "context")
SLIDING = ("basic", "context")
UNIT_BYTES = 2 * 16_000
VOICE_POSITIONS = 60
"""The clip of the checkpoint's own voice: six seconds."""
VOICE_MARKERS = 3
"""A line feed and what opens the clip; what closes it."""
NAMED_VOICES = len(SLIDING) * 3
UNIT_ID = 1
"""What stands for a row of a clip in recorded layouts."""
SMALL = {
    "off": {"mode": "off"},
    "basic": {"mode": "basic", "basicWindowHighTokens": 600, "basicWindowLowTokens": 400},
    "context": {"mode": "context", "contextMaxUnits": 8, "contextPreviousMaxTokens": 60},
}


@pytest.fixture(scope="module")
def tapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tapes")


@pytest.fixture(scope="module")
def taped(bed: Bed, tapes: Path) -> Iterator[LocalSidecar]:
    """A sidecar with the model's whole length, whose sessions are taped."""
    sidecar = bed.prepare("named", contract_tape_dir=str(tapes), max_model_tokens=8192)
    sidecar.start()
    sidecar.wait_ready()
    yield sidecar
    sidecar.stop()


def spec(window: dict[str, Any], *, camera: bool, voice: str | None = None) -> str:
    """voice: named, so that its reference clip stands in the prompt."""
    named = {"voice": {"name": voice}} if voice else {}
    return manifest(window=window, **named, **({"camera": {"framesPerUnit": 1}} if camera else {}))


def a_frame(number: int) -> str:
    return base64.b64encode(picture(shade=number * 3 % 256)).decode()


async def talk(client: RealtimeClient, units: int, *, camera: bool, every: int = 1) -> None:
    """Second after second, a few ahead of the answers."""
    for number in range(1, units + 1):
        shown = camera and number % every == 0
        frames = {"video_frames": [a_frame(number)]} if shown else {}
        await client.append(speech(1, number - 1), **frames)
        if number > 3:
            await client.until_unit(number - 3)
    await client.until_unit(units)
    client.heard.assert_whole()
    assert client.heard.errors == []


def said_by(client: RealtimeClient) -> list[tuple[str, int, int]]:
    """Of each unit: what was decided, how long the answer is and its prompt was."""
    return [(u["decision"], u["tokens"], u["window_tokens"]) for u in client.heard.units]


@pytest.mark.parametrize("voice", [None, "default"], ids=["no voice", "reference voice"])
@pytest.mark.parametrize("mode", SLIDING)
async def test_short_input_then_a_new_session(
    taped: LocalSidecar, mode: str, voice: str | None
) -> None:
    terms = spec({"mode": mode}, camera=False, voice=voice)
    async with conversing(taped, terms, "alone") as client:
        await talk(client, 20, camera=False)
        alone = said_by(client)
        sound = client.heard.audio_bytes
    async with conversing(taped, terms, "short") as client:
        await client.append(speech(0.4))
        await client.send({"type": "input_audio_buffer.commit"})
        await client.until_unit(1)
        assert said_by(client)[0][2] == alone[0][2], "the same context, and 0.4 s are one unit"
        await client.close_session()
    async with conversing(taped, terms, "next") as client:
        await talk(client, 20, camera=False)
        assert client.heard.audio_bytes == sound > 0
        assert said_by(client) == alone
    if voice:
        async with conversing(taped, spec({"mode": mode}, camera=False), "plain") as client:
            await client.append(speech(1))
            await client.until_unit(1)
            longer = alone[0][2] - client.heard.units[0]["window_tokens"]
            assert longer == VOICE_POSITIONS + VOICE_MARKERS


@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("mode", SLIDING)
async def test_131_s_continuous(taped: LocalSidecar, mode: str, camera: bool) -> None:
    async with conversing(taped, spec({"mode": mode}, camera=camera), f"long-{mode}") as client:
        await talk(client, 131, camera=camera)
        assert client.heard.audio_bytes > 10 * 24_000 * 2
        slides = [unit["unit"] for unit in client.heard.units if unit["rebuild_cause"] == "slide"]
        if mode == "context":
            assert slides == list(range(26, 132))
        else:
            assert bool(slides) == camera


@pytest.mark.parametrize("mode", MODES)
async def test_burst_plus_final_flush(taped: LocalSidecar, mode: str) -> None:
    heard: list[list[tuple[str, int]]] = []
    for pieces in (1, 13):
        async with conversing(taped, spec({"mode": mode}, camera=False), "burst") as client:
            pcm = speech(12.4)
            size = len(pcm) if pieces == 1 else UNIT_BYTES
            for start in range(0, len(pcm), size):
                await client.speak(pcm[start : start + size])
            await client.send({"type": "input_audio_buffer.commit"})
            await client.until_unit(13)
            client.heard.assert_whole()
            assert client.heard.errors == []
            heard.append([(unit["decision"], unit["tokens"]) for unit in client.heard.units])
    assert heard[0] == heard[1]


@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("mode", MODES)
async def test_100_appends(taped: LocalSidecar, mode: str, camera: bool) -> None:
    async with conversing(taped, spec(SMALL[mode], camera=camera), f"hundred-{mode}") as client:
        await talk(client, 100, camera=camera, every=2)
        slides = [unit for unit in client.heard.units if unit["rebuild_cause"] == "slide"]
        assert bool(slides) == (mode != "off")


def test_what_all_of_them_did_is_what_they_should_have_done(
    taped: LocalSidecar, tapes: Path, tmp_path: Path
) -> None:
    taped.stop()
    taken = sorted(tapes.glob("*.tape.jsonl"))
    assert len(taken) == 30
    report = record(taken, tmp_path / "traces")
    assert (report.left_out, report.findings) == ((), ())
    assert {path.stem for path, _ in report.files} == set(RECORDED)
    for path, _ in report.files:
        assert check_file(path).differences == ()
    with (tmp_path / "traces" / "layout_sessions.jsonl").open() as lines:
        layouts = [json.loads(line) for line in lines]
    clips = [layout["ref_samples"] for layout in layouts if layout["ref_samples"] is not None]
    assert clips == [VOICE_POSITIONS * 1_600] * NAMED_VOICES
    for layout in layouts:
        placed = [count for id_, count in layout["context_layout"] if id_ == UNIT_ID]
        assert placed == ([VOICE_POSITIONS] if layout["ref_samples"] else [])
