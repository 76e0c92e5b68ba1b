"""A reference clip as samples: any audio file, mixed to mono, cut, within limits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import av
import av.container
import av.error
import numpy as np
from av.audio.resampler import AudioResampler

from duplex_sidecar.framing.pcm import MAX_RATE_HZ, MIN_RATE_HZ
from duplex_sidecar.voices.errors import VoiceError, VoiceFault
from duplex_sidecar.voices.features import Floats
from duplex_sidecar.voices.resampling import resampled

MIN_CLIP_S: Final = 1.0
MAX_CLIP_S: Final = 30.0
"""What the encoder hears whole."""
MAX_START_S: Final = 3_600.0
MAX_CHANNELS: Final = 8
SPEECH_RMS: Final = 0.001
"""60 dB below full scale: a clip that never gets louder for 100 ms holds nobody's voice."""
_BLOCKS_A_SECOND = 10


@dataclass(frozen=True, slots=True)
class Clip:
    """samples: mono float32, nominally -1..1, at rate_hz."""

    path: Path
    samples: Floats
    rate_hz: int

    def at(self, rate_hz: int) -> Floats:
        """The clip at another rate. The same clip gives the same bytes."""
        return resampled(self.samples, self.rate_hz, rate_hz)


def read_clip(path: Path, start_s: float = 0.0, length_s: float | None = None) -> Clip:
    """The clip in a file, or a part of it. Raises VoiceError (clip_unreadable, clip_rate,
    clip_too_short, clip_too_long, clip_silent).

    length_s: None takes all that is left, which may be 30 s. No more than that is ever decoded.
    """
    if not 0 <= start_s <= MAX_START_S:
        raise VoiceError(VoiceFault.TOO_SHORT, str(path), f"begin at 0 to {MAX_START_S:.0f} s")
    if length_s is not None:
        _require_length(path, length_s)
    samples, rate_hz = _decoded(path, start_s, MAX_CLIP_S if length_s is None else length_s)
    first = round(start_s * rate_hz)
    if length_s is not None:
        samples = samples[: first + round(length_s * rate_hz)]
    samples = samples[first:]
    _require_length(path, len(samples) / rate_hz)
    if not np.isfinite(samples).all():
        raise VoiceError(VoiceFault.UNREADABLE, str(path), "NaN or infinity in the samples")
    return Clip(path, samples, rate_hz)


def require_speech(clip: Clip, seconds: float) -> None:
    """Raises VoiceError (clip_silent) if nothing sounds in the clip's first `seconds`."""
    block = clip.rate_hz // _BLOCKS_A_SECOND
    heard = clip.samples[: round(seconds * clip.rate_hz)]
    blocks = heard[: len(heard) // block * block].reshape(-1, block)
    loudest = float(np.sqrt(np.square(blocks, dtype=np.float64).mean(axis=1)).max())
    if loudest < SPEECH_RMS:
        raise VoiceError(
            VoiceFault.SILENT, str(clip.path), f"its first {seconds:g} s are as good as silent"
        )


def _require_length(path: Path, seconds: float) -> None:
    allowed = f"{seconds:.2f} s; allowed are {MIN_CLIP_S:g} to {MAX_CLIP_S:g} s"
    if seconds < MIN_CLIP_S:
        raise VoiceError(VoiceFault.TOO_SHORT, str(path), allowed)
    if seconds > MAX_CLIP_S:
        allowed = f"longer than {MAX_CLIP_S:g} s; name the part to take"
        raise VoiceError(VoiceFault.TOO_LONG, str(path), allowed)


def _decoded(path: Path, start_s: float, length_s: float) -> tuple[Floats, int]:
    """Mono samples from the file's begin to a little behind the wanted part, and their rate."""
    try:
        with path.open("rb") as file, av.open(file, "r") as container:
            rate_hz = _rate_of(container, path)
            # One sample more shows that the clip is longer.
            wanted = round((start_s + length_s) * rate_hz) + 1
            parts: list[Floats] = []
            count = 0
            for part in _mono_parts(container, rate_hz, path):
                parts.append(part)
                count += len(part)
                if count >= wanted:
                    break
    except (OSError, ValueError, av.error.FFmpegError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise VoiceError(VoiceFault.UNREADABLE, str(path), reason) from None
    return np.concatenate([*parts, np.zeros(0, np.float32)])[:wanted], rate_hz


def _rate_of(container: av.container.InputContainer, path: Path) -> int:
    if not container.streams.audio:
        raise VoiceError(VoiceFault.UNREADABLE, str(path), "no audio stream")
    stream = container.streams.audio[0]
    if not MIN_RATE_HZ <= stream.rate <= MAX_RATE_HZ:
        reason = f"{stream.rate} Hz; allowed are {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz"
        raise VoiceError(VoiceFault.RATE, str(path), reason)
    if stream.channels > MAX_CHANNELS:
        reason = f"{stream.channels} channels, at most {MAX_CHANNELS}"
        raise VoiceError(VoiceFault.UNREADABLE, str(path), reason)
    return stream.rate


def _mono_parts(
    container: av.container.InputContainer, rate_hz: int, path: Path
) -> Iterator[Floats]:
    """The mean of all channels, frame by frame."""
    resampler: AudioResampler | None = None
    for frame in container.decode(audio=0):
        if frame.sample_rate != rate_hz or len(frame.layout.channels) > MAX_CHANNELS:
            raise VoiceError(VoiceFault.UNREADABLE, str(path), "its format changes on the way")
        if resampler is None:
            resampler = AudioResampler(format="fltp", layout=frame.layout, rate=rate_hz)
        for plain in resampler.resample(frame):
            yield plain.to_ndarray().mean(axis=0, dtype=np.float32)
