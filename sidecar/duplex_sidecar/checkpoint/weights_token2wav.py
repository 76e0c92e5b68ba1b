"""Seeded random weights of `flow.pt` and `hift.pt`: what they make is noise, but well audible noise
of a moving pitch, so that whoever listens hears replies begin, change and end."""

import math

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.weights import BIAS_SPREAD, NORM_SPREAD, Shape, spread

F0_GAIN_HZ = 400.0
"""Scale of the predicted pitch: the voiced branch of the source has to run."""
RESIDUAL_MAGNITUDE = 0.3
LOG_LOUDNESS = -0.4
"""Added to the vocoder's log magnitudes: what comes out is well audible and does not clip."""


def flow_tensor(key: str, shape: Shape, seed: int) -> Tensor:
    """A tensor of `flow.pt`."""
    values = spread(f"flow.{key}", shape, seed)
    module, _, kind = key.rpartition(".")
    leaf = module.rpartition(".")[2]
    if key == "input_embedding.weight":
        return values
    if len(shape) == 1:
        is_norm = "norm" in leaf or module.endswith((".out.1", "conv.block.3"))
        return (1.0 if is_norm and kind == "weight" else 0.0) + BIAS_SPREAD * values
    return values / math.sqrt(math.prod(shape[1:]))


def hift_tensor(key: str, shape: Shape, seed: int) -> Tensor:
    """A tensor of `hift.pt`. Weight-normed layers have rows of about unit length, residual ones
    shorter, up-sampling ones longer by what their stride thins out."""
    values = spread(f"hift.{key}", shape, seed)
    if key.endswith("original1"):
        return values
    if key.endswith("original0"):
        if "resblocks" in key:
            return torch.full(shape, RESIDUAL_MAGNITUDE)
        magnitudes = {"ups": 2.0, "conv_post": 0.5}
        return torch.full(shape, magnitudes.get(key.partition(".")[0], 1.0))
    if key.endswith("alpha"):
        return 1.0 + NORM_SPREAD * values
    if key == "f0_predictor.classifier.weight":
        return F0_GAIN_HZ * values / math.sqrt(shape[1])
    if key == "conv_post.bias":
        spectrum_bins = shape[0] // 2
        loudness = torch.zeros(shape)
        loudness[:spectrum_bins] = LOG_LOUDNESS
        return loudness + BIAS_SPREAD * values
    if len(shape) == 1:
        return BIAS_SPREAD * values
    return values / math.sqrt(math.prod(shape[1:]))
