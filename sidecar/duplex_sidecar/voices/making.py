"""A clip becomes a voice, in the order of the public code (contract sections E and G).

The prompt is the clip's first 6.0 s at 24 kHz, padded with silence if there are fewer. From that,
and at 16 kHz of that, come mel, codes and speaker vector. The Thinker hears the clip whole.
"""

from pathlib import Path
from typing import Final

import numpy as np

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.checkpoint.voice_format import (
    CODE_RATE_HZ,
    FRAMES_PER_CODE,
    MAX_PROMPT_CODES,
    MAX_REFERENCE_SAMPLES,
    REFERENCE_RATE_HZ,
)
from duplex_sidecar.voices.clip import Clip, require_speech
from duplex_sidecar.voices.features import (
    PROMPT_RATE_HZ,
    Floats,
    prompt_mel,
    speaker_mel,
    tokenizer_mel,
)
from duplex_sidecar.voices.models import FrontEnd
from duplex_sidecar.voices.resampling import resampled

PROMPT_S: Final = MAX_PROMPT_CODES / CODE_RATE_HZ


def make_voice(name: str, clip: Clip, folder: Path, config: Token2WavConfig) -> Voice:
    """The voice of a clip for the checkpoint in `folder`. Raises VoiceError and CheckpointError.

    The same clip and checkpoint give the same voice, bit for bit.
    """
    require_speech(clip, PROMPT_S)
    front_end = FrontEnd(folder, config)
    at_24khz = _fitted(clip.at(PROMPT_RATE_HZ), round(PROMPT_S * PROMPT_RATE_HZ))
    at_16khz = _fitted(
        resampled(at_24khz, PROMPT_RATE_HZ, REFERENCE_RATE_HZ), round(PROMPT_S * REFERENCE_RATE_HZ)
    )
    codes = front_end.codes(tokenizer_mel(at_16khz))
    mel = prompt_mel(at_24khz, config.mel_bins)
    assert len(mel) == FRAMES_PER_CODE * len(codes), "two frames a code"
    heard = np.clip(clip.at(REFERENCE_RATE_HZ), -1.0, 1.0)[:MAX_REFERENCE_SAMPLES]
    return Voice(
        name=name,
        prompt_codes=codes,
        prompt_mel=mel,
        speaker=front_end.speaker(speaker_mel(at_16khz)),
        reference_16khz=heard,
    )


def _fitted(samples: Floats, length: int) -> Floats:
    """Cut or padded with silence to `length` samples."""
    return np.pad(samples[:length], (0, max(0, length - len(samples))))
