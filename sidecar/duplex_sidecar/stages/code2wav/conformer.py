"""The flow decoder's encoder: codes at 25 Hz to a mel-like track at 50 Hz, causal, with caches.

Look-ahead convolution, conformer layers, nearest up-sampling by 2, conformer layers, projection.
A batch shares the matrix products; attention runs stream by stream over caches of their own
lengths, so there is no padding, and a stream's result does not depend on its neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duplex_sidecar.stages.code2wav.config import LOOK_AHEAD_CODES
from duplex_sidecar.stages.code2wav.layers import (
    CausalConv,
    Linear,
    Norm,
    Weights,
    join_heads,
    split_heads,
)

FRAMES_PER_CODE = 2
_NORM_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderCache:
    """What the encoder remembers of one stream. D = width, S = codes so far.

    look_ahead [1, 2, D], up [1, 4, D]: tails of the convolutions.
    low [1, heads, S, 2d] and high [1, heads, 2S, 2d], one a layer: keys and values, oldest first.
    """

    look_ahead: Tensor
    up: Tensor
    low: tuple[Tensor, ...]
    high: tuple[Tensor, ...]


class Encoder:
    """Codes -> mu, the mean that the flow starts from (public prefix `encoder.`)."""

    def __init__(self, weights: Weights) -> None:
        encoder = weights.under("encoder")
        self._table = weights["input_embedding.weight"]
        self._projection: Linear = weights.linear("encoder_proj")
        self._embed = _Embedding(encoder.under("embed"))
        self._up_embed = _Embedding(encoder.under("up_embed"))
        self._look_ahead_1: CausalConv = encoder.causal_conv("pre_lookahead_layer.conv1")
        self._look_ahead_2: CausalConv = encoder.causal_conv("pre_lookahead_layer.conv2")
        self._up: CausalConv = encoder.causal_conv("up_layer.conv")
        self._after_norm: Norm = encoder.norm("after_norm")
        self._low = _layers(encoder, "encoders")
        self._high = _layers(encoder, "up_encoders")
        self._width: int = self._projection.weight.shape[1]
        halves = torch.arange(0, self._width, 2, device=self._table.device).float()
        self._frequencies = torch.exp(halves * -(math.log(10_000.0) / self._width))

    def blank(self) -> EncoderCache:
        """The cache of a stream that has heard nothing."""
        heads = self._low[0].heads
        empty = self._table.new_zeros(1, heads, 0, 2 * self._width // heads)
        return EncoderCache(
            self._table.new_zeros(1, self._look_ahead_2.width - 1, self._width),
            self._table.new_zeros(1, self._up.width - 1, self._width),
            (empty,) * len(self._low),
            (empty,) * len(self._high),
        )

    def __call__(
        self, codes: Tensor, caches: Sequence[EncoderCache], last: bool
    ) -> tuple[Tensor, list[EncoderCache]]:
        """codes [B, n + 3] (n when last: the look-ahead is silence then) -> mu [B, 2n, 80] and
        each stream's new cache. The given caches are not written to."""
        x = self._embed(F.embedding(codes, self._table))
        if last:
            x = F.pad(x, (0, 0, 0, LOOK_AHEAD_CODES))
        y = F.leaky_relu(self._look_ahead_1(x))
        y = torch.cat([torch.cat([cache.look_ahead for cache in caches]), y], 1)
        look_ahead = y[:, 1 - self._look_ahead_2.width :]
        x = self._look_ahead_2(y) + x[:, :-LOOK_AHEAD_CODES]
        x, low = self._run(self._low, x, [cache.low for cache in caches])
        y = x.repeat_interleave(FRAMES_PER_CODE, 1)
        y = torch.cat([torch.cat([cache.up for cache in caches]), y], 1)
        up = y[:, 1 - self._up.width :]
        x = self._up_embed(self._up(y))
        x, high = self._run(self._high, x, [cache.high for cache in caches])
        mu = self._projection(self._after_norm(x))
        new = [
            EncoderCache(
                look_ahead[row : row + 1].clone(),
                up[row : row + 1].clone(),
                tuple(layer[row] for layer in low),
                tuple(layer[row] for layer in high),
            )
            for row in range(len(caches))
        ]
        return mu, new

    def _run(
        self, layers: Sequence["_Layer"], x: Tensor, caches: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """The new caches are a list a layer, a tensor a stream."""
        queries = x.shape[1]
        lengths = [cache[0].shape[2] + queries for cache in caches]
        by_length = {n: _Positions.of(queries, n, self._frequencies) for n in set(lengths)}
        new: list[list[Tensor]] = []
        for index, layer in enumerate(layers):
            rows = [cache[index] for cache in caches]
            x, kept = layer(x, rows, [by_length[length] for length in lengths])
            new.append(kept)
        return x, new


class _Embedding:
    """Linear, norm, and the conformer's scale."""

    def __init__(self, weights: Weights) -> None:
        self._linear = weights.linear("out.0")
        self._norm = weights.norm("out.1")
        self._scale = math.sqrt(self._linear.weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(self._linear(x)) * self._scale


@dataclass(frozen=True, slots=True)
class _Positions:
    """Relative positions of T queries over S keys (the queries are the last T of them).

    table [T + S - 1, D]: sinusoids of every distance that occurs. index [T, S]: its row for a pair.
    """

    table: Tensor
    index: Tensor

    @classmethod
    def of(cls, queries: int, keys: int, frequencies: Tensor) -> "_Positions":
        device = frequencies.device
        distances = torch.arange(-(queries - 1), keys, device=device).float()
        angles = distances[:, None] * frequencies
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        offsets = torch.arange(queries, device=device)[:, None] + (keys - 1)
        return cls(table, offsets - torch.arange(keys, device=device)[None])


class _Layer:
    """One conformer layer: attention with relative positions, then feed-forward."""

    def __init__(self, weights: Weights) -> None:
        attention, feed_forward = weights.under("self_attn"), weights.under("feed_forward")
        self._query = attention.linear("linear_q")
        self._key = attention.linear("linear_k")
        self._value = attention.linear("linear_v")
        self._position = attention.linear("linear_pos")
        self._out = attention.linear("linear_out")
        self._content_bias = attention["pos_bias_u"][:, None]
        self._position_bias = attention["pos_bias_v"][:, None]
        self.heads: int = attention["pos_bias_u"].shape[0]
        self._wide = feed_forward.linear("w_1")
        self._narrow = feed_forward.linear("w_2")
        self._attention_norm = weights.norm("norm_mha", _NORM_EPSILON)
        self._feed_forward_norm = weights.norm("norm_ff", _NORM_EPSILON)

    def __call__(
        self, x: Tensor, caches: Sequence[Tensor], positions: Sequence[_Positions]
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B, T, D], one cache [1, h, S, 2d] and its positions a stream -> x, new caches."""
        y = self._attention_norm(x)
        query = split_heads(self._query(y), self.heads)
        key_value = torch.cat(
            [split_heads(self._key(y), self.heads), split_heads(self._value(y), self.heads)], -1
        )
        new = [torch.cat([cache, key_value[row : row + 1]], 2) for row, cache in enumerate(caches)]
        attended = [
            self._attend(query[row : row + 1], cache, place)
            for row, (cache, place) in enumerate(zip(new, positions, strict=True))
        ]
        x = x + self._out(join_heads(torch.cat(attended)))
        y = F.silu(self._wide(self._feed_forward_norm(x)))
        return x + self._narrow(y), new

    def _attend(self, query: Tensor, key_value: Tensor, positions: _Positions) -> Tensor:
        """query [1, h, T, d] over key_value [1, h, S, 2d] -> [1, h, T, d]."""
        key, value = key_value.chunk(2, -1)
        distances = split_heads(self._position(positions.table)[None], self.heads)
        by_distance = (query + self._position_bias) @ distances.transpose(-1, -2)
        index = positions.index.expand(*query.shape[:3], key.shape[2])
        scores = (query + self._content_bias) @ key.transpose(-1, -2)
        scores = (scores + by_distance.gather(-1, index)) / math.sqrt(query.shape[-1])
        return scores.softmax(-1) @ value


def _layers(encoder: Weights, name: str) -> list[_Layer]:
    return [_Layer(encoder.under(f"{name}.{index}")) for index in range(encoder.count(name))]


def keep_newest(cache: EncoderCache, prompt_frames: int, newest_frames: int) -> EncoderCache:
    """Bound the attention caches to the voice's prompt and the newest frames of the turn."""
    prompt, newest = prompt_frames // FRAMES_PER_CODE, newest_frames // FRAMES_PER_CODE
    return EncoderCache(
        cache.look_ahead,
        cache.up,
        tuple(_keep(layer, prompt, newest) for layer in cache.low),
        tuple(_keep(layer, prompt_frames, newest_frames) for layer in cache.high),
    )


def _keep(cache: Tensor, first: int, newest: int) -> Tensor:
    if cache.shape[2] <= first + newest:
        return cache
    return torch.cat([cache[:, :, :first], cache[:, :, -newest:]], 2)
