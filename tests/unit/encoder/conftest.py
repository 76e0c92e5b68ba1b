"""One tiny encoder with seeded weights for the whole folder, and sound to feed it."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from duplex_sidecar.checkpoint.layout import encoder_shape
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.stages.encoder.audio import AudioEncoder
from duplex_sidecar.stages.encoder.shapes import EncoderShape
from duplex_sidecar.stages.encoder.vision import VisionEncoder
from duplex_sidecar.stages.encoder.weights import EncoderModules, build, noise


@dataclass(frozen=True)
class Encoders:
    shape: EncoderShape
    weights: dict[str, torch.Tensor]
    modules: EncoderModules
    audio: AudioEncoder
    vision: VisionEncoder


def make_encoders(shape: EncoderShape) -> Encoders:
    weights = noise(shape, torch.float32, torch.device("cpu"), seed=7)
    modules = build(shape, weights)
    return Encoders(
        shape,
        weights,
        modules,
        AudioEncoder(shape, modules.apm, modules.audio_projection_layer),
        VisionEncoder(shape, modules.vpm, modules.resampler),
    )


@pytest.fixture(scope="session")
def encoders() -> Encoders:
    torch.set_num_threads(1)
    return make_encoders(encoder_shape(tiny_config()))


@pytest.fixture(scope="session")
def short_encoders() -> Encoders:
    """With a position table of 200 rows: the cache is dropped every 3 chunks."""
    shape = msgspec.structs.replace(encoder_shape(tiny_config()), audio_positions=200)
    return make_encoders(shape)


@pytest.fixture(scope="session")
def make_sound() -> Callable[[int, int], NDArray[np.int16]]:
    return sound


def sound(seconds: int, seed: int) -> NDArray[np.int16]:
    """Noise and tones whose loudness changes by a factor of 1,000 from second to second, with
    stretches of digital silence: the level floor is reached, left, and moves with the buffer.
    16,560 + 16,000 * (seconds - 1) samples."""
    random = np.random.default_rng(seed)
    count = 16_560 + 16_000 * (seconds - 1)
    loudness = np.repeat(10.0 ** random.uniform(-3.5, -0.5, seconds + 1), 16_000)[:count]
    loudness *= np.repeat(random.random(2 * seconds + 2) > 0.15, 8_000)[:count]
    time_s = np.arange(count) / 16_000
    wave = random.standard_normal(count) + 2 * np.sin(2 * np.pi * 440 * time_s * (1 + time_s / 90))
    return np.clip(wave * loudness * 32_767, -32_768, 32_767).astype("<i2")
