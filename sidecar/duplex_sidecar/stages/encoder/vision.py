"""SigLIP in NaViT style (`vpm.`) and the 64-query resampler (`resampler.`): pixels -> rows.

Blocks differ in size, so blocks of the same size share a pass and no padding or mask is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplex_sidecar.stages.encoder.attention import attend, merge_heads, split_heads
from duplex_sidecar.stages.encoder.images import Pixels
from duplex_sidecar.stages.encoder.layers import Conv2d, Embedding, LayerNorm, Linear
from duplex_sidecar.stages.encoder.shapes import EncoderShape

_NORM_EPSILON = 1e-6
_SINE_BASE = 10_000.0


class PatchEmbeddings(nn.Module):
    """Patches with positions taken from a square table at the same fraction of the picture."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        size, patch = shape.vision_size, shape.vision_patch_pixels
        self.patch_embedding = Conv2d(3, size, kernel_size=patch, stride=patch)
        self.position_embedding = Embedding(shape.vision_side_patches**2, size)
        self._side_patches = shape.vision_side_patches

    def forward(self, pixels: Tensor) -> Tensor:
        """[blocks, 3, height, width] -> [blocks, patches, size], row by row."""
        patches = self.patch_embedding(pixels)
        rows, columns = patches.shape[-2:]
        places = self._places(rows)[:, None] * self._side_patches + self._places(columns)
        positions = self.position_embedding(places.flatten().to(pixels.device))
        return patches.flatten(2).transpose(1, 2) + positions

    def _places(self, count: int) -> Tensor:
        """Index in the table's side of each of `count` patches along one side of the picture."""
        borders = torch.arange(1 / self._side_patches, 1.0, 1 / self._side_patches)
        return torch.bucketize(torch.arange(count) / count, borders, right=True)


class SelfAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.q_proj = Linear(size, size)
        self.k_proj = Linear(size, size)
        self.v_proj = Linear(size, size)
        self.out_proj = Linear(size, size)
        self._heads = heads

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = attend(
            split_heads(self.q_proj(hidden), self._heads),
            split_heads(self.k_proj(hidden), self._heads),
            split_heads(self.v_proj(hidden), self._heads),
        )
        return self.out_proj(merge_heads(mixed))


class FeedForward(nn.Module):
    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.fc1 = Linear(size, inner_size)
        self.fc2 = Linear(inner_size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(hidden), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        size = shape.vision_size
        self.layer_norm1 = LayerNorm(size, eps=_NORM_EPSILON)
        self.self_attn = SelfAttention(size, shape.vision_heads)
        self.layer_norm2 = LayerNorm(size, eps=_NORM_EPSILON)
        self.mlp = FeedForward(size, shape.vision_ffn_size)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))


class VisionLayers(nn.Module):
    """Named as in the public layout: `vpm.encoder.layers.N`."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(shape) for _ in range(shape.vision_used_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class VisionTower(nn.Module):
    """`vpm.`"""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(shape)
        self.encoder = VisionLayers(shape)
        self.post_layernorm = LayerNorm(shape.vision_size, eps=_NORM_EPSILON)

    def forward(self, pixels: Tensor) -> Tensor:
        """[blocks, 3, height, width] -> [blocks, patches, vision_size]."""
        return self.post_layernorm(self.encoder(self.embeddings(pixels)))


class QueryAttention(nn.Module):
    """Attention with the parameter names of torch's MultiheadAttention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = Linear(size, size)
        self._heads = heads

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[m, size], [blocks, n, size] twice -> [blocks, m, size]."""
        projected = [
            split_heads(functional.linear(rows, weight, bias), self._heads)
            for rows, weight, bias in zip(
                (queries.expand(len(keys), -1, -1), keys, values),
                self.in_proj_weight.chunk(3),
                self.in_proj_bias.chunk(3),
                strict=True,
            )
        ]
        return self.out_proj(merge_heads(attend(*projected)))


class Resampler(nn.Module):
    """`resampler.`"""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.query = nn.Parameter(torch.empty(shape.resampler_queries, size))
        self.kv_proj = (
            nn.Identity()
            if shape.vision_size == size
            else Linear(shape.vision_size, size, bias=False)
        )
        self.attn = QueryAttention(size, shape.resampler_heads)
        self.ln_q = LayerNorm(size, eps=_NORM_EPSILON)
        self.ln_kv = LayerNorm(size, eps=_NORM_EPSILON)
        self.ln_post = LayerNorm(size, eps=_NORM_EPSILON)
        self.proj = nn.Parameter(torch.empty(size, size))

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[blocks, rows * columns, vision_size] -> [blocks, queries, hidden_size]."""
        values = self.ln_kv(self.kv_proj(patches))
        keys = values + sine_positions(rows, columns, self.proj).to(values.dtype)
        mixed = self.attn(self.ln_q(self.query), keys, values)
        return self.ln_post(mixed) @ self.proj


def sine_positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Float32 [rows * columns, size] on `like`'s device, size = its last dimension: the first half
    of a row tells its column, the second half its row."""
    quarter = like.shape[-1] // 4
    steps = torch.arange(quarter, dtype=torch.float32, device=like.device) / quarter
    frequencies = 1.0 / _SINE_BASE**steps

    def along(count: int) -> Tensor:
        angles = torch.arange(count, device=like.device).to(torch.float32)[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    across = along(columns).expand(rows, -1, -1)
    down = along(rows)[:, None].expand(-1, columns, -1)
    return torch.cat([across, down], dim=-1).flatten(0, 1)


class VisionEncoder:
    """Holds weights only."""

    def __init__(self, shape: EncoderShape, tower: VisionTower, resampler: Resampler) -> None:
        self._patch_pixels = shape.vision_patch_pixels
        self._tower = tower
        self._resampler = resampler

    @torch.inference_mode()
    def encode(self, blocks: Sequence[Pixels]) -> list[Tensor]:
        """Rows [queries, hidden_size] of each block."""
        rows: dict[int, Tensor] = {}
        for size in {block.shape: None for block in blocks}:
            same = [index for index, block in enumerate(blocks) if block.shape == size]
            for index, row in zip(same, self._encode([blocks[i] for i in same]), strict=True):
                rows[index] = row
        return [rows[index] for index in range(len(blocks))]

    def encode_appends(self, appends: Sequence[Sequence[Pixels]]) -> list[list[Tensor]]:
        """The same for the blocks of several appends, whosever they are."""
        rows = iter(self.encode([block for append in appends for block in append]))
        return [[next(rows) for _ in append] for append in appends]

    def _encode(self, blocks: Sequence[Pixels]) -> Tensor:
        weight = self._resampler.proj
        pixels = torch.stack([torch.from_numpy(block) for block in blocks])
        patches = self._tower(pixels.to(weight.device, weight.dtype))
        rows, columns = (length // self._patch_pixels for length in pixels.shape[-2:])
        return self._resampler(patches, rows, columns)
