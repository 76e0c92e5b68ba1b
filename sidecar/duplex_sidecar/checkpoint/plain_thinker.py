"""The Thinker (Qwen3) as a plain torch loop, float32, one sequence: what making a readout runs on.

About the published formulas and nothing else: RMS norm, rotary positions, grouped-query attention
with normed queries and keys, gated feed-forward. Equal to transformers (tests). No batching, no
engine: a tiny checkpoint takes a millisecond a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from duplex_sidecar.checkpoint.config import ThinkerConfig

_GROWTH_POSITIONS = 1024


@dataclass(slots=True)
class ThinkerCache:
    """Keys and values of one stream: [layers, 2, kv_heads, capacity, head_dim]; `length` count."""

    rows: Tensor
    length: int


class PlainThinker:
    """weights: the `llm.*` tensors of a checkpoint under their public names."""

    def __init__(self, config: ThinkerConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = {
            name.removeprefix("llm."): weight.float()
            for name, weight in weights.items()
            if name.startswith("llm.")
        }
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._rates = 1.0 / config.rope_theta**half

    def open(self) -> ThinkerCache:
        config = self._config
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, 0, config.head_dim)
        return ThinkerCache(torch.empty(shape), 0)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Rows [n, hidden] of token ids."""
        return self._weights["model.embed_tokens.weight"][torch.tensor(ids, dtype=torch.long)]

    @torch.inference_mode()
    def feed(self, rows: Tensor, cache: ThinkerCache) -> Tensor:
        """Rows [n, hidden] after what the cache holds -> final hidden states [n, hidden]."""
        count = rows.shape[0]
        start, end = cache.length, cache.length + count
        _reserve(cache, end)
        angles = torch.arange(start, end, dtype=torch.float32)[:, None] * self._rates
        turns = (torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin())
        # Position i of the new rows sees everything up to itself.
        mask = torch.ones(count, end, dtype=torch.bool).tril(diagonal=start) if count > 1 else None
        hidden = rows.float()
        for layer in range(self._config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(f"{prefix}.input_layernorm", hidden)
            kept = cache.rows[layer, :, :, :end]
            hidden = hidden + self._attention(f"{prefix}.self_attn", normed, kept, turns, mask)
            normed = self._norm(f"{prefix}.post_attention_layernorm", hidden)
            hidden = hidden + self._feed_forward(f"{prefix}.mlp", normed)
        cache.length = end
        return self._norm("model.norm", hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [n, hidden] -> [n, vocabulary] with the checkpoint's own readout."""
        return hidden @ self._weights["lm_head.weight"].T

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weights[f"{name}.weight"])

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return self._weights[f"{name}.weight"] * (rows * scale)

    def _attention(
        self,
        prefix: str,
        rows: Tensor,
        kept: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """kept: [2, kv_heads, end, head_dim]; its last positions are written here."""
        count, end = rows.shape[0], kept.shape[2]
        head_dim = self._config.head_dim

        def heads(name: str) -> Tensor:
            return self._linear(f"{prefix}.{name}", rows).view(count, -1, head_dim).transpose(0, 1)

        queries = _rotate(self._norm(f"{prefix}.q_norm", heads("q_proj")), turns)
        kept[0, :, end - count :] = _rotate(self._norm(f"{prefix}.k_norm", heads("k_proj")), turns)
        kept[1, :, end - count :] = heads("v_proj")
        groups = self._config.num_attention_heads // self._config.num_key_value_heads
        mixed = functional.scaled_dot_product_attention(
            queries[None],
            kept[0].repeat_interleave(groups, 0)[None],
            kept[1].repeat_interleave(groups, 0)[None],
            attn_mask=mask,
        )
        return self._linear(f"{prefix}.o_proj", mixed[0].transpose(0, 1).flatten(1))

    def _feed_forward(self, prefix: str, rows: Tensor) -> Tensor:
        gate = functional.silu(self._linear(f"{prefix}.gate_proj", rows))
        return self._linear(f"{prefix}.down_proj", gate * self._linear(f"{prefix}.up_proj", rows))


def _rotate(rows: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions; the two halves of a head are the pairs' first and second numbers."""
    first, second = rows.chunk(2, -1)
    return rows * turns[0] + torch.cat([-second, first], -1) * turns[1]


def _reserve(cache: ThinkerCache, length: int) -> None:
    """Room for `length` positions; grows in steps."""
    layers, pair, heads, capacity, size = cache.rows.shape
    if length <= capacity:
        return
    wanted = -(-length // _GROWTH_POSITIONS) * _GROWTH_POSITIONS
    rows = torch.empty(layers, pair, heads, wanted, size)
    rows[:, :, :, : cache.length] = cache.rows[:, :, :, : cache.length]
    cache.rows = rows
