"""Codes to mel: causal conformer, then flow matching (cosine-spaced Euler steps with guidance).

One call advances a batch of streams by a chunk each. Streams may differ in age and voice, not in
the number of codes of the chunk. The given caches are never written to; each stream gets new ones
(contract section E, "Vocoder").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duplex_sidecar.stages.code2wav.conformer import Encoder, EncoderCache, keep_newest
from duplex_sidecar.stages.code2wav.estimator import Estimator, EstimatorCache, StepCaches
from duplex_sidecar.stages.code2wav.layers import Weights

ATTENTION_FRAMES = 100
"""Frames beyond the voice's prompt that the estimator's caches keep."""
_NOISE_FRAMES = 30_000
_USED_NOISE_FRAMES = 2_000
"""The noise of a chunk is taken at its cache's length, so never beyond this (prompt 300 frames,
100 kept, 224 new). The rest is drawn only because the drawing order depends on the whole size."""


@dataclass(frozen=True, slots=True)
class FlowCache:
    """What the flow remembers of one stream. prompt_frames: frames of the voice's prompt."""

    encoder: EncoderCache
    estimator: EstimatorCache
    prompt_frames: int


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """See `Code2WavSettings`."""

    ode_steps: int
    guidance: float
    noise_seed: int
    conformer_keep_frames: int


class Flow:
    """The flow decoder of `flow.pt`. Not thread-safe: it has a scratch buffer."""

    def __init__(self, weights: Weights, settings: FlowSettings) -> None:
        self._settings = settings
        self._encoder = Encoder(weights)
        self._speaker = weights.linear("spk_embed_affine_layer")
        self.mel_bins: int = weights["encoder_proj.weight"].shape[0]
        times, self._step_sizes = _schedule(settings.ode_steps)
        self._estimator = Estimator(weights.under("decoder.estimator"), times)
        generator = torch.Generator().manual_seed(settings.noise_seed)
        noise = torch.randn(1, self.mel_bins, _NOISE_FRAMES, generator=generator)
        noise = noise[..., :_USED_NOISE_FRAMES].mT.contiguous()
        self._noise = noise.to(self._speaker.weight.device)
        self._scratch = self._noise.new_empty(0)

    def blank(self, prompt_frames: int) -> FlowCache:
        """The cache of a stream before its voice's prompt."""
        return FlowCache(self._encoder.blank(), self._estimator.blank(), prompt_frames)

    def speaker(self, vector: Tensor) -> Tensor:
        """The speaker vector [1, 192] of a voice as `advance` takes it: [1, 80]."""
        return self._speaker(F.normalize(vector, dim=1))

    def advance(
        self,
        codes: Tensor,
        speakers: Tensor,
        caches: Sequence[FlowCache],
        last: bool,
        prompt_mel: Tensor | None = None,
    ) -> tuple[Tensor, list[FlowCache]]:
        """codes [B, n + 3] (n when last), speakers [B, 80] -> mel [B, 2n, 80], new caches.

        prompt_mel [B, 2n, 80]: only with a voice's prompt; elsewhere that condition is zero.
        """
        mu, encoders = self._encoder(codes, [cache.encoder for cache in caches], last)
        speaker = speakers[:, None].expand_as(mu)
        prompt = torch.zeros_like(mu) if prompt_mel is None else prompt_mel
        condition = torch.cat([mu, speaker, prompt], 2)
        condition = torch.cat([condition, torch.zeros_like(condition)])
        mel, estimators = self._integrate(condition, caches)
        keep = self._settings.conformer_keep_frames
        new = [
            FlowCache(keep_newest(encoder, old.prompt_frames, keep), estimator, old.prompt_frames)
            for encoder, estimator, old in zip(encoders, estimators, caches, strict=True)
        ]
        return mel, new

    def _integrate(
        self, condition: Tensor, caches: Sequence[FlowCache]
    ) -> tuple[Tensor, list[EstimatorCache]]:
        """condition [2B, T, 3 * 80] -> noise turned to mel [B, T, 80], and the new caches."""
        frames = condition.shape[1]
        conv_old = torch.stack([cache.estimator.conv for cache in caches], 3).flatten(2, 3)
        conv_new = torch.empty_like(conv_old)
        lengths = [cache.estimator.keys.shape[4] for cache in caches]
        kept = [_KeptKeys.of(cache, frames) for cache in caches]
        keys = self._keys_scratch(caches, frames)
        guidance = self._settings.guidance
        x = torch.cat([self._noise[:, length : length + frames] for length in lengths])
        for step, step_size in enumerate(self._step_sizes):
            for cache, entries in zip(caches, keys, strict=True):
                entries[:, :, :, frames:] = cache.estimator.keys[step]
            velocities = self._estimator.velocity(
                step, x, condition, StepCaches(keys, conv_old[step], conv_new[step])
            )
            guided, free = velocities.chunk(2)
            x = x + step_size * ((1 + guidance) * guided - guidance * free)
            for stream, entries in zip(kept, keys, strict=True):
                stream.take(step, entries)
        by_stream = conv_new.unflatten(2, (2, len(caches)))
        new = [
            EstimatorCache(by_stream[:, :, :, row].clone(), stream.keys)
            for row, stream in enumerate(kept)
        ]
        return x, new

    def _keys_scratch(self, caches: Sequence[FlowCache], frames: int) -> list[Tensor]:
        """Room for one step's keys of each stream [blocks, 2, h, T + S, 2d]. Reused between steps
        and chunks: fresh memory of this size costs more than the attention does."""
        shapes: list[tuple[int, ...]] = []
        for cache in caches:
            _, blocks, pair, heads, length, width = cache.estimator.keys.shape
            shapes.append((blocks, pair, heads, length + frames, width))
        sizes = [math.prod(shape) for shape in shapes]
        if self._scratch.numel() < sum(sizes):
            self._scratch = self._noise.new_empty(sum(sizes))
        parts = self._scratch[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _schedule(ode_steps: int) -> tuple[list[float], list[Tensor]]:
    """Time and size of each step, summed up in float32 as the public solver does."""
    knots = 1 - torch.cos(torch.linspace(0, 1, ode_steps + 1) * 0.5 * math.pi)
    time, size = knots[0], knots[1] - knots[0]
    times: list[float] = []
    sizes: list[Tensor] = []
    for step in range(ode_steps):
        times.append(float(time))
        sizes.append(size)
        time = time + size
        if step + 2 <= ode_steps:
            size = knots[step + 2] - time
    return times, sizes


@dataclass(frozen=True, slots=True)
class _KeptKeys:
    """One stream's new keys [steps, blocks, 2, h, entries, 2d], filled step by step.

    The public code cuts its newest-first cache to "the first `prompt` and the last 100" entries,
    that is the newest frames and the oldest of the prompt. Reproduced: the weights know no other.
    """

    keys: Tensor
    prompt_frames: int

    @classmethod
    def of(cls, cache: FlowCache, frames: int) -> "_KeptKeys":
        shape = list(cache.estimator.keys.shape)
        shape[4] = min(shape[4] + frames, cache.prompt_frames + ATTENTION_FRAMES)
        return cls(cache.estimator.keys.new_empty(shape), cache.prompt_frames)

    def take(self, step: int, keys: Tensor) -> None:
        """keys [blocks, 2, h, T + S, 2d] of `step`."""
        into = self.keys[step]
        if into.shape[3] == keys.shape[3]:
            into.copy_(keys)
            return
        first = self.prompt_frames
        into[..., :first, :] = keys[..., :first, :]
        into[..., first:, :] = keys[..., -ATTENTION_FRAMES:, :]
