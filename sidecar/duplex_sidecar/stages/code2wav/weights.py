"""Loads `flow.pt` and `hift.pt` by their public parameter names, strictly.

The names and shapes expected come from the checkpoint's config; a file that lacks one, has one too
many or has one in another shape is refused with the whole list.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.layout import FLOW_NAME, HIFT_NAME
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.stages.code2wav.layers import Weights, fold_weight_norm

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Token2WavWeights:
    """float32, on `device`; the vocoder's weight norm is folded."""

    flow: Weights
    hift: Weights
    device: torch.device


def load_weights(folder: Path, config: Token2WavConfig, device: torch.device) -> Token2WavWeights:
    """Read a checkpoint folder's two state dicts. Raises CheckpointError (missing, unreadable,
    shape_mismatch with every finding)."""
    flow = _read(folder / FLOW_NAME, flow_shapes(config))
    hift = _read(folder / HIFT_NAME, hift_shapes(config))
    return _placed(flow, hift, device)


def dummy_weights(config: Token2WavConfig, device: torch.device) -> Token2WavWeights:
    """Seeded random weights of the same shapes, loud enough to exercise the voiced branch."""
    generator = torch.Generator().manual_seed(0)
    flow = {name: _random(name, s, generator) for name, s in flow_shapes(config).items()}
    hift = {name: _random(name, s, generator) for name, s in hift_shapes(config).items()}
    hift["f0_predictor.classifier.weight"] *= 3_000
    return _placed(flow, hift, device)


def _random(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("original0"):
        return 0.5 * (1 + 0.02 * values).abs()
    if name.endswith("original1"):
        return values
    is_scale = len(shape) == 1 and not name.endswith("bias")
    return (0.02 if len(shape) == 1 else 0.05) * values + (1.0 if is_scale else 0.0)


def _placed(
    flow: Mapping[str, Tensor], hift: Mapping[str, Tensor], device: torch.device
) -> Token2WavWeights:
    return Token2WavWeights(
        Weights({name: tensor.float().to(device) for name, tensor in flow.items()}),
        Weights(
            {
                name: tensor.float().to(device)
                for name, tensor in fold_weight_norm(
                    {name: tensor.float() for name, tensor in hift.items()}
                ).items()
            }
        ),
        device,
    )


def _read(path: Path, expected: Mapping[str, Shape]) -> dict[str, Tensor]:
    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(CheckpointFault.MISSING, str(path), "no such file") from None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            CheckpointFault.UNREADABLE, str(path), f"{type(error).__name__}: {error}"
        ) from None
    if not isinstance(loaded, dict):
        raise CheckpointError(CheckpointFault.UNREADABLE, str(path), "no state dict")
    tensors = cast(dict[str, Tensor], loaded)
    findings = differences(tensors, expected)
    if findings:
        raise CheckpointError(CheckpointFault.SHAPE_MISMATCH, str(path), "; ".join(findings))
    return tensors


def differences(tensors: Mapping[str, object], expected: Mapping[str, Shape]) -> list[str]:
    """One sentence per tensor that is missing, unexpected or mis-shaped; empty = a strict match."""
    found = {
        name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, Tensor)
    }
    sentences = [f"{name} is missing" for name in expected if name not in found]
    sentences += [f"{name} is unexpected" for name in tensors if name not in expected]
    sentences += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    return sentences
