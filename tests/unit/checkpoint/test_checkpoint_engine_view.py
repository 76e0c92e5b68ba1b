"""The folders that vLLM takes for models."""

import json
from pathlib import Path

import pytest

from duplex_sidecar.checkpoint.config import write_config
from duplex_sidecar.checkpoint.engine_view import EngineModel, write_engine_view
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.presets import tiny_config

pytestmark = pytest.mark.unit


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_config(tiny_config(), folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def view(
    checkpoint: Path, model: EngineModel, *, max_model_len: int = 64, with_weights: bool = True
) -> Path:
    folder = checkpoint.parent / f"view-{model}"
    write_engine_view(
        model, checkpoint, folder, max_model_len=max_model_len, with_weights=with_weights
    )
    return folder


def write_index(checkpoint: Path, text: str) -> None:
    """Shards in place of the one file (which would be taken before them, as transformers does)."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(text)


def document(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def test_the_thinker_is_a_qwen3(checkpoint: Path) -> None:
    config = document(view(checkpoint, EngineModel.THINKER))
    assert config["architectures"] == ["DuplexThinker"]
    assert config["model_type"] == "qwen3"
    assert config["hidden_size"] == 256
    assert config["rope_theta"] == 1_000_000.0
    assert "tts_config" not in config


def test_the_talker_is_a_llama_over_codes(checkpoint: Path) -> None:
    config = document(view(checkpoint, EngineModel.TALKER))
    assert config["architectures"] == ["DuplexTalker"]
    assert config["vocab_size"] == 6562
    assert config["eos_token_id"] == 6561
    assert config["llm_dim"] == 256


def test_an_engine_may_be_longer_than_the_file_says(checkpoint: Path) -> None:
    config = document(view(checkpoint, EngineModel.TALKER, max_model_len=4096 + 32))
    assert config["max_position_embeddings"] == 4096 + 32


def test_weights_are_links_and_a_view_is_rewritten(checkpoint: Path) -> None:
    folder = view(checkpoint, EngineModel.THINKER)
    assert (folder / "model.safetensors").resolve() == checkpoint / "model.safetensors"
    assert (view(checkpoint, EngineModel.THINKER) / "model.safetensors").is_symlink()
    assert not list(view(checkpoint, EngineModel.THINKER, with_weights=False).glob("*.safetensors"))


def test_only_shards_with_own_weights_are_linked(checkpoint: Path) -> None:
    index = {"weight_map": {"llm.a": "one.safetensors", "tts.b": "two.safetensors"}}
    write_index(checkpoint, json.dumps(index))
    for name in ("one", "two"):
        (checkpoint / f"{name}.safetensors").touch()
    links = [path.name for path in view(checkpoint, EngineModel.TALKER).glob("*.safetensors")]
    assert links == ["two.safetensors"]


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("gone.safetensors", CheckpointFault.MISSING),
        ("../config.json", CheckpointFault.UNREADABLE),
    ],
)
def test_a_shard_that_is_not_there(checkpoint: Path, file: str, fault: CheckpointFault) -> None:
    write_index(checkpoint, json.dumps({"weight_map": {"llm.a": file}}))
    with pytest.raises(CheckpointError) as caught:
        view(checkpoint, EngineModel.THINKER)
    assert caught.value.fault is fault


def test_a_damaged_index(checkpoint: Path) -> None:
    write_index(checkpoint, "{")
    with pytest.raises(CheckpointError) as caught:
        view(checkpoint, EngineModel.THINKER)
    assert caught.value.fault is CheckpointFault.UNREADABLE


def test_one_file_is_taken_before_shards(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text("{")
    folder = view(checkpoint, EngineModel.THINKER)
    assert (folder / "model.safetensors").is_symlink()


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        view(checkpoint, EngineModel.TALKER)
    assert caught.value.fault is CheckpointFault.MISSING
    view(checkpoint, EngineModel.TALKER, with_weights=False)


def test_a_view_that_cannot_be_written(checkpoint: Path) -> None:
    (checkpoint.parent / "view-thinker").touch()
    with pytest.raises(CheckpointError) as caught:
        view(checkpoint, EngineModel.THINKER)
    assert caught.value.fault is CheckpointFault.NOT_WRITABLE
