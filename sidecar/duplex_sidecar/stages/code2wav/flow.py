"""Codes to mel: causal conformer, then flow matching (cosine-spaced Euler steps with guidance).

One call advances a batch of streams by a chunk each. Streams may differ in age, not in the number
of codes of the chunk: the convolutions would mix padding into real frames. The given caches are
never written to; each stream gets new ones (contract section E, "Vocoder").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duplex_sidecar.stages.code2wav import conformer, estimator
from duplex_sidecar.stages.code2wav.conformer import Encoder, EncoderCache
from duplex_sidecar.stages.code2wav.estimator import Estimator, EstimatorCache
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
    """The flow decoder of `flow.pt`. Not thread-safe: it has one scratch buffer."""

    def __init__(self, weights: Weights, settings: FlowSettings) -> None:
        self._settings = settings
        self._encoder = Encoder(weights)
        self._speaker = weights.linear("spk_embed_affine_layer")
        self.mel_bins: int = weights["encoder_proj.weight"].shape[0]
        self._times, self._step_sizes = _schedule(settings.ode_steps)
        self._estimator = Estimator(
            weights.under("decoder.estimator"), [float(time) for time in self._times]
        )
        generator = torch.Generator().manual_seed(settings.noise_seed)
        noise = torch.randn(1, self.mel_bins, _NOISE_FRAMES, generator=generator)
        self._noise = noise[..., :_USED_NOISE_FRAMES].to(self._speaker.weight.device)
        self._scratch = self._noise.new_empty(0)

    def blank(self, prompt_frames: int) -> FlowCache:
        """The cache of a stream before its voice's prompt."""
        return FlowCache(self._encoder.blank(), self._estimator.blank(), prompt_frames)

    def advance(
        self,
        codes: Tensor,
        speakers: Tensor,
        caches: Sequence[FlowCache],
        last: bool,
        prompt_mel: Tensor | None = None,
    ) -> tuple[Tensor, list[FlowCache]]:
        """codes [B, n + 3] (n when last), speakers [B, 192] -> mel [B, 80, 2n], new caches.

        prompt_mel [B, 80, 2n]: only with a voice's prompt; elsewhere that condition is zero.
        """
        mu, encoder_caches = self._encoder(
            codes, conformer.stack_caches([cache.encoder for cache in caches]), last
        )
        frames = mu.shape[2]
        speaker = self._speaker(F.normalize(speakers, dim=1))[..., None].expand(-1, -1, frames)
        prompt = torch.zeros_like(mu) if prompt_mel is None else prompt_mel
        condition = torch.cat([mu, speaker, prompt], 1)
        mel, estimator_caches = self._integrate(
            torch.cat([condition, torch.zeros_like(condition)]), caches, frames
        )
        keep = self._settings.conformer_keep_frames
        new = [
            FlowCache(
                conformer.keep_newest(encoder_cache, old.prompt_frames, keep),
                estimator_cache,
                old.prompt_frames,
            )
            for encoder_cache, estimator_cache, old in zip(
                encoder_caches, estimator_caches, caches, strict=True
            )
        ]
        return mel, new

    def _integrate(
        self, condition: Tensor, caches: Sequence[FlowCache], frames: int
    ) -> tuple[Tensor, list[EstimatorCache]]:
        """Noise to mel [B, 80, T], step by step; every step has its own caches."""
        batch = len(caches)
        old = estimator.stack_caches([cache.estimator for cache in caches])
        mask = None if old.mask is None else F.pad(old.mask, (frames, 0), value=True)
        keys = self._keys_scratch(batch, frames + max(old.lengths))
        conv = torch.empty_like(old.conv).flatten(2, 3)
        kept = [
            _KeptKeys.of(cache, length + frames)
            for cache, length in zip(caches, old.lengths, strict=True)
        ]
        guidance = self._settings.guidance
        x = torch.cat([self._noise[..., length : length + frames] for length in old.lengths])
        for step, step_size in enumerate(self._step_sizes):
            velocities = self._estimator.velocity(step, x, condition, old, mask, keys, conv[step])
            guided, free = velocities.chunk(2)
            x = x + step_size * ((1 + guidance) * guided - guidance * free)
            by_stream = keys.unflatten(1, (2, batch))
            for row, stream in enumerate(kept):
                stream.take(step, by_stream[:, :, row])
        by_stream = conv.unflatten(2, (2, batch))
        new = [
            EstimatorCache(by_stream[:, :, :, row].clone(), stream.keys)
            for row, stream in enumerate(kept)
        ]
        return x, new

    def _keys_scratch(self, batch: int, entries: int) -> Tensor:
        """Reused between chunks: fresh memory of this size costs more than the attention does."""
        shape = self._estimator.keys_shape(batch, entries)
        size = math.prod(shape)
        if self._scratch.numel() < size:
            self._scratch = self._noise.new_empty(size)
        return self._scratch[:size].view(shape)


def _schedule(ode_steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Time and size of each step, summed up as the public solver does."""
    knots = 1 - torch.cos(torch.linspace(0, 1, ode_steps + 1) * 0.5 * math.pi)
    time, size = knots[0], knots[1] - knots[0]
    times: list[Tensor] = []
    sizes: list[Tensor] = []
    for step in range(ode_steps):
        times.append(time)
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
    total: int

    @classmethod
    def of(cls, cache: FlowCache, total: int) -> "_KeptKeys":
        entries = min(total, cache.prompt_frames + ATTENTION_FRAMES)
        shape = list(cache.estimator.keys.shape)
        shape[4] = entries
        return cls(cache.estimator.keys.new_empty(shape), cache.prompt_frames, total)

    def take(self, step: int, keys: Tensor) -> None:
        """keys [blocks, 2, h, >= total, 2d]: real entries first, then padding."""
        into = self.keys[step]
        if into.shape[3] == self.total:
            into.copy_(keys[..., : self.total, :])
            return
        first = self.prompt_frames
        into[..., :first, :] = keys[..., :first, :]
        into[..., first:, :] = keys[..., self.total - ATTENTION_FRAMES : self.total, :]
