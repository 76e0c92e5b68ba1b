"""Attention that both transformers and the resampler share: heads in, heads out, no mask.

The modules here are plain torch rather than the engine's or transformers' classes: their sums are
the same (the tests compare), and the process neither imports nor starts those packages.
"""

from torch import Tensor
from torch.nn import functional


def split_heads(rows: Tensor, heads: int) -> Tensor:
    """[..., n, size] -> [..., heads, n, size / heads]."""
    return rows.unflatten(-1, (heads, -1)).transpose(-2, -3)


def merge_heads(rows: Tensor) -> Tensor:
    """[..., heads, n, head_size] -> [..., n, heads * head_size]."""
    return rows.transpose(-2, -3).flatten(-2)


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Every query row sees every key row. All are [..., heads, n, head_size]."""
    return functional.scaled_dot_product_attention(queries, keys, values)


def pooled(rows: Tensor, step: int) -> Tensor:
    """Means of `step` neighbouring rows: [..., n * step, size] -> [..., n, size]."""
    return rows.unflatten(-2, (-1, step)).mean(-2)
