"""The tiny checkpoint: every part of the real one in small, able to hold a conversation.

Random weights but for the Thinker's output rows, which are fitted (`lessons`). Made in well under a
minute on one core; the fitted rows are kept in a cache, so a second one takes a second or two.
"""

import hashlib
from pathlib import Path

import msgspec

from duplex_sidecar.checkpoint.behaviour import READOUT_NAME
from duplex_sidecar.checkpoint.config import CheckpointConfig
from duplex_sidecar.checkpoint.fit_cache import FittedReadout, fit_path, read_fit, write_fit
from duplex_sidecar.checkpoint.folder import Recipe, make_folder, write_tensors
from duplex_sidecar.checkpoint.layout import TOKENIZER_NAME, WEIGHTS_NAME, weight_shapes
from duplex_sidecar.checkpoint.lessons import Pupil, fingerprint, teach
from duplex_sidecar.checkpoint.parts import write_parts
from duplex_sidecar.checkpoint.presets import Shape, tiny_config
from duplex_sidecar.checkpoint.readout import FIT_VERSION
from duplex_sidecar.checkpoint.recording import recording_path
from duplex_sidecar.checkpoint.replies import SENTENCES
from duplex_sidecar.checkpoint.tokenizer import parse_tokenizer, train_tokenizer, vocabulary_of
from duplex_sidecar.checkpoint.weights import WEIGHTS_VERSION, transformer_tensor
from duplex_sidecar.checkpoint.weights_front_end import FRONT_END_VERSION

_LM_HEAD = "llm.lm_head.weight"


def make_tiny(folder: Path, seed: int = 0, *, cache_dir: Path | None = None) -> bool:
    """Make the tiny checkpoint. False: exactly this one was there already.

    cache_dir: where fitted rows are kept; None keeps none. Raises CheckpointError (not_writable,
    disk_full, fit_failed); then nothing is left behind.
    """
    config = tiny_config()
    tokenizer_data = train_tokenizer(config.thinker.vocab_size)
    inputs = hashlib.blake2b(digest_size=16)
    for part in (
        f"{WEIGHTS_VERSION}:{FIT_VERSION}:{FRONT_END_VERSION}".encode(),
        msgspec.json.encode(config),
        tokenizer_data,
        "\n".join(SENTENCES).encode(),
        recording_path().read_bytes(),
    ):
        inputs.update(part)

    def write(staging: Path) -> None:
        _write(staging, config, tokenizer_data, seed, cache_dir)

    return make_folder(folder, Recipe(Shape.TINY, seed, inputs.hexdigest()), write)


def _write(
    staging: Path,
    config: CheckpointConfig,
    tokenizer_data: bytes,
    seed: int,
    cache_dir: Path | None,
) -> None:
    """Everything but the marker."""
    voice = write_parts(staging, config, tokenizer_data, seed)
    weights = {
        name: transformer_tensor(name, shape, config, seed)
        for name, shape in weight_shapes(config).items()
    }
    tokenizer = parse_tokenizer(tokenizer_data)
    vocabulary = vocabulary_of(tokenizer, config.thinker.vocab_size, TOKENIZER_NAME)
    fitted = _fitted(Pupil(config, weights, tokenizer, vocabulary, voice), seed, cache_dir)
    weights[_LM_HEAD] = fitted.rows
    write_tensors(staging / WEIGHTS_NAME, weights)
    (staging / READOUT_NAME).write_bytes(msgspec.json.encode(fitted.behaviours))


def _fitted(pupil: Pupil, seed: int, cache_dir: Path | None) -> FittedReadout:
    """The fitted rows, from the cache if they are there."""
    if cache_dir is None:
        return teach(pupil, seed)
    path = fit_path(cache_dir, fingerprint(pupil, seed))
    cached = read_fit(path, tuple(pupil.weights[_LM_HEAD].shape))
    if cached is None:
        cached = teach(pupil, seed)
        write_fit(path, cached)
    return cached
