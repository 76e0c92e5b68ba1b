"""Voice files: read, check and write them. NumPy only, so that the sidecar can read one too."""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from duplex_api.given_voices import is_given
from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.headers import read_safetensors_header
from duplex_sidecar.checkpoint.layout import VOICES_FOLDER
from duplex_sidecar.checkpoint.voice_format import (
    CODE_RATE_HZ,
    FRAMES_PER_CODE,
    PROMPT_CODES,
    PROMPT_MEL,
    REFERENCE,
    REFERENCE_RATE_HZ,
    SPEAKER,
    VOICE_NAME,
    VOICE_SUFFIX,
    check_voice_header,
)
from duplex_sidecar.checkpoint.voice_origin import (
    VoiceOrigin,
    check_origin,
    origin_metadata,
)

log = logging.getLogger(__name__)

DEFAULT_VOICE = "default"


@dataclass(frozen=True, slots=True)
class Voice:
    """One voice as the stages need it (contract section E).

    prompt_codes [P] int64, prompt_mel [2P, mel bins] float32 (log mel, 50 frames a second),
    speaker [speaker size] float32, reference_16khz [samples] float32 in -1..1.
    """

    name: str
    prompt_codes: NDArray[np.int64]
    prompt_mel: NDArray[np.float32]
    speaker: NDArray[np.float32]
    reference_16khz: NDArray[np.float32]


def voice_names(folder: Path) -> tuple[str, ...]:
    """Names of the voices of a checkpoint, sorted."""
    return _names_in(folder / VOICES_FOLDER)


def voice_references(
    folder: Path, voices_dir: Path | None, config: Token2WavConfig
) -> dict[str, int]:
    """Every voice that can be asked for, with the length of its reference clip at 16 kHz (0: none),
    by its file's header. Raises CheckpointError (missing, unreadable) for the checkpoint's own
    files; what is wrong in `voices_dir` is logged, and no voice."""
    found: dict[str, int] = {}
    for name in voice_names(folder):
        found[name] = _reference_samples(_file_of(folder, None, name))
    for name in () if voices_dir is None else _names_in(voices_dir):
        path = _file_of(folder, voices_dir, name)
        try:
            check_voice_header(path, read_safetensors_header(path), config)
            check_origin(path, folder)
            found[name] = _reference_samples(path)
        except CheckpointError as error:
            found.pop(name, None)
            log.warning("voice is left out", extra={"fields": {"voice": name, "why": str(error)}})
    return found


def load_voice(
    folder: Path,
    name: str,
    config: Token2WavConfig,
    voices_dir: Path | None = None,
    given_dir: Path | None = None,
) -> Voice:
    """VOICES_DIR/NAME.safetensors where it is there, else FOLDER/voices/NAME.safetensors; of a
    voice that was given with a session GIVEN_DIR/NAME.safetensors. Raises CheckpointError (missing,
    unreadable, invalid_voice).

    `name` may come from a client: anything but a plain voice name is `missing`.
    """
    if not VOICE_NAME.fullmatch(name):
        raise CheckpointError(CheckpointFault.MISSING, str(folder), f"no voice {name!r}")
    if given_dir is not None and is_given(name):
        return read_voice(given_dir / f"{name}{VOICE_SUFFIX}", name, folder, config)
    return read_voice(_file_of(folder, voices_dir, name), name, folder, config)


def read_voice(path: Path, name: str, folder: Path, config: Token2WavConfig) -> Voice:
    """Of any file, for the checkpoint in `folder`. Raises CheckpointError (missing, unreadable,
    invalid_voice)."""
    check_voice_header(path, read_safetensors_header(path), config)
    check_origin(path, folder)
    tensors = load_file(path)
    voice = Voice(
        name=name,
        prompt_codes=tensors[PROMPT_CODES],
        prompt_mel=tensors[PROMPT_MEL],
        speaker=tensors[SPEAKER],
        reference_16khz=tensors[REFERENCE],
    )
    _check_values(path, voice, config)
    return voice


def _names_in(folder: Path) -> tuple[str, ...]:
    paths = folder.glob(f"*{VOICE_SUFFIX}")
    return tuple(sorted(path.stem for path in paths if VOICE_NAME.fullmatch(path.stem)))


def _file_of(folder: Path, voices_dir: Path | None, name: str) -> Path:
    """name: a voice name, so that the file is in one of the two folders."""
    file = f"{name}{VOICE_SUFFIX}"
    if voices_dir is not None and (voices_dir / file).is_file():
        return voices_dir / file
    return folder / VOICES_FOLDER / file


def _reference_samples(path: Path) -> int:
    clip = read_safetensors_header(path).get(REFERENCE)
    return clip.shape[0] if clip is not None and clip.shape else 0


def save_voice(folder: Path, voice: Voice) -> Path:
    """Write FOLDER/voices/NAME.safetensors and return its path."""
    path = folder / VOICES_FOLDER / f"{voice.name}{VOICE_SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_voice(path, voice)
    return path


def write_voice(path: Path, voice: Voice, origin: VoiceOrigin | None = None) -> None:
    """Write a voice file, whole or not at all. The same voice gives the same bytes. Raises OSError.

    origin: what it was made with and for; none where nobody knows.
    """
    tensors = {
        PROMPT_CODES: voice.prompt_codes,
        PROMPT_MEL: voice.prompt_mel,
        SPEAKER: voice.speaker,
        REFERENCE: voice.reference_16khz,
    }
    data = save(tensors, None if origin is None else origin_metadata(origin))
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def seeded_voice(name: str, codes: int, seed: int, config: Token2WavConfig) -> Voice:
    """A made-up voice for made-up weights: `codes` prompt codes of `codes / 25` seconds.

    What a front end says of a clip would mean nothing to random weights. The reference clip is a
    hum: three harmonics of 120 Hz under a slow swell, so that an encoder has something to hear.
    """
    random = np.random.default_rng(seed)
    seconds = codes / CODE_RATE_HZ
    time = np.arange(round(seconds * REFERENCE_RATE_HZ)) / REFERENCE_RATE_HZ
    hum = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in (1, 2, 3))
    swell = 0.5 - 0.5 * np.cos(2 * np.pi * 1.5 * time)
    return Voice(
        name=name,
        prompt_codes=random.integers(0, config.codebook_size, codes, dtype=np.int64),
        prompt_mel=random.standard_normal(
            (FRAMES_PER_CODE * codes, config.mel_bins), dtype=np.float32
        ),
        speaker=random.standard_normal(config.speaker_dim, dtype=np.float32),
        reference_16khz=np.asarray(0.2 * hum * swell, dtype=np.float32),
    )


def _check_values(path: Path, voice: Voice, config: Token2WavConfig) -> None:
    """Values that would otherwise fail inside a stage."""
    codes = voice.prompt_codes
    if codes.min() < 0 or codes.max() >= config.codebook_size:
        reason = f"{PROMPT_CODES} are outside 0..{config.codebook_size - 1}"
        raise CheckpointError(CheckpointFault.INVALID_VOICE, str(path), reason)
    for name, values in (
        (PROMPT_MEL, voice.prompt_mel),
        (SPEAKER, voice.speaker),
        (REFERENCE, voice.reference_16khz),
    ):
        if not np.isfinite(values).all():
            raise CheckpointError(CheckpointFault.INVALID_VOICE, str(path), f"{name} is not finite")
