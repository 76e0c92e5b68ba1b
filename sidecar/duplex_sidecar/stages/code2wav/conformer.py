"""The flow decoder's encoder: codes at 25 Hz to a mel-like track at 50 Hz, causal, with caches.

Look-ahead convolution, conformer layers, nearest up-sampling by 2, conformer layers, projection.
Streams of unequal age share a batch: their caches are padded on the left (old) side, where the
distance between a query and its keys, which is all that the relative positions see, stays true.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duplex_sidecar.stages.code2wav.config import LOOK_AHEAD_CODES
from duplex_sidecar.stages.code2wav.layers import (
    Conv,
    Linear,
    Norm,
    Weights,
    join_heads,
    split_heads,
)

FRAMES_PER_CODE = 2
_LOOK_AHEAD_TAIL = 2
"""Steps that the second look-ahead convolution (width 3) keeps of its past."""
_UP_TAIL = 2 * FRAMES_PER_CODE
"""Steps that the up-sampling convolution (width 5) keeps of its past."""
_NORM_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderCache:
    """What the encoder remembers of one stream. D = width, S = codes (then frames) so far.

    look_ahead [1, D, 2], up [1, D, 4]: tails of the convolutions.
    low [layers, 1, heads, S, 2d], high [layers, 1, heads, 2S, 2d]: keys and values, oldest first.
    """

    look_ahead: Tensor
    up: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, slots=True)
class EncoderCaches:
    """The same for a batch; attention caches are left-padded to the longest. The masks ([B, 1, 1,
    S], True = a real key) are None when nothing is padded."""

    look_ahead: Tensor
    up: Tensor
    low: Tensor
    high: Tensor
    low_mask: Tensor | None
    high_mask: Tensor | None
    low_lengths: tuple[int, ...]
    high_lengths: tuple[int, ...]


def stack_caches(caches: Sequence[EncoderCache]) -> EncoderCaches:
    """One batch out of the streams' caches (a single stream's are only viewed)."""
    low, low_mask = _pad_left([cache.low for cache in caches])
    high, high_mask = _pad_left([cache.high for cache in caches])
    return EncoderCaches(
        torch.cat([cache.look_ahead for cache in caches]),
        torch.cat([cache.up for cache in caches]),
        low,
        high,
        low_mask,
        high_mask,
        tuple(cache.low.shape[3] for cache in caches),
        tuple(cache.high.shape[3] for cache in caches),
    )


def _pad_left(caches: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """[layers, 1, h, S_b, e] each -> [layers, B, h, max S, e] and the mask of real keys."""
    if len(caches) == 1:
        return caches[0], None
    lengths = [cache.shape[3] for cache in caches]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.cat(list(caches), 1), None
    layers, _, heads, _, width = caches[0].shape
    padded = caches[0].new_zeros(layers, len(caches), heads, longest, width)
    mask = torch.zeros(len(caches), 1, 1, longest, dtype=torch.bool, device=padded.device)
    for row, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        padded[:, row, :, longest - length :] = cache[:, 0]
        mask[row, ..., longest - length :] = True
    return padded, mask


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
        self._heads = attention["pos_bias_u"].shape[0]
        self._wide = feed_forward.linear("w_1")
        self._narrow = feed_forward.linear("w_2")
        self._attention_norm = weights.norm("norm_mha", _NORM_EPSILON)
        self._feed_forward_norm = weights.norm("norm_ff", _NORM_EPSILON)

    def __call__(
        self, x: Tensor, cache: Tensor, positions: "_Positions", mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, D], cache [B, h, S, 2d] -> x, the cache with the new keys at its end."""
        y = self._attention_norm(x)
        query = split_heads(self._query(y), self._heads)
        key = split_heads(self._key(y), self._heads)
        value = split_heads(self._value(y), self._heads)
        cache = torch.cat([cache, torch.cat([key, value], -1)], 2)
        key, value = cache.chunk(2, -1)
        distance_rows = split_heads(self._position(positions.table)[None], self._heads)
        by_distance = (query + self._position_bias) @ distance_rows.transpose(-1, -2)
        index = positions.index.expand(*query.shape[:3], key.shape[2])
        scores = (query + self._content_bias) @ key.transpose(-1, -2)
        scores = (scores + by_distance.gather(-1, index)) / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        x = x + self._out(join_heads(scores.softmax(-1) @ value))
        y = F.silu(self._wide(self._feed_forward_norm(x)))
        return x + self._narrow(y), cache


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


class Encoder:
    """Codes -> mu, the mean that the flow starts from (public prefix `encoder.`)."""

    def __init__(self, weights: Weights) -> None:
        encoder = weights.under("encoder")
        self._table = weights["input_embedding.weight"]
        self._projection = weights.linear("encoder_proj")
        self._embed = _Embedding(encoder.under("embed"))
        self._up_embed = _Embedding(encoder.under("up_embed"))
        self._look_ahead_1: Conv = encoder.conv("pre_lookahead_layer.conv1")
        self._look_ahead_2: Conv = encoder.conv("pre_lookahead_layer.conv2")
        self._up: Conv = encoder.conv("up_layer.conv")
        self._after_norm: Norm = encoder.norm("after_norm")
        self._low = [
            _Layer(encoder.under(f"encoders.{i}")) for i in range(encoder.count("encoders"))
        ]
        self._high = [
            _Layer(encoder.under(f"up_encoders.{i}")) for i in range(encoder.count("up_encoders"))
        ]
        self._width = self._projection.weight.shape[1]
        self._heads = encoder["encoders.0.self_attn.pos_bias_u"].shape[0]
        halves = torch.arange(0, self._width, 2, device=self._table.device).float()
        self._frequencies = torch.exp(halves * -(math.log(10_000.0) / self._width))

    def blank(self) -> EncoderCache:
        """The cache of a stream that has heard nothing."""
        head_size = self._width // self._heads
        zeros = self._table.new_zeros
        return EncoderCache(
            zeros(1, self._width, _LOOK_AHEAD_TAIL),
            zeros(1, self._width, _UP_TAIL),
            zeros(len(self._low), 1, self._heads, 0, 2 * head_size),
            zeros(len(self._high), 1, self._heads, 0, 2 * head_size),
        )

    def __call__(
        self, codes: Tensor, caches: EncoderCaches, last: bool
    ) -> tuple[Tensor, list[EncoderCache]]:
        """codes [B, n + 3] (n when last: the look-ahead is silence then) -> mu [B, 80, 2n] and
        each stream's new cache. The given caches are not written to."""
        x = self._embed(F.embedding(codes, self._table))
        if last:
            x = F.pad(x, (0, 0, 0, LOOK_AHEAD_CODES))
        y = F.leaky_relu(self._look_ahead_1(x.mT))
        look_ahead = y[..., -_LOOK_AHEAD_TAIL:]
        y = self._look_ahead_2(torch.cat([caches.look_ahead, y], 2))
        x = y.mT + x[:, :-LOOK_AHEAD_CODES]
        x, low = self._run(self._low, x, caches.low, caches.low_mask)
        y = torch.cat([caches.up, x.mT.repeat_interleave(FRAMES_PER_CODE, -1)], 2)
        up = y[..., -_UP_TAIL:]
        x = self._up_embed(self._up(y).mT)
        x, high = self._run(self._high, x, caches.high, caches.high_mask)
        mu = self._projection(self._after_norm(x)).mT
        new = [
            EncoderCache(
                look_ahead[row : row + 1].clone(),
                up[row : row + 1].clone(),
                _of_row(low, row, caches.low_lengths),
                _of_row(high, row, caches.high_lengths),
            )
            for row in range(codes.shape[0])
        ]
        return mu, new

    def _run(
        self, layers: Sequence[_Layer], x: Tensor, caches: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        queries, cached = x.shape[1], caches.shape[3]
        positions = _Positions.of(queries, cached + queries, self._frequencies)
        if mask is not None:
            mask = F.pad(mask, (0, queries), value=True)
        new: list[Tensor] = []
        for layer, cache in zip(layers, caches, strict=True):
            x, cache = layer(x, cache, positions, mask)
            new.append(cache)
        return x, new


def _of_row(caches: Sequence[Tensor], row: int, lengths: Sequence[int]) -> Tensor:
    """The stream's own part [layers, 1, h, S_b + T, e] of the batch's new caches."""
    padding = max(lengths) - lengths[row]
    return torch.stack([cache[row : row + 1, :, padding:] for cache in caches])


class _Embedding:
    """Linear, norm, and the conformer's scale."""

    def __init__(self, weights: Weights) -> None:
        self._linear: Linear = weights.linear("out.0")
        self._norm: Norm = weights.norm("out.1")
        self._scale = math.sqrt(self._linear.weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(self._linear(x)) * self._scale


def keep_newest(cache: EncoderCache, prompt_frames: int, newest_frames: int) -> EncoderCache:
    """Bound the attention caches to the voice's prompt and the newest frames of the turn."""
    return EncoderCache(
        cache.look_ahead,
        cache.up,
        _keep(cache.low, prompt_frames // FRAMES_PER_CODE, newest_frames // FRAMES_PER_CODE),
        _keep(cache.high, prompt_frames, newest_frames),
    )


def _keep(cache: Tensor, first: int, newest: int) -> Tensor:
    if cache.shape[3] <= first + newest:
        return cache
    return torch.cat([cache[:, :, :, :first], cache[:, :, :, -newest:]], 3)
