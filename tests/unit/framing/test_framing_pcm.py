"""Client audio bytes to samples and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.framing.pcm import (
    AudioFormat,
    context_samples,
    decode_audio,
    require_rate,
    resample_window,
    to_s16le,
)

pytestmark = pytest.mark.unit


@given(st.binary(max_size=400).filter(lambda data: len(data) % 2 == 0))
def test_s16_survives_unchanged(data: bytes) -> None:
    for audio_format in (AudioFormat.PCM16, AudioFormat.S16LE):
        assert to_s16le(decode_audio(data, audio_format)) == data


def test_f32_is_clipped_and_rounded_half_to_even() -> None:
    values = np.array([2.0, -3.0, 0.0, 0.5 / 32768, 1.5 / 32768, -0.5 / 32768], "<f4")
    samples = decode_audio(values.tobytes(), AudioFormat.F32LE)
    assert np.frombuffer(to_s16le(samples), "<i2").tolist() == [32767, -32768, 0, 0, 2, 0]


@pytest.mark.parametrize(
    ("audio_format", "code", "value"),
    [
        (AudioFormat.G711_ULAW, 0xFF, 0),
        (AudioFormat.G711_ULAW, 0x7F, 0),
        (AudioFormat.G711_ULAW, 0x80, 32_124),
        (AudioFormat.G711_ULAW, 0x00, -32_124),
        (AudioFormat.G711_ULAW, 0xF0, 120),
        (AudioFormat.G711_ALAW, 0xD5, 8),
        (AudioFormat.G711_ALAW, 0x55, -8),
        (AudioFormat.G711_ALAW, 0xAA, 32_256),
        (AudioFormat.G711_ALAW, 0x2A, -32_256),
        (AudioFormat.G711_ALAW, 0xC5, 264),
    ],
)
def test_g711_codes(audio_format: AudioFormat, code: int, value: int) -> None:
    samples = decode_audio(bytes([code]), audio_format)
    assert np.frombuffer(to_s16le(samples), "<i2").tolist() == [value]


@pytest.mark.parametrize(
    ("data", "audio_format", "code"),
    [
        (b"abc", AudioFormat.PCM16, FramingErrorCode.AUDIO_ODD_BYTES),
        (b"abcdef", AudioFormat.F32LE, FramingErrorCode.AUDIO_ODD_BYTES),
        (np.array([np.nan], "<f4").tobytes(), AudioFormat.F32LE, FramingErrorCode.AUDIO_NOT_FINITE),
        (np.array([np.inf], "<f4").tobytes(), AudioFormat.F32LE, FramingErrorCode.AUDIO_NOT_FINITE),
    ],
)
def test_bad_bytes_are_named(
    data: bytes, audio_format: AudioFormat, code: FramingErrorCode
) -> None:
    with pytest.raises(FramingError) as caught:
        decode_audio(data, audio_format)
    assert caught.value.code is code


def test_unknown_rates_are_refused() -> None:
    for rate_hz in (8_000, 192_000):
        require_rate(rate_hz)
    for rate_hz in (0, 7_999, 192_001):
        with pytest.raises(FramingError) as caught:
            require_rate(rate_hz)
        assert caught.value.code is FramingErrorCode.AUDIO_RATE_UNSUPPORTED


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 191_999])
def test_a_window_gives_exactly_one_unit(rate_hz: int) -> None:
    window = np.zeros(rate_hz + 2 * context_samples(rate_hz), np.float32)
    assert resample_window(window, rate_hz, 16_000).shape == (16_000,)


def test_sixteen_kilohertz_is_not_touched() -> None:
    assert context_samples(16_000) == 0
    window = np.linspace(-1, 1, 16_000, dtype=np.float32)
    assert resample_window(window, 16_000, 16_000) is window
