"""The few layer kinds of the flow decoder and the vocoder, made from public parameter names.

Plain values instead of `nn.Module`: there is no training state, and a layer is what its tensors
are. Every size is read from the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Weights:
    """A view of a flat state dict under a prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def under(self, name: str) -> "Weights":
        return Weights(self._tensors, f"{self._prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(self._prefix + name)

    def count(self, name: str) -> int:
        """How many numbered children `name.0.`, `name.1.`, ... there are."""
        number = 0
        while any(key.startswith(f"{self._prefix}{name}.{number}.") for key in self._tensors):
            number += 1
        return number

    def linear(self, name: str) -> "Linear":
        return Linear(self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, name: str, epsilon: float = 1e-5) -> "Norm":
        return Norm(self[f"{name}.weight"], self[f"{name}.bias"], epsilon)

    def causal_conv(self, name: str) -> "CausalConv":
        weight = self[f"{name}.weight"]
        return CausalConv(weight.flatten(1).contiguous(), self.get(f"{name}.bias"), weight.shape[2])

    def conv(self, name: str, stride: int = 1, padding: int = 0, dilation: int = 1) -> "Conv":
        return Conv(self[f"{name}.weight"], self.get(f"{name}.bias"), stride, padding, dilation)


@dataclass(frozen=True, slots=True)
class Linear:
    """[..., inputs] -> [..., outputs]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer norm over the last dimension."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Conv:
    """[B, inputs, T] -> [B, outputs, T']."""

    weight: Tensor
    bias: Tensor | None
    stride: int
    padding: int
    dilation: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation)


@dataclass(frozen=True, slots=True)
class CausalConv:
    """[B, T + width - 1, inputs] -> [B, T, outputs], time before channels.

    A matrix product over windows instead of a convolution: what a row gives then does not depend
    on the rows beside it (oneDNN's convolutions choose their algorithm by the batch).
    """

    weight: Tensor
    bias: Tensor | None
    width: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.unfold(1, self.width, 1).flatten(2), self.weight, self.bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * d] -> [B, heads, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """[B, heads, T, d] -> [B, T, heads * d]."""
    return x.transpose(1, 2).flatten(2)


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace weight-norm pairs (magnitude `original0`, direction `original1`, or the older
    `weight_g`, `weight_v`) by the weight they stand for; drop a leading `generator.`."""
    named = {name.removeprefix("generator."): tensor for name, tensor in tensors.items()}
    folded: dict[str, Tensor] = {}
    for name, tensor in named.items():
        for magnitude, direction in _WEIGHT_NORM_PAIRS:
            if name.endswith(magnitude):
                stem = name.removesuffix(magnitude)
                folded[f"{stem}.weight"] = _weight(named[stem + direction], tensor)
                break
            if name.endswith(direction):
                break
        else:
            folded[name] = tensor
    return folded


_WEIGHT_NORM_PAIRS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


def _weight(direction: Tensor, magnitude: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(direction.flatten(1), dim=1).view_as(magnitude)
    return direction * (magnitude / norm)
