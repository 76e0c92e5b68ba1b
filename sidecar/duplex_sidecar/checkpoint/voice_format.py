"""What a voice file holds: the reference front end's output, made once per voice. Torch-free.

`voices/NAME.safetensors` has four tensors: the codes and the mel of the reference clip as the flow
decoder sees them, the speaker vector, and the 16 kHz samples that the Thinker hears in its context
(contract sections A, E and G).
"""

import re
from collections.abc import Mapping
from pathlib import Path

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.headers import TensorHeader

VOICE_SUFFIX = ".safetensors"
VOICE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Names of voices are names of files: nothing else may pass."""

PROMPT_CODES = "prompt_codes"
PROMPT_MEL = "prompt_mel"
SPEAKER = "speaker"
REFERENCE = "reference_16khz"

CODE_RATE_HZ = 25
FRAMES_PER_CODE = 2
REFERENCE_RATE_HZ = 16_000
MAX_PROMPT_CODES = 150
"""6.0 s: the public vocoder cuts or pads the clip to that (contract E)."""
MAX_REFERENCE_SAMPLES = 30 * REFERENCE_RATE_HZ
"""The encoder hears the clip whole, within its position table (contract G)."""


def check_voice_header(
    path: Path, header: Mapping[str, TensorHeader], config: Token2WavConfig
) -> None:
    """Raises CheckpointError (invalid_voice) unless the four tensors fit each other and `config`.

    prompt_codes [P] I64, prompt_mel [2P, mel bins] F32, speaker [speaker size] F32,
    reference_16khz [samples] F32.
    """
    names = {PROMPT_CODES, PROMPT_MEL, SPEAKER, REFERENCE}
    if set(header) != names:
        raise _invalid(path, f"holds {sorted(header)}, expected {sorted(names)}")
    codes = header[PROMPT_CODES]
    if len(codes.shape) != 1 or not 3 < codes.shape[0] <= MAX_PROMPT_CODES:
        raise _invalid(path, f"{PROMPT_CODES} has shape {list(codes.shape)}")
    if codes.element_type != "I64":
        raise _invalid(path, f"{PROMPT_CODES} is {codes.element_type}, expected I64")
    count = codes.shape[0]
    expected = {
        PROMPT_MEL: (FRAMES_PER_CODE * count, config.mel_bins),
        SPEAKER: (config.speaker_dim,),
    }
    for name, shape in expected.items():
        if header[name].shape != shape:
            raise _invalid(path, f"{name} has shape {list(header[name].shape)}, not {list(shape)}")
    samples = header[REFERENCE].shape
    if len(samples) != 1 or samples[0] > MAX_REFERENCE_SAMPLES:
        raise _invalid(path, f"{REFERENCE} has shape {list(samples)}")
    for name in (PROMPT_MEL, SPEAKER, REFERENCE):
        if header[name].element_type != "F32":
            raise _invalid(path, f"{name} is {header[name].element_type}, expected F32")


def _invalid(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(CheckpointFault.INVALID_VOICE, str(path), reason)
