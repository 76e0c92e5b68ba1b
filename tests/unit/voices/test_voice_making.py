"""A clip becomes a voice file that the product takes."""

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.layout import FLOW_NAME
from duplex_sidecar.checkpoint.layout_front_end import (
    FRONT_END_NAMES,
    SPEAKER_MODEL_NAME,
    TOKENIZER_MODEL_NAME,
)
from duplex_sidecar.checkpoint.onnx_graph import Graph
from duplex_sidecar.checkpoint.presets import tiny_config
from duplex_sidecar.checkpoint.recording import recording_path
from duplex_sidecar.checkpoint.voice import Voice, load_voice, voice_references, write_voice
from duplex_sidecar.checkpoint.voice_origin import VoiceOrigin, origin_of, read_origin
from duplex_sidecar.cli.voice import make, show
from duplex_sidecar.voices.clip import Clip, read_clip
from duplex_sidecar.voices.errors import VoiceError, VoiceFault
from duplex_sidecar.voices.features import prompt_mel
from duplex_sidecar.voices.making import make_voice

pytestmark = pytest.mark.unit

CONFIG = tiny_config().token2wav


def clip(start_s: float = 0.0, length_s: float = 7.5) -> Clip:
    return read_clip(recording_path(), start_s, length_s)


def voice(checkpoint: Path, heard: Clip, name: str = "partner") -> Voice:
    return make_voice(name, heard, checkpoint, CONFIG)


def same(one: Voice, other: Voice) -> bool:
    names = [field.name for field in fields(Voice) if field.name != "name"]
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_what_a_voice_is_made_of(checkpoint: Path) -> None:
    """The first 6 s for the vocoder, all of it for the Thinker."""
    made = voice(checkpoint, clip())
    assert made.prompt_codes.shape == (150,)
    assert made.prompt_mel.shape == (300, 80)
    assert made.speaker.shape == (192,)
    assert len(made.reference_16khz) == 7.5 * 16_000
    assert len(set(made.prompt_codes.tolist())) > 20
    shorter = voice(checkpoint, clip(length_s=6.5))
    assert len(shorter.reference_16khz) == 6.5 * 16_000
    # The resampler sees a little of what follows, at the very end of the 6 s.
    assert np.array_equal(shorter.prompt_codes[:-1], made.prompt_codes[:-1])
    assert np.abs(shorter.prompt_mel[:-3] - made.prompt_mel[:-3]).max() < 1e-6


def test_a_short_clip_is_padded_with_silence(checkpoint: Path) -> None:
    heard = clip(0.5, 1.0)
    made = voice(checkpoint, heard)
    assert made.prompt_codes.shape == (150,)
    assert len(made.reference_16khz) == 16_000
    silence = prompt_mel(np.zeros(24_000, np.float32), 80)
    assert np.abs(made.prompt_mel[55:] - silence[0]).max() < 1e-6
    assert np.abs(made.prompt_mel[:45] - silence[0]).max() > 3


def test_other_speech_is_another_voice(checkpoint: Path) -> None:
    one, other = voice(checkpoint, clip()), voice(checkpoint, clip(8.0))
    assert (one.prompt_codes != other.prompt_codes).mean() > 0.5
    assert np.abs(one.speaker - other.speaker).max() > 0.01


def test_the_file_is_the_same_each_time_and_loads_as_it_was_made(
    checkpoint: Path, tmp_path: Path
) -> None:
    origin = origin_of(checkpoint)
    paths = [tmp_path / folder / "partner.safetensors" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        write_voice(path, voice(checkpoint, clip()), origin)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["partner.safetensors"]
    loaded = load_voice(checkpoint, "partner", CONFIG, tmp_path / "a")
    assert same(loaded, voice(checkpoint, clip()))
    assert read_origin(paths[0]) == origin
    assert voice_references(checkpoint, tmp_path / "a", CONFIG) == {"partner": 120_000}


def test_a_voice_of_another_checkpoint_is_none(checkpoint: Path, tmp_path: Path) -> None:
    """Its codes would be heard, and would be nobody's."""
    voices_dir = tmp_path / "voices"
    voices_dir.mkdir()
    made, origin = voice(checkpoint, clip()), origin_of(checkpoint)
    write_voice(voices_dir / "partner.safetensors", made, origin)
    write_voice(voices_dir / "elsewhere.safetensors", made)
    (checkpoint / FLOW_NAME).write_bytes(b"another flow decoder")
    assert origin_of(checkpoint).checkpoint != origin.checkpoint
    assert origin_of(checkpoint).front_end == origin.front_end
    with pytest.raises(CheckpointError, match="another checkpoint") as refused:
        load_voice(checkpoint, "partner", CONFIG, voices_dir)
    assert refused.value.fault is CheckpointFault.INVALID_VOICE
    # One that does not say where it is from is taken on trust.
    assert set(voice_references(checkpoint, voices_dir, CONFIG)) == {"elsewhere"}


def test_an_origin_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "partner.safetensors"
    write_voice(path, voice(checkpoint, clip()), VoiceOrigin("a", "b"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{\\"checkpoint\\"', b'[\\"checkpoint\\"'))
    assert path.read_bytes() != data
    with pytest.raises(CheckpointError) as refused:
        load_voice(checkpoint, "partner", CONFIG, tmp_path)
    assert refused.value.fault is CheckpointFault.INVALID_VOICE


def fault_of(checkpoint: Path) -> VoiceFault:
    with pytest.raises(VoiceError) as refused:
        voice(checkpoint, clip())
    return refused.value.fault


@pytest.mark.parametrize("name", FRONT_END_NAMES)
def test_a_checkpoint_without_a_front_end(checkpoint: Path, name: Path) -> None:
    (checkpoint / name).unlink()
    assert fault_of(checkpoint) is VoiceFault.NO_FRONT_END


def test_an_installation_without_the_runtime(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert fault_of(checkpoint) is VoiceFault.NO_RUNTIME


def tokenizer(checkpoint: Path, codes: np.ndarray, kind: str = "Identity") -> None:
    """In place of the tokenizer one that always gives the same."""
    graph = Graph("constant")
    graph.takes("feats", np.float32, (1, 128, "frames"))
    graph.takes("feats_length", np.int64, (1,))
    graph.node("codes", kind, graph.constant("always", codes[None].astype(np.int64)))
    graph.gives("codes", np.int64, (1, "count"))
    (checkpoint / TOKENIZER_MODEL_NAME).write_bytes(graph.encode())


def test_a_front_end_that_gives_no_voice(checkpoint: Path) -> None:
    tokenizer(checkpoint, np.arange(150))
    assert np.array_equal(voice(checkpoint, clip()).prompt_codes, np.arange(150))
    for codes in (np.arange(149), np.arange(151), np.arange(150) - 1, 6_412 + np.arange(150)):
        tokenizer(checkpoint, codes)
        assert fault_of(checkpoint) is VoiceFault.FRONT_END_FAILED
    tokenizer(checkpoint, np.arange(150), "NoSuchOperator")
    assert fault_of(checkpoint) is VoiceFault.FRONT_END_FAILED


def test_a_speaker_model_that_fails_on_the_clip(checkpoint: Path) -> None:
    graph = Graph("fails")
    graph.takes("input", np.float32, (1, "frames", 80))
    weight = graph.constant("weight", np.zeros((7, 192), np.float32))
    graph.node("output", "MatMul", "input", weight)
    graph.gives("output", np.float32, (1, 192))
    (checkpoint / SPEAKER_MODEL_NAME).write_bytes(graph.encode())
    assert fault_of(checkpoint) is VoiceFault.FRONT_END_FAILED


# --- the command ----------------------------------------------------------------------------------


def test_the_verbs(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, output = recording_path(), tmp_path / "partner.safetensors"
    assert make(recording, checkpoint=checkpoint, output=output, length_s=6) == 0
    told = capsys.readouterr().out
    assert "150 prompt codes (6 s), a clip of 6.00 s" in told
    assert origin_of(checkpoint).checkpoint in told
    assert show(output, checkpoint=checkpoint) == 0
    assert capsys.readouterr().out == told
    before = output.read_bytes()
    assert make(recording, checkpoint=checkpoint, output=output) == 1
    assert "clip_too_long" in capsys.readouterr().out
    assert output.read_bytes() == before


def test_what_the_verbs_refuse(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, output = recording_path(), tmp_path / "partner.safetensors"
    names = ("partner.bin", "Partner.safetensors", "a b.safetensors", "given-1.safetensors")
    for name in (*names, ".safetensors"):
        named = tmp_path / name
        assert make(recording, checkpoint=checkpoint, output=named, length_s=6) == 2
    elsewhere = tmp_path / "nowhere" / output.name
    assert make(recording, checkpoint=checkpoint, output=elsewhere, length_s=6) == 2
    assert "No such file" in capsys.readouterr().out
    assert make(recording, checkpoint=tmp_path, output=output, length_s=6) == 2
    (checkpoint / SPEAKER_MODEL_NAME).unlink()
    assert make(recording, checkpoint=checkpoint, output=output, length_s=6) == 2
    assert "no_front_end" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert show(output, checkpoint=checkpoint) == 2
