"""Names and shapes of the tensors of a checkpoint."""

import pytest

from duplex_sidecar.checkpoint.dummy8b import checkpoint_bytes, plan_shards
from duplex_sidecar.checkpoint.layout import (
    asset_shapes,
    optional_names,
    weight_shapes,
)
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.checkpoint.presets import (
    FULL_VOCAB_SIZE,
    full_config,
    full_special_ids,
    tiny_config,
)
from duplex_sidecar.checkpoint.tokenizer import SPECIAL_TOKENS

pytestmark = pytest.mark.unit


def test_flow_and_vocoder_have_as_many_tensors_and_parameters_as_the_public_ones() -> None:
    config = full_config().token2wav
    sizes = [flow_shapes(config), hift_shapes(config)]
    assert [len(shapes) for shapes in sizes] == [605, 328]
    counts: list[float] = []
    for shapes in sizes:
        total = 0
        for shape in shapes.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        counts.append(round(total / 1e6, 1))
    assert counts == [155.8, 20.8]


def test_prefixes_and_some_names_of_the_public_file() -> None:
    names = weight_shapes(full_config())
    assert {name.partition(".")[0] for name in names} == {
        "llm",
        "apm",
        "audio_projection_layer",
        "vpm",
        "resampler",
        "tts",
    }
    assert names["llm.model.layers.35.self_attn.k_proj.weight"] == (1024, 4096)
    assert names["llm.model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert names["llm.lm_head.weight"] == (FULL_VOCAB_SIZE, 4096)
    assert names["apm.layers.23.fc1.weight"] == (4096, 1024)
    assert names["tts.head_code.0.parametrizations.weight.original0"] == (6562, 1)
    assert names["tts.emb_code.0.weight"] == (6562, 768)
    assert names["tts.projector_semantic.linear1.weight"] == (768, 4096)


def test_tiny_and_full_have_the_same_names_but_for_depth() -> None:
    def kinds(names: dict[str, tuple[int, ...]]) -> set[str]:
        return {".".join("n" if p.isdigit() else p for p in name.split(".")) for name in names}

    assert kinds(weight_shapes(tiny_config())) == kinds(weight_shapes(full_config()))
    tiny, full = asset_shapes(tiny_config()), asset_shapes(full_config())
    for path in tiny:
        assert kinds(tiny[path]) == kinds(full[path])


def test_what_no_stage_reads_is_optional() -> None:
    assert optional_names(tiny_config()) == {
        "tts.model.embed_tokens.weight",
        *(
            f"tts.projector_spk.{layer}.{kind}"
            for layer in ("linear1", "linear2")
            for kind in ("weight", "bias")
        ),
    }


def test_the_dummy_has_the_size_of_the_real_one() -> None:
    assert 18e9 < checkpoint_bytes(full_config()) < 20e9
    assert checkpoint_bytes(full_config(2)) < 7e9


def test_shards_keep_the_order_and_the_limit() -> None:
    shapes = {"a": (100,), "b": (200,), "c": (50,), "d": (1000,), "e": (1,)}
    assert plan_shards(shapes, 600) == [["a", "b"], ["c"], ["d"], ["e"]]
    shards = plan_shards(weight_shapes(full_config()), 4 * 1024**3)
    assert [name for shard in shards for name in shard] == list(weight_shapes(full_config()))
    assert 4 <= len(shards) <= 6


def test_special_ids_of_the_real_shapes() -> None:
    ids = dict(zip(SPECIAL_TOKENS, full_special_ids(), strict=True))
    assert len(set(ids.values())) == len(ids)
    assert max(ids.values()) < FULL_VOCAB_SIZE
    assert ids["<|im_end|>"] == 151_645
    assert (ids["<|tts_bos|>"], ids["<|tts_eos|>"]) == (151_703, 151_704)
    assert full_config().talker.audio_bos_token_id == ids["<|audio_bos|>"]
    assert full_config().talker.text_eos_token_id == ids["<|text_eos|>"]
