"""Slaney's mel filters, as librosa and Whisper have them. NumPy only."""

import numpy as np
from numpy.typing import NDArray


def slaney_filters(
    rate_hz: int, fft_samples: int, mel_bins: int, highest_hertz: float
) -> NDArray[np.float32]:
    """Triangular filters [fft_samples // 2 + 1, mel_bins], 0 to `highest_hertz`, each of area 1."""
    hertz = np.linspace(0.0, rate_hz / 2, fft_samples // 2 + 1)
    highest_mel = _hertz_to_mel(highest_hertz)
    edges = _mel_to_hertz(np.linspace(0.0, highest_mel, mel_bins + 2))
    rising = (hertz[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz[:, None]) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))).astype(np.float32)


# Slaney's mel scale: linear up to 1,000 Hz (15 mel), then 27 steps per factor of 6.4.
_LINEAR_HERTZ_PER_MEL = 200.0 / 3
_LOG_BEGIN_HERTZ = 1000.0
_LOG_BEGIN_MEL = 15.0
_LOG_STEP = np.log(6.4) / 27.0


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _LOG_BEGIN_HERTZ:
        return hertz / _LINEAR_HERTZ_PER_MEL
    return _LOG_BEGIN_MEL + float(np.log(hertz / _LOG_BEGIN_HERTZ)) / _LOG_STEP


def _mel_to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(
        mel < _LOG_BEGIN_MEL,
        mel * _LINEAR_HERTZ_PER_MEL,
        _LOG_BEGIN_HERTZ * np.exp(_LOG_STEP * (mel - _LOG_BEGIN_MEL)),
    )
