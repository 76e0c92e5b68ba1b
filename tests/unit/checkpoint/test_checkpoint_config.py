"""config.json: what is read, what is refused and how that is told."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplex_sidecar.checkpoint.config import (
    MAX_CONFIG_BYTES,
    CheckpointConfig,
    parse_config,
    read_config,
    write_config,
)
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.presets import full_config, tiny_config

pytestmark = pytest.mark.unit


def document(tmp_path: Path, config: CheckpointConfig) -> dict[str, Any]:
    write_config(config, tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("config", [tiny_config(), full_config(), full_config(2)])
def test_what_is_written_is_read_back(tmp_path: Path, config: CheckpointConfig) -> None:
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config


def test_public_file_without_our_own_fields(tmp_path: Path) -> None:
    raw = document(tmp_path, full_config())
    del raw["token2wav_config"]
    raw["dtype"] = raw.pop("torch_dtype")
    raw["auto_map"] = {"AutoModel": "modeling.Model"}
    assert parse_config(json.dumps(raw).encode()) == full_config()


def test_real_shapes_are_those_of_the_contract() -> None:
    config = full_config()
    thinker, talker = config.thinker, config.talker
    assert (thinker.num_hidden_layers, thinker.hidden_size, thinker.head_dim) == (36, 4096, 128)
    kv_bytes = 2 * thinker.num_hidden_layers * thinker.num_key_value_heads * thinker.head_dim * 2
    assert kv_bytes == 147_456
    assert 2 * talker.num_hidden_layers * talker.hidden_size * 2 == 61_440
    assert talker.end_code == 6561


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("hidden_size",), "many", "$.hidden_size"),
        (("num_hidden_layers",), 0, "$.num_hidden_layers"),
        (("audio_config", "d_model"), None, "$.audio_config.d_model"),
        (("audio_config", "d_model"), 128, "encoder_ffn_dim"),
        (("audio_config", "encoder_attention_heads"), 3, "audio_config.d_model"),
        (("vision_config", "image_size"), 981, "vision_config.image_size"),
        (("tts_config", "num_vq"), 4, "$.tts_config.num_vq"),
        (("tts_config", "llm_dim"), 255, "tts_config.llm_dim"),
        (("tts_config", "num_audio_tokens"), 6561, "num_audio_tokens"),
        (("tts_config", "audio_bos_token_id"), 1024, "audio_bos_token_id"),
        (("token2wav_config", "vocoder_size"), 60, "vocoder_size"),
        (("torch_dtype",), "int8", "$.torch_dtype"),
        (("attention_bias",), True, "attention_bias"),
        (("num_key_value_heads",), 3, "num_attention_heads"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, path: tuple[str, ...], value: object, told: str
) -> None:
    raw = document(tmp_path, tiny_config())
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointError) as caught:
        parse_config(json.dumps(raw).encode(), "config.json")
    assert caught.value.fault is CheckpointFault.INVALID_CONFIG
    assert told in caught.value.reason


@pytest.mark.parametrize("part", ["audio_config", "vision_config", "tts_config", "vocab_size"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    raw = document(tmp_path, tiny_config())
    del raw[part]
    with pytest.raises(CheckpointError, match=part):
        parse_config(json.dumps(raw).encode())


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as missing:
        read_config(tmp_path)
    assert missing.value.fault is CheckpointFault.MISSING
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError) as folder:
        read_config(tmp_path)
    assert folder.value.fault is CheckpointFault.UNREADABLE
    for data in (b"", b"{", b"[]", b"\xff", b" " * (MAX_CONFIG_BYTES + 1)):
        with pytest.raises(CheckpointError) as caught:
            parse_config(data)
        assert caught.value.fault is CheckpointFault.INVALID_CONFIG


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        tiny_config().audio_pool_step = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert msgspec.to_builtins(tiny_config())["talker"]["llm_dim"] == 256
