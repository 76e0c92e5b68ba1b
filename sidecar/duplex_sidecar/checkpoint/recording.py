"""The recording that ships with the package, as PCM and as encoder rows.

A synthetic conversation partner of three voices who pauses for answers; how it was made stands in
`examples/audio/README.md`.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import av
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplex_sidecar.framing.vad import VadPolicy, VadState, advance_vad, spoke_since
from duplex_sidecar.model.minicpmo45.constants import (
    FIRST_CHUNK_SAMPLES,
    INPUT_RATE_HZ,
    UNIT_SAMPLES,
)
from duplex_sidecar.stages.encoder.audio import AudioEncoder, open_state

RECORDING_NAME = "conversation.flac"
QUIET_SAMPLES = INPUT_RATE_HZ // 5


@dataclass(frozen=True, slots=True)
class HeardUnit:
    """One second of the recording as the Thinker gets it.

    rows: [10, hidden]. is_speech: the flag that the voice detector gives. silent: its last 200 ms
    are quiet, so whoever decides at the end of this unit hears nobody just now.
    """

    rows: Tensor
    is_speech: bool
    silent: bool


def recording_path() -> Path:
    """The FLAC file in the package."""
    return Path(str(resources.files("duplex_sidecar.checkpoint") / "assets" / RECORDING_NAME))


def read_recording(path: Path) -> NDArray[np.int16]:
    """All samples of a mono 16 kHz FLAC file."""
    with av.open(str(path)) as file:
        frames = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
        rate_hz = file.streams.audio[0].rate
    if rate_hz != INPUT_RATE_HZ:
        raise ValueError(f"{path} has {rate_hz} Hz, not {INPUT_RATE_HZ}")
    return np.concatenate(frames).astype(np.int16)


def hear(encoder: AudioEncoder, samples: NDArray[np.int16], units: int) -> list[HeardUnit]:
    """The first `units` seconds of `samples`, repeated as often as it takes."""
    needed = units * UNIT_SAMPLES
    stream = np.tile(samples, -(-needed // len(samples)))[:needed]
    floats = stream.astype(np.float32) / np.float32(32768)
    heard: list[HeardUnit] = []
    state, vad = open_state(0), VadState()
    for index in range(units):
        start, end = index * UNIT_SAMPLES, (index + 1) * UNIT_SAMPLES
        pcm = stream[start:end]
        if index == 0:
            pcm = np.pad(pcm, (FIRST_CHUNK_SAMPLES - UNIT_SAMPLES, 0))
        step = encoder.step([(state, pcm.astype("<i2").tobytes())])[0]
        state = step.state
        if step.rows is None:
            raise RuntimeError("the encoder gave no rows")
        vad, _ = advance_vad(vad, VadPolicy(), floats[start:end], INPUT_RATE_HZ)
        heard.append(
            HeardUnit(
                rows=step.rows.to(torch.float32),
                is_speech=spoke_since(vad, start),
                silent=_quiet(floats[end - QUIET_SAMPLES : end]),
            )
        )
    return heard


def hear_reference(encoder: AudioEncoder, samples: NDArray[np.float32]) -> Tensor:
    """Rows [samples / 1,600, hidden] of a reference clip of whole seconds."""
    pcm = np.rint(samples * 32767).astype(np.int16)
    return torch.cat([unit.rows for unit in hear(encoder, pcm, len(pcm) // UNIT_SAMPLES)])


def with_noise(samples: NDArray[np.int16], rms: float, seed: int) -> NDArray[np.int16]:
    """The recording in a room that is not quite still. rms: of the noise, of full scale."""
    noise = np.random.default_rng(seed).standard_normal(len(samples)) * rms * 32768
    return np.clip(np.rint(samples + noise), -32768, 32767).astype(np.int16)


def _quiet(samples: NDArray[np.float32]) -> bool:
    """Neither half of the samples is as loud as what the voice detector takes for voice."""
    levels = np.sqrt(np.square(samples, dtype=np.float64).reshape(2, -1).mean(1))
    return bool((levels < VadPolicy().rms_threshold).all())
