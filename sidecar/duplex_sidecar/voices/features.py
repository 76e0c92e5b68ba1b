"""What the models of the reference front end and the flow decoder are fed: three kinds of mel.

Pure NumPy in double precision, rounded to float32 at the end, so that the same samples give the
same bytes. Each is the arithmetic of the public code (Whisper's log mel as `s3tokenizer` has it,
Kaldi's filter bank as torchaudio has it, the mel of `step-audio2`), and is compared with recorded
output of it (`tests/unit/voices`).
"""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from duplex_sidecar.checkpoint.layout_front_end import SPEAKER_MEL_BINS, TOKENIZER_MEL_BINS
from duplex_sidecar.checkpoint.voice_format import REFERENCE_RATE_HZ
from duplex_sidecar.stages.encoder.filters import slaney_filters

Floats = NDArray[np.float32]

PROMPT_RATE_HZ: Final = 24_000
PROMPT_HOP_SAMPLES: Final = 480
"""50 frames a second: two for each code."""

_TOKENIZER_FFT, _TOKENIZER_HOP = 400, 160
_TOKENIZER_RANGE_LOG10 = 8.0
_SMALLEST_POWER = 1e-10

_PROMPT_FFT = 1_920
_PROMPT_HIGHEST_HERTZ = 8_000.0
_PROMPT_SMALLEST = 1e-5
_PROMPT_UNDER_ROOT = 1e-9

_KALDI_FRAME, _KALDI_HOP, _KALDI_FFT = 400, 160, 512
_KALDI_LOWEST_HERTZ = 20.0
_PREEMPHASIS = 0.97
_POVEY_POWER = 0.85
_SMALLEST_ENERGY = float(np.finfo(np.float32).eps)


def tokenizer_mel(samples_16khz: Floats) -> Floats:
    """Whisper's log mel [128, n // 160] of n samples at 16 kHz, -1..1: nothing is padded to 30 s,
    the floor is 80 dB below the loudest band."""
    half = _TOKENIZER_FFT // 2
    padded = np.pad(samples_16khz.astype(np.float64), half, mode="reflect")
    spectrum = _spectrum(padded, _TOKENIZER_FFT, _TOKENIZER_HOP, _hann(_TOKENIZER_FFT))[:-1]
    power = np.square(np.abs(spectrum))
    filters = slaney_filters(
        REFERENCE_RATE_HZ, _TOKENIZER_FFT, TOKENIZER_MEL_BINS, REFERENCE_RATE_HZ / 2
    )
    logs = np.log10(np.maximum(power @ filters, _SMALLEST_POWER))
    floored = np.maximum(logs, logs.max() - _TOKENIZER_RANGE_LOG10)
    return np.ascontiguousarray(((floored + 4.0) / 4.0).T, dtype=np.float32)


def speaker_mel(samples_16khz: Floats) -> Floats:
    """Kaldi's log filter bank [frames, 80] of samples at 16 kHz, -1..1, without its mean over time.

    Frames are whole windows of 25 ms every 10 ms; no dither.
    """
    samples = samples_16khz.astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(samples, _KALDI_FRAME)[::_KALDI_HOP]
    frames = frames - frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    windowed = (frames - _PREEMPHASIS * before) * _povey()
    power = np.square(np.abs(np.fft.rfft(windowed, _KALDI_FFT, axis=1)))
    # Kaldi leaves the last line of the spectrum out.
    logs = np.log(np.maximum(power[:, :-1] @ _kaldi_filters(), _SMALLEST_ENERGY))
    return np.asarray(logs - logs.mean(axis=0, keepdims=True), dtype=np.float32)


def prompt_mel(samples_24khz: Floats, mel_bins: int) -> Floats:
    """Log magnitudes [n // 480, mel_bins] of n samples at 24 kHz, -1..1, as the flow decoder knows
    its prompt."""
    edge = (_PROMPT_FFT - PROMPT_HOP_SAMPLES) // 2
    padded = np.pad(samples_24khz.astype(np.float64), edge, mode="reflect")
    spectrum = _spectrum(padded, _PROMPT_FFT, PROMPT_HOP_SAMPLES, _hann(_PROMPT_FFT))
    magnitudes = np.sqrt(np.square(np.abs(spectrum)) + _PROMPT_UNDER_ROOT)
    filters = slaney_filters(PROMPT_RATE_HZ, _PROMPT_FFT, mel_bins, _PROMPT_HIGHEST_HERTZ)
    return np.log(np.maximum(magnitudes @ filters, _PROMPT_SMALLEST)).astype(np.float32)


def _spectrum(
    samples: NDArray[np.float64], fft: int, hop: int, window: NDArray[np.float64]
) -> NDArray[np.complex128]:
    """[frames, fft // 2 + 1] of every whole window."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, fft)[::hop]
    return np.fft.rfft(frames * window, axis=1)


@cache
def _hann(length: int) -> NDArray[np.float64]:
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)


@cache
def _povey() -> NDArray[np.float64]:
    turn = 2 * np.pi * np.arange(_KALDI_FRAME) / (_KALDI_FRAME - 1)
    return (0.5 - 0.5 * np.cos(turn)) ** _POVEY_POWER


@cache
def _kaldi_filters() -> NDArray[np.float64]:
    """Triangles [256, 80] that are even on the mel scale 1127 ln(1 + f / 700), of height 1."""
    lines = np.arange(_KALDI_FFT // 2) * REFERENCE_RATE_HZ / _KALDI_FFT
    lowest, highest = _kaldi_scale(np.array([_KALDI_LOWEST_HERTZ, REFERENCE_RATE_HZ / 2]))
    edges = np.linspace(lowest, highest, SPEAKER_MEL_BINS + 2)
    mels = _kaldi_scale(lines)[:, None]
    rising = (mels - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - mels) / (edges[2:] - edges[1:-1])
    return np.maximum(0.0, np.minimum(rising, falling))


def _kaldi_scale(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1127.0 * np.log(1.0 + hertz / 700.0)
