"""The tiny checkpoint, made from nothing: it behaves, it is whole, and published code agrees."""

import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from duplex_sidecar.checkpoint.behaviour import (
    LEAST_GAP,
    LEAST_LISTENS,
    LEAST_SPEAKS,
    LEAST_TURN_ENDS,
    read_behaviours,
)
from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.engine_view import EngineModel, write_engine_view
from duplex_sidecar.checkpoint.layout import WEIGHTS_NAME, encoder_shape
from duplex_sidecar.checkpoint.plain_thinker import PlainThinker
from duplex_sidecar.checkpoint.recording import hear, read_recording, recording_path
from duplex_sidecar.checkpoint.report import make_report, require_complete
from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.checkpoint.tokenizer import load_vocabulary, read_tokenizer
from duplex_sidecar.checkpoint.voice import load_voice, voice_names
from duplex_sidecar.cli.checkpoint import make, report
from duplex_sidecar.stages.encoder.audio import AudioEncoder
from duplex_sidecar.stages.encoder.weights import build, read_weights

pytestmark = pytest.mark.integration

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    """Made without any cache: the fit itself is under test."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    began = time.process_time()
    assert make_tiny(folder, cache_dir=cache_dir)
    assert time.process_time() - began < 60
    return folder


def test_it_is_complete(tiny: Path) -> None:
    found = make_report(tiny)
    assert found.findings == ()
    assert require_complete(tiny) == read_config(tiny)
    assert load_vocabulary(tiny).size == read_config(tiny).thinker.vocab_size
    assert voice_names(tiny) == ("default",)
    assert len(load_voice(tiny, "default", read_config(tiny).token2wav).prompt_codes) == 150
    size_bytes = sum(path.stat().st_size for path in tiny.rglob("*") if path.is_file())
    assert size_bytes < 40e6


def test_it_listens_speaks_and_ends_turns_in_every_window_mode(tiny: Path) -> None:
    behaviours = read_behaviours(tiny)
    assert {"off", "basic", "context"} <= {behaviour.scene for behaviour in behaviours}
    for behaviour in behaviours:
        assert behaviour.units == 120
        assert behaviour.listens >= LEAST_LISTENS
        assert behaviour.speaks >= LEAST_SPEAKS
        assert behaviour.turn_ends >= LEAST_TURN_ENDS
        assert behaviour.capped_units == 0
        assert behaviour.least_gap is None or behaviour.least_gap >= LEAST_GAP


def test_the_same_again_is_kept_and_a_copy_comes_from_the_cache(
    tiny: Path, cache_dir: Path, tmp_path: Path
) -> None:
    assert not make_tiny(tiny, cache_dir=cache_dir)
    copy = tmp_path / "copy"
    began = time.process_time()
    assert make_tiny(copy, cache_dir=cache_dir)
    assert time.process_time() - began < 5
    for path in tiny.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (copy / path.relative_to(tiny)).read_bytes(), path


def test_transformers_computes_the_same(tiny: Path, tmp_path: Path) -> None:
    """Hidden states and logits of a real stretch of the recording, within 1e-4."""
    config = write_engine_view(
        EngineModel.THINKER, tiny, tmp_path / "view", max_model_len=8224, with_weights=True
    )
    published = Qwen3ForCausalLM(Qwen3Config.from_pretrained(tmp_path / "view")).eval()
    weights = load_file(tiny / WEIGHTS_NAME)
    own = {name[4:]: tensor for name, tensor in weights.items() if name.startswith("llm.")}
    published.load_state_dict(own, strict=True)

    thinker = PlainThinker(config.thinker, weights)
    shape = encoder_shape(config)
    modules = build(shape, read_weights(tiny, shape, torch.float32, torch.device("cpu")))
    audio = AudioEncoder(shape, modules.apm, modules.audio_projection_layer)
    heard = hear(audio, read_recording(recording_path()), 20)
    opening = thinker.embed(read_tokenizer(tiny).encode("<|im_start|>system\nHello.<|im_end|>"))
    rows = torch.cat([opening, *(unit.rows for unit in heard)])

    hidden = thinker.feed(rows, thinker.open())
    with torch.no_grad():
        expected = published.model(inputs_embeds=rows[None]).last_hidden_state[0]
    assert (hidden - expected).abs().max() < 1e-4
    assert (thinker.logits(hidden) - published.lm_head(expected)).abs().max() < 1e-4


def test_the_verbs(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path / "cache"))
    assert report(tiny) == 0
    assert "complete" in capsys.readouterr().out
    assert make(tiny) == 0
    assert "was there already" in capsys.readouterr().out
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "voices" / "default.safetensors").unlink()
    assert report(broken) == 1
    assert "holds no voice file" in capsys.readouterr().out
    assert report(tmp_path) == 2
    (tmp_path / "letter").write_text("dear")
    assert make(tmp_path) == 2
    assert "in the way" in capsys.readouterr().out
