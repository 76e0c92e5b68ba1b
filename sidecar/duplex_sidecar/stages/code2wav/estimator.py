"""The flow's velocity estimator: a DiT with key/value and convolution caches per ODE step.

Classifier-free guidance runs as a pair in the batch: rows 0..B-1 see the condition, rows B..2B-1
see zeros. The time of an ODE step is the same for every chunk, so what it contributes (the
modulations of every block) is computed once.
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
_CONV_TAIL = 2
"""Steps that each of a block's two convolutions (width 3) keeps of its past."""


@dataclass(frozen=True, slots=True)
class EstimatorCache:
    """What the estimator remembers of one stream.

    conv [steps, blocks, 2, 2D, 2]: tails of both convolutions, for the guided pair.
    keys [steps, blocks, 2, heads, S, 2d]: keys and values, newest first, the public code's order.
    """

    conv: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True)
class EstimatorCaches:
    """The same for a batch: pairs side by side as [2, B], keys padded at the old end.
    mask [2B, 1, 1, S]: True = a real key; None when nothing is padded."""

    conv: Tensor
    keys: Tensor
    mask: Tensor | None
    lengths: tuple[int, ...]


def stack_caches(caches: Sequence[EstimatorCache]) -> EstimatorCaches:
    """One batch out of the streams' caches (a single stream's are only viewed)."""
    lengths = tuple(cache.keys.shape[4] for cache in caches)
    if len(caches) == 1:
        cache = caches[0]
        return EstimatorCaches(cache.conv.unsqueeze(3), cache.keys.unsqueeze(3), None, lengths)
    conv = torch.stack([cache.conv for cache in caches], 3)
    longest = max(lengths)
    if min(lengths) == longest:
        keys = torch.stack([cache.keys for cache in caches], 3)
        return EstimatorCaches(conv, keys, None, lengths)
    steps, blocks, pair, heads, _, width = caches[0].keys.shape
    keys = conv.new_zeros(steps, blocks, pair, len(caches), heads, longest, width)
    mask = torch.zeros(len(caches), 1, 1, longest, dtype=torch.bool, device=keys.device)
    for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        keys[:, :, :, row, :, :length] = cache.keys
        mask[row, ..., :length] = True
    return EstimatorCaches(conv, keys, mask.repeat(2, 1, 1, 1), lengths)


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


class _Block:
    """Attention over the cache, then the causal convolution, then the feed-forward."""

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
        self._conv_1 = conv.conv("block.1")
        self._conv_norm = conv.norm("block.3")
        self._conv_2 = conv.conv("block.6")
        self._wide = weights.linear("mlp.fc1")
        self._narrow = weights.linear("mlp.fc2")
        self._modulate = weights.linear("adaLN_modulation.1")

    def modulation(self, time: Tensor) -> _Modulation:
        return _Modulation(*self._modulate(time).chunk(9, -1))

    def __call__(
        self,
        x: Tensor,
        modulation: _Modulation,
        keys: Tensor,
        new_frames: int,
        mask: Tensor | None,
        conv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [2B, T, D]. keys [2B, h, T + S, 2d]: old entries from T on; the first T are written
        here. conv [2B, 2D, 2] -> x, new conv tails."""
        m = modulation
        y = _norm(x) * (1 + m.attention_scale) + m.attention_shift
        query = self._query_norm(split_heads(self._query(y), self.heads))
        new_keys = keys[:, :, :new_frames]
        new_keys[..., : self.head_size] = self._key_norm(split_heads(self._key(y), self.heads))
        new_keys[..., self.head_size :] = split_heads(self._value(y), self.heads)
        key, value = keys.chunk(2, -1)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + m.attention_gate * self._projection(join_heads(y))
        y = (_norm(x) * (1 + m.conv_scale) + m.conv_shift).mT
        before_1, before_2 = conv.split(y.shape[1], 1)
        y = torch.cat([before_1, y], 2)
        tail_1 = y[..., -_CONV_TAIL:]
        y = F.mish(self._conv_norm(self._conv_1(y).mT)).mT
        y = torch.cat([before_2, y], 2)
        tails = torch.cat([tail_1, y[..., -_CONV_TAIL:]], 1)
        x = x + m.conv_gate * self._conv_2(y).mT
        y = self._wide(_norm(x) * (1 + m.mlp_scale) + m.mlp_shift)
        return x + m.mlp_gate * self._narrow(F.gelu(y, approximate="tanh")), tails


class Estimator:
    """Public prefix `decoder.estimator.`."""

    def __init__(self, weights: Weights, times: Sequence[float]) -> None:
        """`times`: the time of every ODE step, in order."""
        self._blocks = [
            _Block(weights.under(f"blocks.{i}")) for i in range(weights.count("blocks"))
        ]
        self._input = weights.linear("in_proj")
        self._output = weights.linear("final_layer.linear")
        self._size: int = self._input.weight.shape[0]
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
        zeros = self._input.weight.new_zeros
        block, shape = self._blocks[0], (self._steps, len(self._blocks), 2)
        return EstimatorCache(
            zeros(*shape, 2 * self._size, _CONV_TAIL),
            zeros(*shape, block.heads, 0, 2 * block.head_size),
        )

    def velocity(
        self,
        step: int,
        x: Tensor,
        condition: Tensor,
        caches: EstimatorCaches,
        mask: Tensor | None,
        keys_out: Tensor,
        conv_out: Tensor,
    ) -> Tensor:
        """x [B, mel, T], condition [2B, 3 * mel, T] -> velocities [2B, mel, T] of `step`.

        mask [2B, 1, 1, T + S] as in `caches`, the new frames included. keys_out [blocks, 2B, h,
        T + S, 2d] and conv_out [blocks, 2B, 2D, 2] receive the caches.
        """
        frames = x.shape[2]
        y = self._input(torch.cat([x.repeat(2, 1, 1), condition], 1).mT)
        for index, block in enumerate(self._blocks):
            keys = keys_out[index]
            keys[:, :, frames:] = caches.keys[step, index].flatten(0, 1)
            y, tails = block(
                y,
                self._modulations[step][index],
                keys,
                frames,
                mask,
                caches.conv[step, index].flatten(0, 1),
            )
            conv_out[index] = tails
        shift, scale = self._final[step]
        return self._output(_norm(y) * (1 + scale) + shift).mT

    def keys_shape(self, batch: int, entries: int) -> tuple[int, ...]:
        """Shape of `velocity`'s keys_out."""
        block = self._blocks[0]
        return len(self._blocks), 2 * batch, block.heads, entries, 2 * block.head_size


def _embed_time(weights: Weights, time: float) -> Tensor:
    """[1, 1, D], already through the activation that every modulation begins with."""
    first, second = weights.linear("0"), weights.linear("2")
    half = _TIME_FEATURES // 2
    angles = torch.exp(-math.log(10_000.0) * torch.arange(half).float() / half)
    angles = angles * time * _TIME_SCALE
    features = torch.cat([angles.cos(), angles.sin()])[None].to(first.weight.device)
    return F.silu(second(F.silu(first(features))))[:, None]
