"""The report: every difference of a checkpoint from its layout, from headers alone."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.folder import write_state_dict
from duplex_sidecar.checkpoint.headers import TensorHeader, read_state_dict_header
from duplex_sidecar.checkpoint.layout import (
    FLOW_NAME,
    HIFT_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    weight_shapes,
)
from duplex_sidecar.checkpoint.layout_front_end import SPEAKER_MODEL_NAME, TOKENIZER_MODEL_NAME
from duplex_sidecar.checkpoint.parts import write_parts
from duplex_sidecar.checkpoint.presets import TINY_VOCAB_SIZE, tiny_config
from duplex_sidecar.checkpoint.report import Problem, make_report, require_complete
from duplex_sidecar.checkpoint.tokenizer import train_tokenizer

pytestmark = pytest.mark.unit

CONFIG = tiny_config()


@cache
def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in weight_shapes(CONFIG).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of zeros."""
    write_parts(tmp_path, CONFIG, train_tokenizer(TINY_VOCAB_SIZE), 0)
    save_file(zeros(), tmp_path / WEIGHTS_NAME)
    return tmp_path


def found(folder: Path) -> list[tuple[str, str, Problem]]:
    return [(f.file, f.name, f.problem) for f in make_report(folder).findings]


def test_a_whole_checkpoint_has_no_findings(folder: Path) -> None:
    report = make_report(folder)
    assert report.complete
    assert report.tensors > len(zeros())
    assert set(report.files) == {
        WEIGHTS_NAME,
        str(FLOW_NAME),
        str(HIFT_NAME),
        str(TOKENIZER_MODEL_NAME),
        str(SPEAKER_MODEL_NAME),
        "voices/default.safetensors",
        "tokenizer.json",
    }
    assert require_complete(folder) == CONFIG


def test_a_checkpoint_serves_without_a_front_end_but_not_with_a_wrong_one(folder: Path) -> None:
    tokenizer, speaker = folder / TOKENIZER_MODEL_NAME, folder / SPEAKER_MODEL_NAME
    right = tokenizer.read_bytes()
    tokenizer.unlink()
    report = make_report(folder)
    assert report.complete
    assert [str(TOKENIZER_MODEL_NAME) in note for note in report.notes] == [True]
    tokenizer.write_bytes(speaker.read_bytes())
    assert found(folder) == [(str(TOKENIZER_MODEL_NAME), "", Problem.BAD_FILE)]
    assert "takes 1 inputs, expected 2" in make_report(folder).findings[0].detail
    tokenizer.write_bytes(right[: len(right) // 2])
    assert found(folder) == [(str(TOKENIZER_MODEL_NAME), "", Problem.BAD_FILE)]
    tokenizer.write_bytes(right)
    assert make_report(folder).notes == ()


def test_all_differences_are_told_at_once(folder: Path) -> None:
    tensors = dict(zeros())
    del tensors["apm.conv1.bias"]
    del tensors["tts.projector_spk.linear1.bias"]
    tensors["tts.model.embed_tokens.weight"] = torch.zeros(7, 128)
    tensors["llm.model.norm.weight"] = torch.zeros(255)
    tensors["vpm.post_layernorm.bias"] = torch.zeros(48, dtype=torch.int64)
    tensors["llm.surplus"] = torch.zeros(1)
    save_file(tensors, folder / WEIGHTS_NAME)
    assert set(found(folder)) == {
        (WEIGHTS_NAME, "apm.conv1.bias", Problem.MISSING),
        (WEIGHTS_NAME, "llm.model.norm.weight", Problem.MISSHAPED),
        (WEIGHTS_NAME, "vpm.post_layernorm.bias", Problem.WRONG_TYPE),
        (WEIGHTS_NAME, "llm.surplus", Problem.UNEXPECTED),
    }
    with pytest.raises(CheckpointError, match=r"shape \[255\], expected \[256\]") as caught:
        require_complete(folder)
    assert caught.value.fault is CheckpointFault.SHAPE_MISMATCH


def test_a_long_list_is_cut_in_the_error_only(folder: Path) -> None:
    save_file({"llm.model.norm.weight": torch.zeros(256)}, folder / WEIGHTS_NAME)
    count = len(make_report(folder).findings)
    assert count > 100
    with pytest.raises(CheckpointError, match=f"and {count - 5} more"):
        require_complete(folder)


def _shards(folder: Path) -> dict[str, str]:
    """The same weights in two shards."""
    (folder / WEIGHTS_NAME).unlink()
    names = sorted(zeros())
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: zeros()[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_are_followed(folder: Path) -> None:
    _shards(folder)
    assert make_report(folder).complete
    (folder / "b.safetensors").unlink()
    findings = found(folder)
    assert ("b.safetensors", "", Problem.BAD_FILE) in findings
    assert len(findings) > 50


def test_an_index_that_disagrees_with_its_shards(folder: Path) -> None:
    weight_map = _shards(folder)
    name = "llm.model.norm.weight"
    weight_map[name] = "b.safetensors" if weight_map[name] == "a.safetensors" else "a.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert {(name_, problem) for _, name_, problem in found(folder)} == {
        (name, Problem.MISSING),
        (name, Problem.UNEXPECTED),
    }


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": "../other.safetensors"}}'])
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / WEIGHTS_NAME).unlink()
    (folder / INDEX_NAME).write_text(text)
    assert found(folder) == [(INDEX_NAME, "", Problem.BAD_FILE)]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _long_header(path: Path) -> None:
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")


def _no_json(path: Path) -> None:
    path.write_bytes((2).to_bytes(8, "little") + b"[}")


def _wrong_entry(path: Path) -> None:
    header = b'{"llm.x": {"dtype": 1}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("spoil", [_truncate, _empty, _long_header, _no_json, _wrong_entry])
def test_a_damaged_weight_file(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder / WEIGHTS_NAME)
    assert found(folder) == [(WEIGHTS_NAME, "", Problem.BAD_FILE)]


def test_parts_that_are_absent(folder: Path) -> None:
    for path in (WEIGHTS_NAME, str(FLOW_NAME), str(HIFT_NAME), "tokenizer.json"):
        (folder / path).unlink()
    (folder / "voices/default.safetensors").unlink()
    assert {(file, problem) for file, _, problem in found(folder)} == {
        (path, Problem.BAD_FILE)
        for path in (WEIGHTS_NAME, str(FLOW_NAME), str(HIFT_NAME), "tokenizer.json", "voices")
    }


def test_state_dicts_are_compared_too(folder: Path) -> None:
    state = torch.load(folder / FLOW_NAME, weights_only=True)
    state["surplus"] = state.pop("encoder_proj.bias")
    write_state_dict(folder / FLOW_NAME, state)
    assert {(name, problem) for _, name, problem in found(folder)} == {
        ("surplus", Problem.UNEXPECTED),
        ("encoder_proj.bias", Problem.MISSING),
    }


def test_half_precision_and_parameters_in_a_state_dict(tmp_path: Path) -> None:
    state = {
        "a": torch.nn.Parameter(torch.zeros(2, 3)),
        "b": torch.zeros(4, dtype=torch.bfloat16),
    }
    write_state_dict(tmp_path / "x.pt", state)
    assert read_state_dict_header(tmp_path / "x.pt") == {
        "a": TensorHeader("Float", (2, 3)),
        "b": TensorHeader("BFloat16", (4,)),
    }


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("content", [_Evil(), {"a": 1}, [1]])
def test_a_state_dict_that_is_something_else_runs_nothing(
    tmp_path: Path, content: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(content))
    path = tmp_path / "x.pt"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError) as caught:
        read_state_dict_header(path)
    assert caught.value.fault is CheckpointFault.UNREADABLE
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("data", [b"", b"PK", pickle.dumps({"a": 1})])
def test_a_file_that_is_no_archive(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_state_dict_header(path)
    assert caught.value.fault is CheckpointFault.UNREADABLE


def test_without_a_config_nothing_can_be_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        make_report(tmp_path)
    assert caught.value.fault is CheckpointFault.MISSING


def test_a_tokenizer_larger_than_the_model(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(
        train_tokenizer(TINY_VOCAB_SIZE, tuple(range(2000, 2022)))
    )
    assert found(folder) == [("tokenizer.json", "", Problem.BAD_FILE)]
