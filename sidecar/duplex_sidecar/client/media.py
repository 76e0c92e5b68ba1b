"""Reads recordings: any audio file to 16 kHz mono s16le, any clip to one JPEG a second."""

import io
from collections.abc import Iterator
from pathlib import Path

import av
import av.container
import av.error
import numpy as np
from av.audio.resampler import AudioResampler
from PIL import Image

from duplex_sidecar.client.conversation import SAMPLE_RATE_HZ

JPEG_QUALITY = 85


class MediaError(Exception):
    """The file is missing, is not media, or has no stream of the wanted kind."""


def read_speech(path: Path) -> bytes:
    """The whole recording as s16le, mono, 16 kHz."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise MediaError(f"{path} has no audio stream")
            resampler = AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE_HZ)
            parts: list[bytes] = []
            for frame in container.decode(audio=0):
                parts += [out.to_ndarray().tobytes() for out in resampler.resample(frame)]
            parts += [out.to_ndarray().tobytes() for out in resampler.resample(None)]
    except (OSError, av.error.FFmpegError) as error:
        raise MediaError(f"{path}: {error.strerror or error}") from error
    pcm = b"".join(parts)
    if not pcm:
        raise MediaError(f"{path} holds no audio")
    return pcm


def read_frames(path: Path) -> list[bytes]:
    """One JPEG per second of the clip: the first picture of each second."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise MediaError(f"{path} has no video stream")
            return list(_first_of_each_second(container))
    except (OSError, av.error.FFmpegError) as error:
        raise MediaError(f"{path}: {error.strerror or error}") from error


def _first_of_each_second(container: av.container.InputContainer) -> Iterator[bytes]:
    second = -1
    for frame in container.decode(video=0):
        if int(frame.time) <= second:
            continue
        second = int(frame.time)
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(frame.to_ndarray(format="rgb24"))).save(
            buffer, "JPEG", quality=JPEG_QUALITY
        )
        yield buffer.getvalue()
