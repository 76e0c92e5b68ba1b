"""Codes to sound, chunk by chunk: what a stream is, how it begins, how it goes on.

A stream's whole state is one frozen object of tensors. Advancing makes a new one and leaves the old
one as it was, so a chunk that fails has changed nothing and a start state is shared by every stream
of a voice. First chunk of 25 + 3 codes: 20,160 samples; then 24,000; the last one flushes
(contract section E).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.config import LOOK_AHEAD_CODES, MIN_CHUNK_CODES
from duplex_sidecar.stages.code2wav.flow import Flow, FlowCache, FlowSettings
from duplex_sidecar.stages.code2wav.hift import FRAME_SAMPLES, HiFT
from duplex_sidecar.stages.code2wav.weights import Token2WavWeights

KEPT_FRAMES = 8
"""Mel frames that are vocoded again with the next chunk."""
FADE_SAMPLES = KEPT_FRAMES * FRAME_SAMPLES
"""Samples held back by a chunk and cross-faded with the beginning of the next: 3,840."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """All that a stream is. Lengths are 0 before the first chunk, then as given.

    speaker [1, 80]. mel [1, 80, 8], source [1, 1, 3840], tail [1, 3840]: the end of the last
    chunk. codes: codes taken since the epoch began, re-sent ones not counted: with the feed's seed
    it names a chunk's noise.
    """

    flow: FlowCache
    speaker: Tensor
    mel: Tensor
    source: Tensor
    tail: Tensor
    codes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """codes: 3 of left context and the new ones (at least 7 in all, any number if `last`).
    seed: names the conversation's turn; see `noise_seed`."""

    codes: tuple[int, ...]
    last: bool
    seed: str


def noise_seed(seed: str, code_offset: int) -> int:
    """Seed of the excitation noise of the chunk that begins `code_offset` codes into its epoch.
    A turn's chunks, fed again from the first, so have the same noise whatever ran in between."""
    digest = hashlib.blake2b(f"{seed}:{code_offset}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


class Vocoder:
    """Flow and HiFT of one checkpoint. Not thread-safe; belongs to one worker thread."""

    def __init__(self, weights: Token2WavWeights, settings: FlowSettings) -> None:
        self._flow = Flow(weights.flow, settings)
        self._hift = HiFT(weights.hift)
        self._device = weights.device
        fade = torch.hamming_window(2 * FADE_SAMPLES, periodic=False, dtype=torch.float64)
        self._fade_in = fade[:FADE_SAMPLES].to(self._device)
        self._fade_out = fade[FADE_SAMPLES:].to(self._device)

    @torch.inference_mode()
    def start(self, voice: Voice) -> StreamState:
        """The state in which every stream of `voice` begins."""
        codes = torch.from_numpy(voice.prompt_codes).to(self._device)[None]
        mel = torch.from_numpy(voice.prompt_mel).to(self._device)[None]
        speaker = self._flow.speaker(torch.from_numpy(voice.speaker).to(self._device)[None])
        # The prompt has no successor to look ahead to: the public code repeats its beginning.
        codes = torch.cat([codes, codes[:, :LOOK_AHEAD_CODES]], 1)
        blank = self._flow.blank(prompt_frames=mel.shape[1])
        _, (cache,) = self._flow.advance(codes, speaker, [blank], last=False, prompt_mel=mel)
        zeros = mel.new_zeros
        return StreamState(
            cache, speaker, zeros(1, self._flow.mel_bins, 0), zeros(1, 1, 0), zeros(1, 0), 0
        )

    @torch.inference_mode()
    def advance(
        self, states: Sequence[StreamState], chunks: Sequence[Chunk]
    ) -> list[tuple[Tensor, StreamState]]:
        """Samples (1-D, in -1..1) and new state of each stream. All chunks have the same number of
        codes and the same `last`; states may be of any age and voice. A batch gives what single
        runs give, within 1e-4. Raises ValueError for a chunk that no batch may hold."""
        last = chunks[0].last
        _check_chunks(chunks)
        codes = torch.tensor([chunk.codes for chunk in chunks], device=self._device)
        speakers = torch.cat([state.speaker for state in states])
        mel, caches = self._flow.advance(codes, speakers, [s.flow for s in states], last)
        results: list[tuple[Tensor, StreamState] | None] = [None] * len(states)
        for rows in self._vocoder_batches(states):
            sounds = self._vocode(
                [states[row] for row in rows],
                torch.stack([mel[row].mT for row in rows]),
                [noise_seed(chunks[row].seed, states[row].codes) for row in rows],
            )
            for row, (sound, source, frames) in zip(rows, sounds, strict=True):
                results[row] = _split_sound(
                    states[row], caches[row], chunks[row], sound, source, frames
                )
        return [result for result in results if result is not None]

    def _vocoder_batches(self, states: Sequence[StreamState]) -> list[list[int]]:
        """Rows that go through the vocoder together: those of equal mel length (a first chunk has
        no kept frames). On a CPU each alone: convolutions there round by the size of the batch,
        which the harmonic source's phase multiplies to 3e-4, and batching them gains nothing."""
        if self._device.type == "cpu":
            return [[row] for row in range(len(states))]
        groups: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            groups.setdefault(state.mel.shape[2], []).append(row)
        return list(groups.values())

    def _vocode(
        self, states: Sequence[StreamState], mel: Tensor, seeds: Sequence[int]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Cross-faded samples [1, L], source [1, 1, L] and mel [1, 80, T] of each stream."""
        frames = torch.cat([torch.cat([state.mel for state in states]), mel], 2)
        kept_source = torch.cat([state.source for state in states])
        samples, source = self._hift(frames, kept_source, seeds)
        if states[0].tail.shape[1]:
            tail = torch.cat([state.tail for state in states])
            head = samples[:, :FADE_SAMPLES] * self._fade_in + tail * self._fade_out
            samples = torch.cat([head.to(samples.dtype), samples[:, FADE_SAMPLES:]], 1)
        return [
            (samples[row : row + 1], source[row : row + 1], frames[row : row + 1])
            for row in range(len(states))
        ]


def _check_chunks(chunks: Sequence[Chunk]) -> None:
    shapes = {(len(chunk.codes), chunk.last) for chunk in chunks}
    if len(shapes) != 1:
        raise ValueError(f"chunks of different shapes in one batch: {sorted(shapes)}")
    count, last = shapes.pop()
    if count < (1 if last else MIN_CHUNK_CODES):
        raise ValueError(f"chunk of {count} codes")


def _split_sound(
    state: StreamState,
    flow: FlowCache,
    chunk: Chunk,
    samples: Tensor,
    source: Tensor,
    mel: Tensor,
) -> tuple[Tensor, StreamState]:
    """What leaves now, and what waits for the next chunk."""
    new_codes = len(chunk.codes) - (0 if chunk.last else LOOK_AHEAD_CODES)
    new_state = StreamState(
        flow,
        state.speaker,
        mel[..., -KEPT_FRAMES:].clone(),
        source[..., -FADE_SAMPLES:].clone(),
        samples[:, -FADE_SAMPLES:].clone(),
        state.codes + new_codes,
    )
    sound = samples if chunk.last else samples[:, :-FADE_SAMPLES]
    return sound[0], new_state
