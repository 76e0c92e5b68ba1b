"""Streaming log-mel front end, equal to computing it over the session's whole mel buffer each time.

Whisper's features (25 ms Hann window, 10 ms hop, 80 Slaney mel bands) over a buffer of up to 30 s
that loses its oldest 10 s when full (contract section G). The level floor depends on the loudest
frame in the buffer, so features of one frame depend on everything the buffer holds; but a frame's
spectrum does not change once its window is filled. So the state keeps each frame's peak and only
the frames of the new chunk are computed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from duplex_sidecar.model.minicpmo45.constants import (
    FIRST_CHUNK_SAMPLES,
    INPUT_RATE_HZ,
    UNIT_SAMPLES,
)
from duplex_sidecar.stages.encoder.filters import slaney_filters

_FFT_SAMPLES = 400
_HOP_SAMPLES = 160

_CHUNK_FRAMES = UNIT_SAMPLES // _HOP_SAMPLES
_CONTEXT_FRAMES = 2
"""Extra frames on both sides of a chunk (20 ms) that only the CNN sees."""
_CARRY_FRAMES = (FIRST_CHUNK_SAMPLES - UNIT_SAMPLES) // _HOP_SAMPLES
"""Frames in the buffer after the newest chunk's own: the first chunk's 35 ms run ahead for ever."""

WHOLE_CLIP_SAMPLES = 30 * INPUT_RATE_HZ
"""A clip that is heard whole is padded to that with silence, and may not be longer."""

_SLIDE_TRIGGER_SAMPLES = 30 * INPUT_RATE_HZ
_SLIDE_STRIDE_SAMPLES = 10 * INPUT_RATE_HZ
_EDGE_FRAMES = 2
"""Frames at the buffer's left edge whose window reaches outside it, where it is mirrored."""

_FIXED_FLOOR_SAMPLES = 5 * INPUT_RATE_HZ
"""A shorter buffer has a fixed floor: its loudest frame says too little yet."""
_FIXED_FLOOR_LOG10 = -10.0
_RANGE_LOG10 = 8.0
_SMALLEST_POWER = 1e-10


@dataclass(frozen=True, slots=True)
class MelState:
    """The mel buffer. Its arrays are never written again.

    start_samples: offset of the buffer's first sample in the session's encoder input.
    pcm: int16 [n]. frame_peaks: float32 [n // 160], log10 power of each frame's loudest band.
    """

    start_samples: int
    pcm: NDArray[np.int16]
    frame_peaks: NDArray[np.float32]


def empty_mel(start_samples: int) -> MelState:
    return MelState(start_samples, np.zeros(0, np.int16), np.zeros(0, np.float32))


class MelFrontEnd:
    """Holds constants only; all state is in MelState values."""

    def __init__(self, mel_bins: int) -> None:
        self._filters = torch.from_numpy(
            slaney_filters(INPUT_RATE_HZ, _FFT_SAMPLES, mel_bins, INPUT_RATE_HZ / 2)
        )
        self._window = torch.hann_window(_FFT_SAMPLES)

    def step(self, state: MelState, pcm_s16le: bytes) -> tuple[MelState, torch.Tensor]:
        """Append one chunk (16,560 samples to an empty buffer, else 16,000).

        Returns the new state and features [mel_bins, frames], float32: the chunk's 100 frames and 2
        of context on each side (none on the left at the begin of a buffer, so 102, else 104).
        """
        start_samples, peaks = state.start_samples, state.frame_peaks
        pcm = np.concatenate([state.pcm, np.frombuffer(pcm_s16le, "<i2")])
        if len(pcm) >= _SLIDE_TRIGGER_SAMPLES:
            start_samples += _SLIDE_STRIDE_SAMPLES
            pcm = pcm[_SLIDE_STRIDE_SAMPLES:]
            edge = self._log_power(pcm, 0, _EDGE_FRAMES).amax(0).numpy()
            peaks = peaks[_SLIDE_STRIDE_SAMPLES // _HOP_SAMPLES :]
            peaks = np.concatenate([edge, peaks[_EDGE_FRAMES:]])
        end = len(pcm) // _HOP_SAMPLES
        begin = max(0, end - _CARRY_FRAMES - _CHUNK_FRAMES - _CONTEXT_FRAMES)
        powers = self._log_power(pcm, begin, end)
        peaks = np.concatenate([peaks[:begin], powers.amax(0).numpy()])
        floor = _FIXED_FLOOR_LOG10
        if len(pcm) >= _FIXED_FLOOR_SAMPLES:
            floor = float(peaks.max()) - _RANGE_LOG10
        emitted = powers[:, : end - _CARRY_FRAMES + _CONTEXT_FRAMES - begin]
        return MelState(start_samples, pcm, peaks), (emitted.clamp(min=floor) + 4.0) / 4.0

    def whole(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """Features [mel_bins, n // 160] of a clip of n samples (-1 to 1, at most 30 s), as Whisper
        makes them: padded with silence, the floor below the loudest frame of all."""
        half = _FFT_SAMPLES // 2
        padded = np.zeros(WHOLE_CLIP_SAMPLES, np.float32)
        padded[: len(samples)] = samples
        powers = self._power_of(np.pad(padded, half, mode="reflect"))[:, :-1]
        floor = float(powers.max()) - _RANGE_LOG10
        heard = powers[:, : len(samples) // _HOP_SAMPLES]
        return (heard.clamp(min=floor) + 4.0) / 4.0

    def _log_power(self, pcm: NDArray[np.int16], begin: int, end: int) -> torch.Tensor:
        """log10 mel power [mel_bins, end - begin] of frames centred at begin * hop and so on."""
        half = _FFT_SAMPLES // 2
        left = begin * _HOP_SAMPLES - half
        segment = pcm[max(0, left) : (end - 1) * _HOP_SAMPLES + half].astype(np.float32) / 32768.0
        if left < 0:
            segment = np.pad(segment, (-left, 0), mode="reflect")
        return self._power_of(segment)

    def _power_of(self, segment: NDArray[np.float32]) -> torch.Tensor:
        """log10 mel power [mel_bins, frames] of every whole window in the segment."""
        frames = torch.from_numpy(segment).unfold(0, _FFT_SAMPLES, _HOP_SAMPLES) * self._window
        power = torch.fft.rfft(frames).abs().square()
        return (power @ self._filters).clamp(min=_SMALLEST_POWER).log10().T
