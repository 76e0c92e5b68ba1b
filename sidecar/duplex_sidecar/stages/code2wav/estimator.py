"""The flow's velocity estimator: a DiT with key/value and convolution caches per ODE step.

Classifier-free guidance runs as a pair in the batch: rows 0..B-1 see the condition, rows B..2B-1
see zeros. The time of an ODE step is the same for every chunk, so what it contributes (the
modulations of every block) is computed once. As in the conformer, attention runs stream by stream.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duplex_sidecar.stages.code2wav.layers import Weights, join_heads, split_heads

_TIME_FEATURES = 256
_TIME_SCALE = 1_000.0
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class EstimatorCache:
    """What the estimator remembers of one stream; 2 = the guided pair.

    conv [steps, blocks, 2, 2, 2, D]: tails (2 frames) of a block's two convolutions.
    keys [steps, blocks, 2, heads, S, 2d]: keys and values, newest first, the public code's order.
    """

    conv: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True)
class StepCaches:
    """One ODE step of a batch's caches, for `Estimator.velocity`.

    keys: a tensor [blocks, 2, heads, T + S, 2d] a stream, old entries from T on; the first T are
    written by the estimator. conv_old, conv_new [blocks, 2B, 2, 2, D]: tails before and after.
    """

    keys: Sequence[Tensor]
    conv_old: Tensor
    conv_new: Tensor


@dataclass(frozen=True, slots=True)
class _Modulation:
    """Shift, scale and gate [1, 1, D] of a block's three branches at one ODE step."""

    attention_shift: Tensor
    attention_scale: Tensor
    attention_gate: Tensor
    mlp_shift: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor
    conv_shift: Tensor
    conv_scale: Tensor
    conv_gate: Tensor


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=_NORM_EPSILON)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, _norm(x), 1 + scale)


class _Block:
    """Attention over the cache, then two causal convolutions, then the feed-forward."""

    def __init__(self, weights: Weights) -> None:
        attention, conv = weights.under("attn"), weights.under("conv")
        self._query = attention.linear("to_q")
        self._key = attention.linear("to_k")
        self._value = attention.linear("to_v")
        self._query_norm = attention.norm("q_norm")
        self._key_norm = attention.norm("k_norm")
        self._projection = attention.linear("proj")
        self.head_size: int = attention["q_norm.weight"].shape[0]
        self.heads: int = attention["to_q.weight"].shape[0] // self.head_size
        self._conv_1 = conv.causal_conv("block.1")
        self._conv_norm = conv.norm("block.3")
        self._conv_2 = conv.causal_conv("block.6")
        self.conv_tail: int = self._conv_1.width - 1
        self._wide = weights.linear("mlp.fc1")
        self._narrow = weights.linear("mlp.fc2")
        self._modulate = weights.linear("adaLN_modulation.1")

    def modulation(self, time: Tensor) -> _Modulation:
        return _Modulation(*self._modulate(time).chunk(9, -1))

    def __call__(
        self, x: Tensor, m: _Modulation, keys: Sequence[Tensor], old: Tensor, new: Tensor
    ) -> Tensor:
        """x [2B, T, D], keys [2, h, T + S, 2d] a stream, conv tails `old` and `new` [2B, 2, 2, D]
        (`keys`' first T entries and `new` are written) -> x."""
        y = _modulated(x, m.attention_shift, m.attention_scale)
        x = x + m.attention_gate * self._projection(self._attend(y, keys))
        y = _modulated(x, m.conv_shift, m.conv_scale)
        y = torch.cat([old[:, 0], y], 1)
        new[:, 0] = y[:, -self.conv_tail :]
        y = F.mish(self._conv_norm(self._conv_1(y)))
        y = torch.cat([old[:, 1], y], 1)
        new[:, 1] = y[:, -self.conv_tail :]
        x = x + m.conv_gate * self._conv_2(y)
        y = self._wide(_modulated(x, m.mlp_shift, m.mlp_scale))
        return x + m.mlp_gate * self._narrow(F.gelu(y, approximate="tanh"))

    def _attend(self, y: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """[2B, T, D] -> [2B, T, D]: each stream's pair over its own keys."""
        streams, frames = len(keys), y.shape[1]
        query = self._query_norm(split_heads(self._query(y), self.heads))
        key = self._key_norm(split_heads(self._key(y), self.heads))
        value = split_heads(self._value(y), self.heads)
        attended: list[Tensor] = []
        for row, entries in enumerate(keys):
            pair = slice(row, None, streams)
            entries[:, :, :frames, : self.head_size] = key[pair]
            entries[:, :, :frames, self.head_size :] = value[pair]
            all_keys, all_values = entries.chunk(2, -1)
            attended.append(F.scaled_dot_product_attention(query[pair], all_keys, all_values))
        if streams == 1:
            return join_heads(attended[0])
        return join_heads(torch.stack(attended, 1).flatten(0, 1))


class Estimator:
    """Public prefix `decoder.estimator.`."""

    def __init__(self, weights: Weights, times: Sequence[float]) -> None:
        """`times`: the time of every ODE step, in order."""
        count = weights.count("blocks")
        self._blocks = [_Block(weights.under(f"blocks.{index}")) for index in range(count)]
        self._input = weights.linear("in_proj")
        self._output = weights.linear("final_layer.linear")
        self._steps = len(times)
        final = weights.linear("final_layer.adaLN_modulation.1")
        self._modulations: list[list[_Modulation]] = []
        self._final: list[tuple[Tensor, Tensor]] = []
        for time in times:
            embedded = _embed_time(weights.under("t_embedder.mlp"), time)
            self._modulations.append([block.modulation(embedded) for block in self._blocks])
            shift, scale = final(embedded).chunk(2, -1)
            self._final.append((shift, scale))

    def blank(self) -> EstimatorCache:
        """The cache of a stream that has heard nothing."""
        zeros, size = self._input.weight.new_zeros, self._input.weight.shape[0]
        block, shape = self._blocks[0], (self._steps, len(self._blocks), 2)
        return EstimatorCache(
            zeros(*shape, 2, block.conv_tail, size),
            zeros(*shape, block.heads, 0, 2 * block.head_size),
        )

    def velocity(self, step: int, x: Tensor, condition: Tensor, caches: StepCaches) -> Tensor:
        """x [B, T, mel], condition [2B, T, 3 * mel] -> velocities [2B, T, mel] of `step`."""
        y = self._input(torch.cat([x.repeat(2, 1, 1), condition], 2))
        for index, block in enumerate(self._blocks):
            y = block(
                y,
                self._modulations[step][index],
                [keys[index] for keys in caches.keys],
                caches.conv_old[index],
                caches.conv_new[index],
            )
        shift, scale = self._final[step]
        return self._output(_modulated(y, shift, scale))


def _embed_time(weights: Weights, time: float) -> Tensor:
    """[1, 1, D], already through the activation that every modulation begins with."""
    first, second = weights.linear("0"), weights.linear("2")
    half = _TIME_FEATURES // 2
    angles = torch.exp(-math.log(10_000.0) * torch.arange(half).float() / half)
    angles = angles * time * _TIME_SCALE
    features = torch.cat([angles.cos(), angles.sin()])[None].to(first.weight.device)
    return F.silu(second(F.silu(first(features))))[:, None]
