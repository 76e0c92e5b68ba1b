"""The streaming audio encoder: PCM chunks in, 10 rows each out; all state in frozen values.

A step takes a session's state and gives a new one, so whoever holds the old state can forget that
the step ever happened. The cache is dropped whole when the position table would overflow (contract
section G); where that happens depends on the number of the chunk alone. A restore therefore opens
at the mel buffer's begin as of the last drop and replays PCM: up to the drop only the mel buffer
fills, from there on the cache does, and both are then what they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex_sidecar.model.minicpmo45.constants import SAMPLES_PER_POSITION, UNIT_SAMPLES
from duplex_sidecar.stages.encoder.apm import AudioCache, AudioProjector, AudioTower
from duplex_sidecar.stages.encoder.chunks import chunks_per_cache
from duplex_sidecar.stages.encoder.mel import (
    WHOLE_CLIP_SAMPLES,
    MelFrontEnd,
    MelState,
    empty_mel,
)
from duplex_sidecar.stages.encoder.shapes import EncoderShape


@dataclass(frozen=True, slots=True)
class AudioState:
    """One session's encoder.

    next_chunk: number of the chunk to come, counted from the begin of the session.
    cache: None until a restore has reached the last drop. reset_mark_samples: see EncoderRows.
    """

    mel: MelState
    next_chunk: int
    cache: AudioCache | None
    reset_mark_samples: int


@dataclass(frozen=True, slots=True)
class AudioStep:
    """rows: [10, hidden_size], or None while a restore has not reached the last drop.
    reset: the cache was dropped before this chunk."""

    state: AudioState
    rows: Tensor | None
    reset: bool


def open_state(start_samples: int) -> AudioState:
    """A state whose first PCM will be that at `start_samples` of the session's encoder input.

    Raises ValueError: not a whole number of seconds."""
    chunk, rest = divmod(start_samples, UNIT_SAMPLES)
    if rest or chunk < 0:
        raise ValueError(f"start_samples must be a multiple of {UNIT_SAMPLES}")
    return AudioState(empty_mel(start_samples), chunk, None, start_samples)


class AudioEncoder:
    """Holds weights and constants only. Not to be called from two threads at once."""

    def __init__(self, shape: EncoderShape, tower: AudioTower, projector: AudioProjector) -> None:
        self._mel = MelFrontEnd(shape.mel_bins)
        self._chunks_per_cache = chunks_per_cache(shape.audio_positions)
        self._tower = tower
        self._projector = projector

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[AudioState, bytes]]) -> list[AudioStep]:
        """One chunk (see `chunks.cut`) for each of several sessions."""
        heard = [self._hear(state, pcm) for state, pcm in chunks]
        batch = [
            (index, mel, state.cache)
            for index, (state, mel, _) in enumerate(heard)
            if state.cache is not None
        ]
        rows: dict[int, Tensor] = {}
        if batch:
            frames = self._tower([mel for _, mel, _ in batch], [cache for _, _, cache in batch])
            rows = {
                index: row
                for (index, _, _), row in zip(batch, self._projector(frames), strict=True)
            }
        return [
            AudioStep(_advanced(state), rows.get(index), reset)
            for index, (state, _, reset) in enumerate(heard)
        ]

    @torch.inference_mode()
    def reference(self, samples: NDArray[np.float32]) -> Tensor:
        """Rows [n // 1,600, hidden_size] of a reference clip of n samples (16 kHz, -1 to 1), heard
        whole; a rest is cut off (contract sections A and G). Raises ValueError: longer than 30 s,
        or too short for a row."""
        count = len(samples) // SAMPLES_PER_POSITION
        if not 0 < count <= WHOLE_CLIP_SAMPLES // SAMPLES_PER_POSITION:
            raise ValueError(f"a reference clip of {len(samples)} samples")
        mel = self._mel.whole(samples[: count * SAMPLES_PER_POSITION])
        return self._projector(self._tower.whole(mel)[None])[0]

    def _hear(self, state: AudioState, pcm_s16le: bytes) -> tuple[AudioState, Tensor, bool]:
        """Mel of one chunk, and the cache that it is to extend: dropped first where due."""
        mel_state, mel = self._mel.step(state.mel, pcm_s16le)
        due = state.next_chunk % self._chunks_per_cache == 0
        if due:
            state = AudioState(
                mel_state, state.next_chunk, self._tower.empty_cache(), mel_state.start_samples
            )
        else:
            state = AudioState(mel_state, state.next_chunk, state.cache, state.reset_mark_samples)
        return state, mel, due and state.next_chunk > 0


def _advanced(state: AudioState) -> AudioState:
    cache = None if state.cache is None else state.cache.advanced()
    return AudioState(state.mel, state.next_chunk + 1, cache, state.reset_mark_samples)
