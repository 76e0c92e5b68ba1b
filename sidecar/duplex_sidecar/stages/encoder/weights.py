"""The encoder's modules under their public names, filled from a checkpoint or with noise."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import Tensor, nn

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.headers import read_index
from duplex_sidecar.checkpoint.layout import INDEX_NAME, WEIGHTS_NAME
from duplex_sidecar.stages.encoder.apm import AudioProjector, AudioTower
from duplex_sidecar.stages.encoder.shapes import EncoderShape, shapes, unused_names
from duplex_sidecar.stages.encoder.vision import Resampler, VisionTower

_BIAS_DEVIATION = 0.02
_NORM_DEVIATION = 0.1


class EncoderModules(nn.Module):
    """All parameters; its state dict has exactly the public names that the encoder uses."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.apm = AudioTower(shape)
        self.audio_projection_layer = AudioProjector(shape)
        self.vpm = VisionTower(shape)
        self.resampler = Resampler(shape)


def build(shape: EncoderShape, weights: Mapping[str, Tensor]) -> EncoderModules:
    """Modules that hold `weights` themselves, not copies. Raises ValueError that lists every
    missing, unexpected and mis-shaped name."""
    expected = used_shapes(shape)
    problems = [f"{name} missing" for name in expected if name not in weights]
    for name, tensor in weights.items():
        if name not in expected:
            problems.append(f"{name} unexpected")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {tuple(tensor.shape)}, expected {expected[name]}")
    if problems:
        raise ValueError("; ".join(problems))
    modules = EncoderModules(shape)
    modules.load_state_dict(weights, strict=True, assign=True)
    return modules.requires_grad_(False).eval()


def used_shapes(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    """`shapes` without what the encoder does not load."""
    unused = unused_names(shape)
    return {name: size for name, size in shapes(shape).items() if name not in unused}


def read_weights(
    folder: Path, shape: EncoderShape, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The encoder's tensors of a checkpoint, one file or shards; others are not read.

    Raises CheckpointError: missing, unreadable. Names that are absent are left out: `build` tells.
    """
    by_file: dict[str, list[str]] = {}
    if (folder / WEIGHTS_NAME).exists():
        by_file[WEIGHTS_NAME] = list(used_shapes(shape))
    else:
        weight_map = read_index(folder / INDEX_NAME)
        for name in used_shapes(shape):
            if name in weight_map:
                by_file.setdefault(weight_map[name], []).append(name)
    weights: dict[str, Tensor] = {}
    for file, names in by_file.items():
        weights |= _read_file(folder / file, names, dtype, device)
    return weights


def _read_file(
    path: Path, names: list[str], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    try:
        # The package's class is written in Rust and has no types.
        with cast(Any, safetensors).safe_open(path, framework="pt") as file:
            present = set(file.keys())
            return {
                name: file.get_tensor(name).to(device, dtype) for name in names if name in present
            }
    except FileNotFoundError:
        raise CheckpointError(CheckpointFault.MISSING, str(path), "no such file") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(CheckpointFault.UNREADABLE, str(path), str(error)) from None


def noise(
    shape: EncoderShape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights of the right names and shapes, for benches and tests. Scaled by the number of
    inputs, so that no layer drowns the others; norms are near 1 and 0, each another number."""
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, size in used_shapes(shape).items():
        values = torch.randn(size, generator=generator, dtype=dtype, device=device)
        is_norm = "norm" in name or ".ln_" in name
        if name.endswith("bias"):
            weights[name] = values.mul_(_BIAS_DEVIATION)
        elif is_norm:
            weights[name] = values.mul_(_NORM_DEVIATION).add_(1.0)
        else:
            weights[name] = values.mul_(math.prod(size[1:]) ** -0.5)
    return weights
