"""Another sample rate by a windowed sinc: torchaudio's, with its defaults.

The public front end resamples with it, and codes are sensitive to what stands near the upper edge
of the band: a sharper filter gives other ones. Double precision, rounded to float32 at the end.
"""

import math
from typing import Final

import numpy as np

from duplex_sidecar.voices.features import Floats

_ZERO_CROSSINGS: Final = 6
_QUARTER: Final = np.pi / _ZERO_CROSSINGS / 2
_ROLL_OFF: Final = 0.99
_AT_ONCE: Final = 1 << 22
"""Products held in memory at a time."""


def resampled(samples: Floats, rate_hz: int, wanted_hz: int) -> Floats:
    """ceil(n * wanted / rate) float32 samples of n; outside of them is silence."""
    if rate_hz == wanted_hz:
        return samples
    common = math.gcd(rate_hz, wanted_hz)
    old, new = rate_hz // common, wanted_hz // common
    cut_off = min(old, new) * _ROLL_OFF
    reach = math.ceil(_ZERO_CROSSINGS * old / cut_off)
    taps = np.arange(-reach, reach + 2)
    padded = np.pad(samples.astype(np.float64), reach + 1)
    count = -(-len(samples) * new // old)
    parts: list[Floats] = []
    step = max(1, _AT_ONCE // len(taps))
    for first in range(0, count, step):
        places = np.arange(first, min(first + step, count))
        # Each output lies between two inputs: whole ones before it, and a rest.
        whole, rest = np.divmod(places * old, new)
        distance = (taps - rest[:, None] / new) * (cut_off / old)
        window = np.cos(np.clip(distance, -_ZERO_CROSSINGS, _ZERO_CROSSINGS) * _QUARTER) ** 2
        kernel = np.sinc(distance) * window * (cut_off / old)
        near = np.lib.stride_tricks.sliding_window_view(padded, len(taps))[whole + 1]
        parts.append(np.einsum("nt,nt->n", near, kernel).astype(np.float32))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
