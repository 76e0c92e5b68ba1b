"""The Whisper encoder (`apm.`) and its projector, fed chunk by chunk with a cache per session.

A chunk's frames see each other and everything in the cache, in both directions of time within the
chunk. Nothing here remembers a session: caches come in as arguments. Linear layers run over all
sessions of a batch at once, attention runs session by session, because caches differ in length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplex_sidecar.stages.encoder.attention import attend, merge_heads, pooled, split_heads
from duplex_sidecar.stages.encoder.chunks import CNN_FRAMES_PER_CHUNK, chunks_per_cache
from duplex_sidecar.stages.encoder.layers import Conv1d, Embedding, LayerNorm, Linear
from duplex_sidecar.stages.encoder.shapes import AUDIO_POOL_STEP, EncoderShape


@dataclass(frozen=True, slots=True)
class AudioCache:
    """Keys and values of one session since its last reset.

    rows: [layers, 2, heads, capacity, head_size]; only the first `frames` positions count. A longer
    cache shares the tensor with the shorter one that it grew from: what lies behind `frames` may be
    overwritten, so a chunk that fails after it was encoded leaves no trace in the shorter one.
    """

    rows: Tensor
    frames: int

    def longer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a chunk's keys and values [heads, n, head_size] of one layer; all rows so far."""
        end = self.frames + keys.shape[-2]
        self.rows[layer, 0, :, self.frames : end] = keys
        self.rows[layer, 1, :, self.frames : end] = values
        return self.rows[layer, 0, :, :end], self.rows[layer, 1, :, :end]

    def advanced(self) -> "AudioCache":
        return AudioCache(self.rows, self.frames + CNN_FRAMES_PER_CHUNK)


class CachedSelfAttention(nn.Module):
    def __init__(self, size: int, heads: int, layer: int) -> None:
        super().__init__()
        self.q_proj = Linear(size, size)
        self.k_proj = Linear(size, size, bias=False)
        self.v_proj = Linear(size, size)
        self.out_proj = Linear(size, size)
        self._heads = heads
        self._layer = layer

    def forward(self, hidden: Tensor, caches: Sequence[AudioCache]) -> Tensor:
        """hidden: [sessions, n, size], one cache per session."""
        queries = split_heads(self.q_proj(hidden), self._heads)
        keys = split_heads(self.k_proj(hidden), self._heads)
        values = split_heads(self.v_proj(hidden), self._heads)
        mixed = [
            attend(query, *cache.longer(self._layer, key, value))
            for query, key, value, cache in zip(queries, keys, values, caches, strict=True)
        ]
        return self.out_proj(merge_heads(torch.stack(mixed)))


class AudioLayer(nn.Module):
    def __init__(self, shape: EncoderShape, layer: int) -> None:
        super().__init__()
        size = shape.audio_size
        self.self_attn = CachedSelfAttention(size, shape.audio_heads, layer)
        self.self_attn_layer_norm = LayerNorm(size)
        self.fc1 = Linear(size, shape.audio_ffn_size)
        self.fc2 = Linear(shape.audio_ffn_size, size)
        self.final_layer_norm = LayerNorm(size)

    def forward(self, hidden: Tensor, caches: Sequence[AudioCache]) -> Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), caches)
        inner = functional.gelu(self.fc1(self.final_layer_norm(hidden)))
        return hidden + self.fc2(inner)


class AudioTower(nn.Module):
    """`apm.`"""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        size = shape.audio_size
        self.conv1 = Conv1d(shape.mel_bins, size, kernel_size=3, padding=1)
        self.conv2 = Conv1d(size, size, kernel_size=3, stride=2, padding=1)
        self.embed_positions = Embedding(shape.audio_positions, size)
        self.layers = nn.ModuleList(AudioLayer(shape, layer) for layer in range(shape.audio_layers))
        self.layer_norm = LayerNorm(size)
        self._cache_frames = chunks_per_cache(shape.audio_positions) * CNN_FRAMES_PER_CHUNK
        self._cache_shape = (shape.audio_layers, 2, shape.audio_heads)
        self._head_size = size // shape.audio_heads

    def empty_cache(self, frames: int | None = None) -> AudioCache:
        """frames: its capacity, None for that of a stream."""
        weight = self.conv1.weight
        rows = torch.empty(
            (*self._cache_shape, frames or self._cache_frames, self._head_size),
            dtype=weight.dtype,
            device=weight.device,
        )
        return AudioCache(rows, 0)

    def whole(self, mel: Tensor) -> Tensor:
        """A clip heard at once: mel [mel_bins, 2n] -> [n, size]. A frame sees its own second and
        those before (contract section G, the block mask), so seconds go one after the other."""
        frames = self._convolved(mel)
        frames = frames + self.embed_positions.weight[: len(frames)]
        cache = self.empty_cache(len(frames))
        heard: list[Tensor] = []
        for second in frames.split(CNN_FRAMES_PER_CHUNK):
            hidden = second[None]
            for layer in self.layers:
                hidden = layer(hidden, [cache])
            heard.append(hidden[0])
            cache = cache.advanced()
        return self.layer_norm(torch.cat(heard))

    def forward(self, mels: Sequence[Tensor], caches: Sequence[AudioCache]) -> Tensor:
        """mels: [mel_bins, 102 or 104] per session. Returns [sessions, 50, size] and writes each
        chunk's keys and values behind its cache."""
        frames = torch.stack(
            [self._embedded(mel, cache) for mel, cache in zip(mels, caches, strict=True)]
        )
        for layer in self.layers:
            frames = layer(frames, caches)
        return self.layer_norm(frames)

    def _embedded(self, mel: Tensor, cache: AudioCache) -> Tensor:
        frames = self._convolved(mel)
        # One frame at the end, and one at the begin where the mel has context there, is context.
        frames = frames[-CNN_FRAMES_PER_CHUNK - 1 : -1]
        end = cache.frames + CNN_FRAMES_PER_CHUNK
        return frames + self.embed_positions.weight[cache.frames : end]

    def _convolved(self, mel: Tensor) -> Tensor:
        """[mel_bins, n] -> [n / 2, size]"""
        weight = self.conv1.weight
        frames = functional.gelu(self.conv1(mel.to(weight.device, weight.dtype)[None]))
        return functional.gelu(self.conv2(frames))[0].T


class AudioProjector(nn.Module):
    """`audio_projection_layer.`, with the pooling that follows it."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.linear1 = Linear(shape.audio_size, shape.hidden_size)
        self.linear2 = Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, frames: Tensor) -> Tensor:
        """[sessions, 5n, audio_size] -> rows [sessions, n, hidden_size]; n is 10 for a chunk."""
        rows = self.linear2(functional.relu(self.linear1(frames)))
        return pooled(rows, AUDIO_POOL_STEP)
