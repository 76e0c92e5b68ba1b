"""The conversations from which the readout is fitted and with which it is proven.

All of them hear the recording that ships with the package, through the checkpoint's own encoder:
with and without a reference voice, a camera, noise in the room, in every window mode.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplex_api.window import WindowMode
from duplex_sidecar.checkpoint.config import CheckpointConfig
from duplex_sidecar.checkpoint.fit_cache import FittedReadout
from duplex_sidecar.checkpoint.layout import encoder_shape
from duplex_sidecar.checkpoint.plain_thinker import PlainThinker
from duplex_sidecar.checkpoint.readout import FIT_VERSION, UNITS, Lesson, fit_readout
from duplex_sidecar.checkpoint.recording import (
    hear,
    hear_reference,
    read_recording,
    recording_path,
    with_noise,
)
from duplex_sidecar.checkpoint.rehearsal import Scene
from duplex_sidecar.checkpoint.replies import SENTENCES, make_teacher
from duplex_sidecar.checkpoint.tokenizer import DuplexTokenizer
from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.checkpoint.weights import WEIGHTS_VERSION, generator_of
from duplex_sidecar.model.minicpmo45.context import build_context
from duplex_sidecar.model.minicpmo45.decode import GREEDY_SAMPLING, SESSION_SAMPLING, Sampling
from duplex_sidecar.model.minicpmo45.framing import FrameSize
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.stages.encoder.audio import AudioEncoder
from duplex_sidecar.stages.encoder.vision import VisionEncoder
from duplex_sidecar.stages.encoder.weights import EncoderModules, build, used_shapes
from duplex_sidecar.window.policy import WindowPolicy

NOISY_UNITS = 60
CONTEXT_UNITS = 50
CAMERA_UNITS = 40
"""Lengths of the dearer lessons; the others have `UNITS`."""
PROBE_UNITS = 3
ROOM_NOISE_RMS = 0.001
QUIET_DIVISOR = 6
"""A speaker far from the microphone: 16 dB below the recording."""
OTHER_INSTRUCTIONS = "You are a friendly voice. Answer in a few short words."

_BASIC_HIGH_TOKENS = 1200
_BASIC_LOW_TOKENS = 800
"""Low enough that the window slides several times in 120 units."""


@dataclass(frozen=True, slots=True)
class Pupil:
    """What is taught: a checkpoint's weights (all of them), tokenizer and voice."""

    config: CheckpointConfig
    weights: Mapping[str, Tensor]
    tokenizer: DuplexTokenizer
    vocabulary: Vocabulary
    voice: Voice


def fingerprint(pupil: Pupil, seed: int) -> str:
    """Digest of what a fit depends on; the encoder's code enters by a few of its rows."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{FIT_VERSION}:{WEIGHTS_VERSION}:{seed}:{torch.__version__}".encode())
    digest.update("\n".join(SENTENCES).encode())
    digest.update(repr(pupil.vocabulary.token_bytes).encode())
    samples = read_recording(recording_path())
    digest.update(samples.tobytes())
    for unit in hear(_audio(_modules(pupil), pupil), samples, PROBE_UNITS):
        digest.update(unit.rows.numpy().tobytes())
    for name in sorted(pupil.weights):
        if name.startswith("llm.") and name != "llm.lm_head.weight":
            digest.update(pupil.weights[name].numpy().tobytes())
    return digest.hexdigest()


def teach(pupil: Pupil, seed: int) -> FittedReadout:
    """Fit and prove. Raises CheckpointError (fit_failed)."""
    modules = _modules(pupil)
    audio = _audio(modules, pupil)
    samples = read_recording(recording_path())
    heard = hear(audio, samples, UNITS)
    noisy = hear(audio, with_noise(samples, ROOM_NOISE_RMS, seed), NOISY_UNITS)
    quiet = hear(audio, samples // QUIET_DIVISOR, NOISY_UNITS)
    reference = hear_reference(audio, pupil.voice.reference_16khz)
    frame = _frame(modules, pupil, seed)

    def scene(
        name: str,
        mode: WindowMode,
        *,
        instructions: str | None = None,
        reference_rows: Tensor | None = None,
        frame: tuple[FrameSize, Tensor] | None = None,
        always_speech: bool = False,
        sampling: Sampling = GREEDY_SAMPLING,
    ) -> Scene:
        samples = None if reference_rows is None else len(pupil.voice.reference_16khz)
        context = build_context(
            instructions, samples, None, pupil.tokenizer.encode, pupil.vocabulary.special_ids
        )
        return Scene(
            name=name,
            vocabulary=pupil.vocabulary,
            context=context,
            policy=WindowPolicy(mode, _BASIC_HIGH_TOKENS, _BASIC_LOW_TOKENS, 500, 24),
            sampling=sampling,
            reference_rows=reference_rows,
            frame=frame,
            always_speech=always_speech,
        )

    lessons = (
        Lesson(scene("off", WindowMode.OFF), heard),
        Lesson(scene("off, noise", WindowMode.OFF), noisy),
        Lesson(scene("off, quiet", WindowMode.OFF), quiet),
        Lesson(
            scene(
                "off, voice",
                WindowMode.OFF,
                instructions=OTHER_INSTRUCTIONS,
                reference_rows=reference,
                always_speech=True,
            ),
            heard,
        ),
        Lesson(
            scene("context, voice", WindowMode.CONTEXT, reference_rows=reference),
            heard[:CONTEXT_UNITS],
        ),
        Lesson(
            scene("basic, camera", WindowMode.BASIC, frame=frame, always_speech=True),
            heard[:CAMERA_UNITS],
        ),
    )
    proofs = (
        Lesson(scene("off", WindowMode.OFF), heard),
        Lesson(scene("off, voice", WindowMode.OFF, reference_rows=reference), heard),
        Lesson(scene("off, sampled", WindowMode.OFF, sampling=SESSION_SAMPLING), heard),
        Lesson(scene("basic", WindowMode.BASIC), heard),
        Lesson(scene("context", WindowMode.CONTEXT), heard),
    )
    teacher = make_teacher(pupil.tokenizer, pupil.vocabulary)
    thinker = PlainThinker(pupil.config.thinker, pupil.weights)
    rows, behaviours = fit_readout(thinker, teacher, lessons, proofs, seed)
    return FittedReadout(rows, behaviours)


def _modules(pupil: Pupil) -> EncoderModules:
    shape = encoder_shape(pupil.config)
    return build(shape, {name: pupil.weights[name] for name in used_shapes(shape)})


def _audio(modules: EncoderModules, pupil: Pupil) -> AudioEncoder:
    return AudioEncoder(encoder_shape(pupil.config), modules.apm, modules.audio_projection_layer)


def _frame(modules: EncoderModules, pupil: Pupil, seed: int) -> tuple[FrameSize, Tensor]:
    """One camera frame: coarse coloured noise, as far from a blank image as a room is."""
    vision = VisionEncoder(encoder_shape(pupil.config), modules.vpm, modules.resampler)
    side = pupil.config.tile_pixels
    coarse = torch.rand(1, 3, 8, 8, generator=generator_of("frame", seed)) * 2 - 1
    pixels = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")[0]
    block = np.ascontiguousarray(pixels.numpy(), dtype=np.float32)
    return FrameSize(side, side), vision.encode([block])[0].to(torch.float32)
