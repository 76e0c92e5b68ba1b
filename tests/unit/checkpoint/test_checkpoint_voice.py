"""Voice files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.voice import (
    Voice,
    load_voice,
    save_voice,
    seeded_voice,
    voice_names,
    voice_references,
)
from duplex_sidecar.checkpoint.voice_format import MAX_PROMPT_CODES

pytestmark = pytest.mark.unit

CONFIG = tiny_config().token2wav


def voice(name: str = "default", codes: int = 20) -> Voice:
    return seeded_voice(name, codes, 0, CONFIG)


def test_a_seeded_voice_fits_itself_and_is_the_same_each_time(tmp_path: Path) -> None:
    made = voice(codes=MAX_PROMPT_CODES)
    assert made.prompt_mel.shape == (300, 80)
    assert len(made.reference_16khz) == 6 * 16_000
    assert np.abs(made.reference_16khz).max() < 1
    save_voice(tmp_path, made)
    loaded = load_voice(tmp_path, "default", CONFIG)
    for field in ("prompt_codes", "prompt_mel", "speaker", "reference_16khz"):
        assert np.array_equal(getattr(loaded, field), getattr(made, field))
    again = voice(codes=MAX_PROMPT_CODES)
    assert np.array_equal(made.prompt_mel, again.prompt_mel)


def test_names_are_listed(tmp_path: Path) -> None:
    assert voice_names(tmp_path) == ()
    save_voice(tmp_path, voice("beata"))
    save_voice(tmp_path, voice("anna-2"))
    assert voice_names(tmp_path) == ("anna-2", "beata")


@pytest.mark.parametrize("name", ["", "nobody", "../default", "a/b", "A", "x" * 64, "default\n"])
def test_a_name_from_outside_never_leaves_the_folder(tmp_path: Path, name: str) -> None:
    save_voice(tmp_path, voice())
    (tmp_path / "default.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        load_voice(tmp_path, name, CONFIG)
    assert caught.value.fault is CheckpointFault.MISSING


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_mel": np.zeros((39, 80), np.float32)},
        {"prompt_mel": np.full((40, 80), np.nan, np.float32)},
        {"speaker": np.zeros(191, np.float32)},
        {"speaker": np.zeros(192, np.float64)},
        {"prompt_codes": np.full(20, 6561, np.int64)},
        {"prompt_codes": np.full(20, -1, np.int64)},
        {"prompt_codes": np.zeros(20, np.int32)},
        {"prompt_codes": np.zeros((20, 1), np.int64)},
        {"reference_16khz": np.zeros(31 * 16_000, np.float32)},
        {"reference_16khz": np.full(16_000, np.inf, np.float32)},
    ],
)
def test_a_voice_that_does_not_fit_is_refused(
    tmp_path: Path, changed: dict[str, np.ndarray]
) -> None:
    save_voice(tmp_path, replace(voice(), **changed))
    with pytest.raises(CheckpointError) as caught:
        load_voice(tmp_path, "default", CONFIG)
    assert caught.value.fault is CheckpointFault.INVALID_VOICE


def test_a_folder_of_voices_goes_before_the_checkpoints_own(tmp_path: Path) -> None:
    checkpoint, claim = tmp_path / "checkpoint", tmp_path / "claim"
    save_voice(checkpoint, voice())
    save_voice(checkpoint, voice("own"))
    voices_dir = save_voice(claim, voice(codes=40)).parent
    save_voice(claim, voice("more", codes=30))
    assert voice_references(checkpoint, voices_dir, CONFIG) == {
        "default": 40 * 640,
        "more": 30 * 640,
        "own": 20 * 640,
    }
    assert len(load_voice(checkpoint, "default", CONFIG, voices_dir).prompt_codes) == 40
    assert len(load_voice(checkpoint, "own", CONFIG, voices_dir).prompt_codes) == 20
    assert len(load_voice(checkpoint, "default", CONFIG).prompt_codes) == 20
    for name in ("../voices/default", "more/../more", "..", "/more"):
        with pytest.raises(CheckpointError) as caught:
            load_voice(checkpoint, name, CONFIG, voices_dir)
        assert caught.value.fault is CheckpointFault.MISSING


def test_a_broken_file_among_the_voices_is_no_voice_and_stops_no_start(tmp_path: Path) -> None:
    save_voice(tmp_path / "checkpoint", voice())
    voices_dir = save_voice(tmp_path, voice("good")).parent
    (voices_dir / "bad.safetensors").write_bytes(b"no header")
    save_voice(tmp_path, replace(voice("other"), speaker=np.zeros(3, np.float32)))
    known = voice_references(tmp_path / "checkpoint", voices_dir, CONFIG)
    assert set(known) == {"default", "good"}


def test_a_voice_with_other_tensors_is_refused(tmp_path: Path) -> None:
    path = save_voice(tmp_path, voice())
    tensors = load_file(path)
    save_file(tensors | {"more": np.zeros(1, np.float32)}, path)
    with pytest.raises(CheckpointError, match="more"):
        load_voice(tmp_path, "default", CONFIG)
    path.write_bytes(b"no header")
    with pytest.raises(CheckpointError) as caught:
        load_voice(tmp_path, "default", CONFIG)
    assert caught.value.fault is CheckpointFault.UNREADABLE
