"""The Code2Wav process: codec codes in, 24 kHz samples out.

python -m duplex_sidecar.stages.code2wav.process --socket PATH --config JSONFILE
"""

import ctypes
import os
from pathlib import Path

import msgspec
import torch

from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.voice import Voice, load_voice, seeded_voice
from duplex_sidecar.stages.code2wav.config import LOOK_AHEAD_CODES, Code2WavSettings
from duplex_sidecar.stages.code2wav.flow import FlowSettings
from duplex_sidecar.stages.code2wav.service import STAGE, Code2WavService
from duplex_sidecar.stages.code2wav.stream import Chunk, StreamState, Vocoder
from duplex_sidecar.stages.code2wav.weights import dummy_weights, load_weights
from duplex_sidecar.stages.code2wav.worker import Worker
from duplex_sidecar.stages.engine.settings import Device, LoadFormat
from duplex_sidecar.stages.process_main import run_stage_process

_UNIT_CODES = 25
_DUMMY_VOICE_CODES = 150
_KERNELS_A_LENGTH = 32
"""Convolution kernels that are prepared and cached for each new length of sound, 1.6 MiB in all."""
_CACHED_LENGTHS = 6
"""A turn's first chunk, those in its middle, and some last ones, whose lengths are arbitrary. By
default there is room for 32 lengths: memory grows for hundreds of turns until these are taken.
Preparing a length that is not cached takes 20 ms."""


async def load_service(config: bytes) -> Code2WavService:
    """Load the weights that the config file names, run every shape once."""
    settings = msgspec.json.decode(config, type=Code2WavSettings)
    device = torch.device(settings.device.value)
    if settings.device is Device.CPU:
        # A second thread only waits for the first at these sizes, and for the other stages.
        torch.set_num_threads(1)
        bound_kernel_caches()
    else:
        # The source's phase multiplies what TF32 convolutions round off the pitch.
        torch.backends.cudnn.allow_tf32 = False
    folder = Path(settings.checkpoint)
    sizes = read_config(folder).token2wav
    voices_dir = Path(settings.voices_dir) if settings.voices_dir else None
    given_dir = Path(settings.given_voices_dir) if settings.given_voices_dir else None
    is_dummy = settings.load_format is LoadFormat.DUMMY

    def voice_of(name: str) -> Voice:
        if is_dummy:
            return seeded_voice(name, _DUMMY_VOICE_CODES, 0, sizes)
        return load_voice(folder, name, sizes, voices_dir, given_dir)

    weights = dummy_weights(sizes, device) if is_dummy else load_weights(folder, sizes, device)
    vocoder = Vocoder(
        weights,
        FlowSettings(
            ode_steps=settings.ode_steps,
            guidance=settings.guidance,
            noise_seed=settings.noise_seed,
            conformer_keep_frames=settings.conformer_keep_frames,
        ),
    )
    start = warm_up(vocoder, voice_of(settings.voice))
    give_back_freed_pages()
    worker = Worker(
        vocoder,
        voice_of,
        max_batch=settings.max_batch,
        max_queue=settings.max_queue,
        max_voices=settings.max_voices,
        starts={settings.voice: start},
    )
    worker.start()
    return Code2WavService(worker, settings, sizes.codebook_size)


def bound_kernel_caches() -> None:
    """For a CPU, before the first convolution: oneDNN and torch's layer above it each cache by
    shape, and read the variables when they are first needed. The upper one's entries cost memory
    and save no time that could be measured: it keeps one."""
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(_CACHED_LENGTHS * _KERNELS_A_LENGTH)
    os.environ["LRU_CACHE_CAPACITY"] = "1"


def give_back_freed_pages() -> None:
    """What this thread took while loading is 30 MiB that the worker's thread, which allocates
    elsewhere, would never use. Does nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def warm_up(vocoder: Vocoder, voice: Voice) -> StreamState:
    """Three chunks and a last one: every shape of a turn, first buffers and kernels included.
    Returns the voice's start state."""
    start = state = vocoder.start(voice)
    for last in (False, False, False, True):
        chunk = Chunk((0,) * (_UNIT_CODES + LOOK_AHEAD_CODES), last, "warm-up")
        ((_, state),) = vocoder.advance([state], [chunk])
    return start


if __name__ == "__main__":
    run_stage_process(STAGE, load_service)
