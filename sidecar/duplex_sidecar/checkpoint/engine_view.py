"""A folder that vLLM can take for a model of its own: config.json and links to the weight files.

vLLM serves one plain language model per engine. So each engine gets a view of the checkpoint with
the config of its part (Thinker: Qwen3, Talker: Llama over codec codes), the name of our class in
`architectures`, and links to just the files that hold weights of that part. Torch-free.
"""

import json
from enum import StrEnum
from pathlib import Path

import msgspec

from duplex_sidecar.checkpoint.config import CheckpointConfig, read_config
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.headers import read_index
from duplex_sidecar.checkpoint.layout import INDEX_NAME, WEIGHTS_NAME

THINKER_ARCHITECTURE = "DuplexThinker"
TALKER_ARCHITECTURE = "DuplexTalker"
THINKER_PREFIX = "llm."
TALKER_PREFIX = "tts."


class EngineModel(StrEnum):
    """The parts of a checkpoint that an engine serves."""

    THINKER = "thinker"
    TALKER = "talker"


def write_engine_view(
    model: EngineModel, checkpoint: Path, view: Path, *, max_model_len: int, with_weights: bool
) -> CheckpointConfig:
    """Write (or rewrite) the folder `view`. with_weights=False is for random weights of the shape.

    Returns the checkpoint's config. Raises CheckpointError (missing, unreadable, invalid_config,
    not_writable).
    """
    config = read_config(checkpoint)
    document = _thinker(config) if model is EngineModel.THINKER else _talker(config)
    # Rotary positions have no table: an engine may well be longer than the number in the file,
    # and is, by the margin in which a unit admitted at the limit ends.
    document["max_position_embeddings"] = max(
        max_model_len, int(str(document["max_position_embeddings"]))
    )
    prefix = THINKER_PREFIX if model is EngineModel.THINKER else TALKER_PREFIX
    files = _weight_files(checkpoint, prefix) if with_weights else ()
    try:
        view.mkdir(parents=True, exist_ok=True)
        for old in view.glob("*.safetensors"):
            old.unlink()
        for file in files:
            (view / file.name).symlink_to(file.resolve())
        (view / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(CheckpointFault.NOT_WRITABLE, str(view), reason) from None
    return config


def _thinker(config: CheckpointConfig) -> dict[str, object]:
    thinker = config.thinker
    return {
        "architectures": [THINKER_ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": config.element_type,
        **msgspec.to_builtins(thinker),
    }


def _talker(config: CheckpointConfig) -> dict[str, object]:
    talker = config.talker
    return {
        "architectures": [TALKER_ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": config.element_type,
        # Every token id of the engine is a codec code: text enters as condition rows only.
        "vocab_size": talker.num_audio_tokens,
        # Llama's defaults name ids that are codes here; units end by their own stop id.
        "bos_token_id": None,
        "eos_token_id": talker.end_code,
        "hidden_size": talker.hidden_size,
        "intermediate_size": talker.intermediate_size,
        "num_hidden_layers": talker.num_hidden_layers,
        "num_attention_heads": talker.num_attention_heads,
        "num_key_value_heads": talker.num_key_value_heads,
        "max_position_embeddings": talker.max_position_embeddings,
        "rope_theta": talker.rope_theta,
        "rms_norm_eps": talker.rms_norm_eps,
        "num_text_tokens": talker.num_text_tokens,
        "llm_dim": talker.llm_dim,
        "audio_bos_token_id": talker.audio_bos_token_id,
    }


def _weight_files(checkpoint: Path, prefix: str) -> tuple[Path, ...]:
    """The safetensors files that hold tensors of the prefix: the one file, else the shards."""
    names = {WEIGHTS_NAME}
    if not (checkpoint / WEIGHTS_NAME).exists() and (checkpoint / INDEX_NAME).exists():
        weight_map = read_index(checkpoint / INDEX_NAME)
        names = {file for name, file in weight_map.items() if name.startswith(prefix)}
    files = tuple(checkpoint / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise CheckpointError(CheckpointFault.MISSING, str(file), "no such weight file")
    return files
