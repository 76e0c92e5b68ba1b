"""Client audio bytes to samples, and samples to what the encoder gets. Pure and deterministic."""

from enum import StrEnum
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import soxr

from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.model.minicpmo45.constants import INPUT_RATE_HZ

Samples = npt.NDArray[np.float32]
"""Mono samples, nominally within [-1, 1]."""

MIN_RATE_HZ: Final = 8_000
MAX_RATE_HZ: Final = 192_000
S16_SCALE: Final = 32_768
S16_BYTES: Final = 2
F32_BYTES: Final = 4
RESAMPLER_QUALITY: Final = "HQ"


class AudioFormat(StrEnum):
    """Wire formats of client audio: mono, little endian."""

    PCM16 = "pcm16"
    S16LE = "s16le"
    F32LE = "f32le"
    G711_ULAW = "g711_ulaw"
    G711_ALAW = "g711_alaw"


def sample_bytes(audio_format: AudioFormat) -> int:
    """Bytes of one sample on the wire."""
    if audio_format is AudioFormat.F32LE:
        return F32_BYTES
    return S16_BYTES if audio_format in (AudioFormat.PCM16, AudioFormat.S16LE) else 1


def require_rate(rate_hz: int) -> None:
    """Raises FramingError AUDIO_RATE_UNSUPPORTED outside of 8 to 192 kHz."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise FramingError(
            FramingErrorCode.AUDIO_RATE_UNSUPPORTED,
            f"sample rate {rate_hz} Hz; allowed are {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz",
        )


def decode_audio(data: bytes, audio_format: AudioFormat) -> Samples:
    """Samples of one piece of client audio, within [-1, 1] (float input beyond is clipped).

    Raises FramingError AUDIO_ODD_BYTES or AUDIO_NOT_FINITE.
    """
    if audio_format is AudioFormat.F32LE:
        return _decode_f32le(_whole(data, F32_BYTES))
    if audio_format is AudioFormat.G711_ULAW:
        return _ulaw_table()[np.frombuffer(data, np.uint8)]
    if audio_format is AudioFormat.G711_ALAW:
        return _alaw_table()[np.frombuffer(data, np.uint8)]
    return np.frombuffer(_whole(data, S16_BYTES), "<i2").astype(np.float32) / np.float32(S16_SCALE)


def to_s16le(samples: Samples) -> bytes:
    """Our own rounding (half to even, clipped): the resampler's integer output dithers."""
    scaled = np.rint(samples * np.float32(S16_SCALE))
    return np.clip(scaled, -S16_SCALE, S16_SCALE - 1).astype("<i2").tobytes()


def context_samples(rate_hz: int) -> int:
    """Client samples that a unit's window has on each side: 100 ms, none where nothing has to be
    resampled."""
    return 0 if rate_hz == INPUT_RATE_HZ else -(-rate_hz // 10)


def resample_window(window: Samples, rate_hz: int, samples: int) -> Samples:
    """`samples` 16 kHz samples from one fixed window: context, the unit, context, at `rate_hz`.

    A function of the window alone. Where 100 ms are no whole number of output samples all units of
    that rate are late by the same part of one sample (under 0.04 ms), so they still join.
    """
    if rate_hz == INPUT_RATE_HZ:
        return window
    skip = round(context_samples(rate_hz) * INPUT_RATE_HZ / rate_hz)
    resampled = soxr.resample(window, rate_hz, INPUT_RATE_HZ, quality=RESAMPLER_QUALITY)
    return np.asarray(resampled[skip : skip + samples], np.float32)


def _whole(data: bytes, sample_bytes: int) -> bytes:
    if len(data) % sample_bytes:
        raise FramingError(
            FramingErrorCode.AUDIO_ODD_BYTES,
            f"{len(data)} bytes are no whole number of {sample_bytes}-byte samples",
        )
    return data


def _decode_f32le(data: bytes) -> Samples:
    samples = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(samples).all():
        raise FramingError(FramingErrorCode.AUDIO_NOT_FINITE, "NaN or infinity in the samples")
    return np.clip(samples, -1.0, 1.0)


@cache
def _ulaw_table() -> Samples:
    """G.711 mu-law: 8 segments of 16 steps, bits inverted, biased by 132 (14-bit scale x 4)."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    exponent, mantissa = (code >> 4) & 7, code & 15
    magnitude = (((mantissa << 3) + 132) << exponent) - 132
    return _g711(np.where(code & 0x80, -magnitude, magnitude))


@cache
def _alaw_table() -> Samples:
    """G.711 A-law: even bits inverted, segment 0 linear (13-bit scale x 8)."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    exponent, mantissa = (code >> 4) & 7, code & 15
    first = (mantissa << 4) + 8
    magnitude = np.where(exponent == 0, first, (first + 256) << np.maximum(exponent - 1, 0))
    return _g711(np.where(code & 0x80, magnitude, -magnitude))


def _g711(linear: npt.NDArray[np.int32]) -> Samples:
    return linear.astype(np.float32) / np.float32(S16_SCALE)
