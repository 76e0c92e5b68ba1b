"""What is taken for a reference clip, and what is refused and how."""

import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from duplex_sidecar.checkpoint.recording import recording_path
from duplex_sidecar.voices import clip as clip_module
from duplex_sidecar.voices.clip import read_clip, require_speech
from duplex_sidecar.voices.errors import VoiceError, VoiceFault

pytestmark = pytest.mark.unit


def hum(seconds: float, rate_hz: int, hertz: float = 220.0) -> np.ndarray:
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.3 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def write_wave(path: Path, channels: list[np.ndarray], rate_hz: int) -> Path:
    samples = np.stack(channels, axis=1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(np.rint(samples * 32_767).astype("<i2").tobytes())
    return path


def write_coded(path: Path, samples: np.ndarray, rate_hz: int, codec: str, kind: str) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format=kind, layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = rate_hz, Fraction(1, rate_hz), 0
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return path


def fault_of(path: Path, **part: float) -> VoiceFault:
    with pytest.raises(VoiceError) as refused:
        read_clip(path, **part)
    assert str(path) in str(refused.value)
    return refused.value.fault


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_any_rate_becomes_the_two_that_are_needed(tmp_path: Path, rate_hz: int) -> None:
    clip = read_clip(write_wave(tmp_path / "a.wav", [hum(2, rate_hz)], rate_hz))
    assert clip.rate_hz == rate_hz
    for wanted_hz in (16_000, 24_000):
        samples = clip.at(wanted_hz)
        assert samples.dtype == np.float32
        assert len(samples) == pytest.approx(2 * wanted_hz, abs=1)
        inner = slice(wanted_hz // 10, -wanted_hz // 10)
        assert np.abs(samples[inner] - hum(2, wanted_hz)[: len(samples)][inner]).max() < 2e-3
        assert np.array_equal(samples, clip.at(wanted_hz))


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = hum(1.5, 16_000), hum(1.5, 16_000, 330)
    clip = read_clip(write_wave(tmp_path / "a.wav", [left, right], 16_000))
    assert np.abs(clip.samples - (left + right) / 2).max() < 1e-4
    silent = np.zeros_like(left)
    five = read_clip(write_wave(tmp_path / "b.wav", [left, *4 * [silent]], 16_000))
    assert np.abs(five.samples - left / 5).max() < 1e-4


def test_a_part_is_the_same_as_that_part_alone(tmp_path: Path) -> None:
    path = write_wave(tmp_path / "a.wav", [np.linspace(-0.9, 0.9, 48_000)], 16_000)
    whole = read_clip(path).samples
    assert np.array_equal(read_clip(path, start_s=0.5).samples, whole[8_000:])
    assert np.array_equal(read_clip(path, 0.5, 1.25).samples, whole[8_000:28_000])
    assert np.array_equal(read_clip(path, 0, 3).samples, whole)
    assert fault_of(path, start_s=2.5) is VoiceFault.TOO_SHORT
    assert fault_of(path, start_s=9) is VoiceFault.TOO_SHORT
    assert fault_of(path, start_s=-1) is VoiceFault.TOO_SHORT
    assert fault_of(path, start_s=float("nan")) is VoiceFault.TOO_SHORT
    assert fault_of(path, length_s=0.5) is VoiceFault.TOO_SHORT
    assert fault_of(path, length_s=31) is VoiceFault.TOO_LONG


def test_the_shipped_recording_is_flac_and_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long file no more is decoded than a clip may be long."""
    counted: list[int] = []
    real = clip_module._mono_parts

    def counting(*given: object) -> object:
        for part in real(*given):
            counted.append(len(part))
            yield part

    monkeypatch.setattr(clip_module, "_mono_parts", counting)
    assert fault_of(recording_path()) is VoiceFault.TOO_LONG
    assert sum(counted) < 31 * 16_000
    assert len(read_clip(recording_path(), 2, 6).samples) == 96_000


@pytest.mark.parametrize(
    ("seconds", "fault"),
    [
        (0.0, VoiceFault.TOO_SHORT),
        (0.99, VoiceFault.TOO_SHORT),
        (1.0, None),
        (30.0, None),
        (30.01, VoiceFault.TOO_LONG),
    ],
)
def test_one_to_thirty_seconds(tmp_path: Path, seconds: float, fault: VoiceFault | None) -> None:
    path = write_wave(tmp_path / "a.wav", [hum(seconds, 8_000)], 8_000)
    if fault is None:
        assert len(read_clip(path).samples) == seconds * 8_000
    else:
        assert fault_of(path) is fault


def test_rates_that_nobody_speaks_at(tmp_path: Path) -> None:
    assert fault_of(write_wave(tmp_path / "a.wav", [hum(2, 7_999)], 7_999)) is VoiceFault.RATE
    assert fault_of(write_wave(tmp_path / "b.wav", [hum(2, 200_000)], 200_000)) is VoiceFault.RATE
    nine = write_wave(tmp_path / "c.wav", 9 * [hum(1.5, 16_000)], 16_000)
    assert fault_of(nine) is VoiceFault.UNREADABLE


def test_files_that_hold_no_sound(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png")
    whole = write_wave(tmp_path / "a.wav", [hum(2, 16_000)], 16_000).read_bytes()
    for name, data in (("empty", b""), ("text", b"dear " * 99), ("cut", whole[:30])):
        (tmp_path / name).write_bytes(data)
        assert fault_of(tmp_path / name) is VoiceFault.UNREADABLE
    assert fault_of(tmp_path / "picture.png") is VoiceFault.UNREADABLE
    assert fault_of(tmp_path / "nowhere.wav") is VoiceFault.UNREADABLE
    assert fault_of(tmp_path) is VoiceFault.UNREADABLE


def test_float_files(tmp_path: Path) -> None:
    samples = hum(1.5, 24_000)
    path = write_coded(tmp_path / "a.wav", samples, 24_000, "pcm_f32le", "flt")
    assert np.array_equal(read_clip(path).samples, samples)
    samples[100] = np.nan
    path = write_coded(tmp_path / "b.wav", samples, 24_000, "pcm_f32le", "flt")
    assert fault_of(path) is VoiceFault.UNREADABLE


def test_somebody_has_to_speak(tmp_path: Path) -> None:
    """In the part that the voice is made of; what is said behind it does not help."""
    quiet, loud = np.zeros(16_000), hum(1, 16_000)
    require_speech(read_clip(write_wave(tmp_path / "a.wav", [loud], 16_000)), 6.0)
    late = np.concatenate([*6 * [quiet], loud])
    clip = read_clip(write_wave(tmp_path / "b.wav", [late], 16_000))
    require_speech(clip, 6.5)
    for samples in (late, quiet, 0.0005 * hum(2, 16_000)):
        clip = read_clip(write_wave(tmp_path / "c.wav", [samples], 16_000))
        with pytest.raises(VoiceError) as refused:
            require_speech(clip, 6.0)
        assert refused.value.fault is VoiceFault.SILENT
