"""The recording and the clip that ship as examples."""

from pathlib import Path

import pytest

from duplex_sidecar.checkpoint.recording import read_recording, recording_path
from duplex_sidecar.client.media import read_frames, read_speech

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_is_the_recording_of_the_fit() -> None:
    example = EXAMPLES / "audio" / "conversation.flac"
    assert example.resolve() == recording_path().resolve()
    assert read_speech(example) == read_recording(recording_path()).tobytes()


def test_the_clip_has_a_small_picture_a_second() -> None:
    clip = EXAMPLES / "video" / "camera.mp4"
    assert clip.stat().st_size < 300_000
    frames = read_frames(clip)
    assert len(frames) == 16
    assert len(set(frames)) > 12
    assert max(map(len, frames)) < 50_000
