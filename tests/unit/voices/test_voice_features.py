"""The three kinds of mel and the resampler, against what public packages made of one sound."""

import json

import numpy as np
import pytest
from record_front_end import EVERY, RECORD, sound

from duplex_sidecar.voices.features import prompt_mel, speaker_mel, tokenizer_mel
from duplex_sidecar.voices.resampling import resampled

pytestmark = pytest.mark.unit

TOLERANCES = {
    "tokenizer_mel": 3e-5,
    "speaker_mel": 2e-4,
    "prompt_mel": 3e-5,
    "44100_to_24000": 3e-6,
    "24000_to_16000": 1e-6,
    "16000_to_24000": 1e-6,
}
"""Theirs are computed in float32, ours in float64: what is left is their rounding."""


@pytest.fixture(scope="module")
def made() -> dict[str, np.ndarray]:
    return {
        "tokenizer_mel": tokenizer_mel(sound(16_000)),
        "speaker_mel": speaker_mel(sound(16_000)),
        "prompt_mel": prompt_mel(sound(24_000), 80),
        "44100_to_24000": resampled(sound(44_100), 44_100, 24_000),
        "24000_to_16000": resampled(sound(24_000), 24_000, 16_000),
        "16000_to_24000": resampled(sound(16_000), 16_000, 24_000),
    }


@pytest.mark.parametrize("name", TOLERANCES)
def test_features_are_those_of_the_public_packages(made: dict[str, np.ndarray], name: str) -> None:
    expected = json.loads(RECORD.read_text())["features"][name]
    values = made[name]
    assert values.dtype == np.float32
    assert list(values.shape) == expected["shape"]
    recorded = np.array(expected[f"every_{EVERY}th"])
    assert np.ptp(recorded) > 0.5, "a record of many levels"
    assert np.abs(values.reshape(-1)[::EVERY] - recorded).max() < TOLERANCES[name]


def test_shapes_of_six_seconds() -> None:
    silence_16khz, silence_24khz = np.zeros(96_000, np.float32), np.zeros(144_000, np.float32)
    assert tokenizer_mel(silence_16khz).shape == (128, 600)
    assert speaker_mel(silence_16khz).shape == (598, 80)
    assert prompt_mel(silence_24khz, 80).shape == (300, 80)


def test_silence_is_finite() -> None:
    silence = np.zeros(24_000, np.float32)
    assert np.all(tokenizer_mel(silence) == (-10 + 4) / 4)
    assert np.abs(speaker_mel(silence)).max() < 1e-9
    assert np.allclose(prompt_mel(silence, 80), np.log(1e-5), atol=1)


@pytest.mark.parametrize("count", [0, 1, 7, 16_000])
def test_lengths_after_resampling(count: int) -> None:
    samples = np.ones(count, np.float32)
    assert len(resampled(samples, 16_000, 24_000)) == -(-count * 3 // 2)
    assert len(resampled(samples, 44_100, 16_000)) == -(-count * 160 // 441)
    assert resampled(samples, 16_000, 16_000) is samples
    if count > 1_000:
        inner = resampled(samples, 44_101, 24_000)[100:-100]
        assert np.abs(inner - 1).max() < 1e-2
