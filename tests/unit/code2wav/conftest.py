"""A vocoder small enough for unit tests, with weights that are a formula (no random generator whose
stream could change), and two voices of unequal length."""

import math
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.flow import FlowSettings
from duplex_sidecar.stages.code2wav.layers import Weights, fold_weight_norm
from duplex_sidecar.stages.code2wav.stream import Chunk, Vocoder
from duplex_sidecar.stages.code2wav.weights import Token2WavWeights

SIZES = Token2WavConfig(
    codebook_size=64,
    conformer_size=32,
    conformer_ffn_size=48,
    conformer_layers=2,
    conformer_up_layers=1,
    conformer_head_dim=16,
    estimator_size=32,
    estimator_ffn_size=48,
    estimator_head_dim=16,
    estimator_blocks=2,
    vocoder_size=32,
    f0_size=16,
)
ODE_STEPS = 3


def wave(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers in -1..1 that depend on the name alone."""
    step = 0.37 + zlib.crc32(name.encode()) % 1000 / 997
    values = np.sin(np.arange(1, math.prod(shape) + 1, dtype=np.float64) * step)
    return torch.from_numpy(values.astype(np.float32)).view(shape)


def _weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = wave(name, shape)
    if name.endswith("original0"):
        return 0.5 + 0.1 * values
    if len(shape) == 1:
        return 0.05 * values + (0.0 if name.endswith("bias") else 1.0)
    return 0.2 * values


@dataclass(frozen=True)
class Formula:
    """Makes weights, vocoders and voices."""

    sizes: Token2WavConfig = SIZES
    ode_steps: int = ODE_STEPS

    def state_dicts(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """flow.pt and hift.pt as they would lie in a file."""
        flow = {name: _weight(name, shape) for name, shape in flow_shapes(SIZES).items()}
        hift = {name: _weight(name, shape) for name, shape in hift_shapes(SIZES).items()}
        # F0 of some 30 Hz: the voiced branch runs.
        hift["f0_predictor.classifier.weight"] *= 800
        return flow, hift

    def vocoder(self, conformer_keep_frames: int = 3_000) -> Vocoder:
        flow, hift = self.state_dicts()
        weights = Token2WavWeights(
            Weights(flow), Weights(fold_weight_norm(hift)), torch.device("cpu")
        )
        return Vocoder(weights, FlowSettings(self.ode_steps, 0.7, 0, conformer_keep_frames))

    def voice(self, name: str, codes: int) -> Voice:
        return Voice(
            name=name,
            prompt_codes=np.arange(codes, dtype=np.int64) * 7 % SIZES.codebook_size,
            prompt_mel=wave(f"mel {name}", (2 * codes, 80)).numpy(),
            speaker=wave(f"speaker {name}", (192,)).numpy(),
            reference_16khz=np.zeros(16, np.float32),
        )


@pytest.fixture(scope="session")
def formula() -> Formula:
    torch.set_num_threads(1)
    return Formula()


@pytest.fixture(scope="session")
def voice_a(formula: Formula) -> Voice:
    return formula.voice("a", 12)


@pytest.fixture(scope="session")
def voice_b(formula: Formula) -> Voice:
    return formula.voice("b", 31)


@pytest.fixture(scope="session")
def vocoder(formula: Formula, voice_a: Voice) -> Vocoder:
    """Already run once: the first pass of a process pays for its buffers."""
    made = formula.vocoder()
    made.advance([made.start(voice_a)], [Chunk((0,) * 28, True, "warm-up")])
    return made
