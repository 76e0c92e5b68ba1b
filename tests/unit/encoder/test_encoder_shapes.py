"""The list of parameter names: complete, public, and free of torch."""

import subprocess
import sys

import msgspec
import pytest
import torch

from duplex_sidecar.checkpoint.layout import encoder_shape
from duplex_sidecar.checkpoint.presets import full_config, tiny_config
from duplex_sidecar.stages.encoder.shapes import shapes, unused_names
from duplex_sidecar.stages.encoder.weights import EncoderModules, build, noise, used_shapes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("config", [tiny_config(), full_config()], ids=["tiny", "full"])
def test_modules_have_exactly_the_listed_parameters(config):
    shape = encoder_shape(config)
    modules = EncoderModules(shape)
    found = {name: tuple(tensor.shape) for name, tensor in modules.state_dict().items()}
    # What the checkpoint holds and nothing runs (a last vision layer, where it is dropped) has no
    # module.
    assert found == used_shapes(shape)
    assert found.keys() | unused_names(shape) == shapes(shape).keys()


def test_the_full_shapes_have_the_published_sizes():
    listed = shapes(encoder_shape(full_config()))
    assert listed["apm.conv1.weight"] == (1024, 80, 3)
    assert listed["apm.embed_positions.weight"] == (1500, 1024)
    assert listed["apm.layers.23.fc1.weight"] == (4096, 1024)
    assert "apm.layers.0.self_attn.k_proj.bias" not in listed
    assert listed["audio_projection_layer.linear1.weight"] == (4096, 1024)
    assert listed["vpm.embeddings.patch_embedding.weight"] == (1152, 3, 14, 14)
    assert listed["vpm.embeddings.position_embedding.weight"] == (4900, 1152)
    assert listed["vpm.encoder.layers.26.mlp.fc1.weight"] == (4304, 1152)
    assert listed["resampler.query"] == (64, 4096)
    assert listed["resampler.kv_proj.weight"] == (4096, 1152)
    assert listed["resampler.attn.in_proj_weight"] == (3 * 4096, 4096)


def test_an_unused_last_vision_layer_is_listed_but_not_loaded():
    shape = msgspec.structs.replace(encoder_shape(tiny_config()), vision_drops_last_layer=True)
    unused = unused_names(shape)
    assert len(unused) == 16
    assert all(name.startswith("vpm.encoder.layers.1.") for name in unused)
    assert set(EncoderModules(shape).state_dict()) == set(shapes(shape)) - unused


def test_equal_widths_need_no_projection_in_the_resampler():
    tiny = encoder_shape(tiny_config())
    shape = msgspec.structs.replace(tiny, vision_size=tiny.hidden_size)
    assert "resampler.kv_proj.weight" not in shapes(shape)
    assert set(EncoderModules(shape).state_dict()) == set(shapes(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio_ffn_size": 128}, "audio_ffn_size"),
        ({"audio_heads": 3}, "audio_size"),
        ({"vision_heads": 5}, "vision_size"),
        ({"resampler_heads": 3}, "hidden_size"),
        ({"vision_layers": 0}, "vision_layers"),
        ({"vision_layers": 1, "vision_drops_last_layer": True}, "no vision layer"),
        ({"hidden_size": 258, "resampler_heads": 2}, "multiple of 4"),
        ({"audio_positions": 49}, "audio_positions"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(encoder_shape(tiny_config()), **change)


def test_building_tells_every_wrong_name():
    shape = encoder_shape(tiny_config())
    weights = noise(shape, torch.float32, torch.device("cpu"))
    del weights["apm.conv2.bias"]
    weights["resampler.query"] = torch.zeros(63, 256)
    weights["vpm.head"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"apm\.conv2\.bias missing") as caught:
        build(shape, weights)
    assert "resampler.query is (63, 256), expected (64, 256)" in str(caught.value)
    assert "vpm.head unexpected" in str(caught.value)


def test_noise_has_every_name_and_sound_norms():
    shape = encoder_shape(tiny_config())
    weights = noise(shape, torch.bfloat16, torch.device("cpu"))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == used_shapes(shape)
    assert (weights["apm.layers.0.final_layer_norm.weight"] - 1).abs().max() < 0.6
    assert weights["resampler.ln_post.bias"].abs().max() < 0.2
    assert weights["apm.layers.0.fc2.weight"].float().std() == pytest.approx(1 / 16, rel=0.1)


def test_what_the_sidecar_imports_pulls_in_no_torch():
    code = (
        "import sys, duplex_sidecar.stages.encoder.client, duplex_sidecar.stages.encoder.config, "
        "duplex_sidecar.stages.encoder.shapes; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
