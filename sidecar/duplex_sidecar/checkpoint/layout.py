"""Name and shape of every tensor that a checkpoint of a given config holds. Torch-free.

The safetensors file (or its shards) has the public prefixes `llm.`, `apm.`,
`audio_projection_layer.`, `vpm.`, `resampler.` and `tts.`; the flow decoder and the vocoder are the
state dicts `flow.pt` and `hift.pt` beside it. The encoder's names come from its stage.
"""

from pathlib import PurePosixPath

from duplex_sidecar.checkpoint.config import CheckpointConfig, TalkerConfig, ThinkerConfig
from duplex_sidecar.checkpoint.layout_token2wav import flow_shapes, hift_shapes
from duplex_sidecar.stages.encoder.shapes import EncoderShape, shapes, unused_names

Shape = tuple[int, ...]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_NAME = "tokenizer.json"
FLOW_NAME = PurePosixPath("assets/token2wav/flow.pt")
HIFT_NAME = PurePosixPath("assets/token2wav/hift.pt")
VOICES_FOLDER = "voices"

RESAMPLER_HEAD_DIM = 128
"""The public resampler has `hidden_size / 128` heads."""

TALKER_UNUSED_PREFIXES = ("tts.model.embed_tokens.", "tts.projector_spk.")
"""In the public file, never read by the duplex path: neither required nor unexpected."""

TALKER_UNUSED_EMBEDDINGS = 32
"""Rows of the unused `tts.model.embed_tokens` that we write; any number is accepted."""


def encoder_shape(config: CheckpointConfig) -> EncoderShape:
    """The encoder stage's own description of its sizes."""
    audio, vision = config.audio, config.vision
    return EncoderShape(
        hidden_size=config.thinker.hidden_size,
        audio_size=audio.d_model,
        audio_layers=audio.encoder_layers,
        audio_heads=audio.encoder_attention_heads,
        audio_ffn_size=audio.encoder_ffn_dim,
        audio_positions=audio.max_source_positions,
        mel_bins=audio.num_mel_bins,
        vision_size=vision.hidden_size,
        vision_layers=vision.num_hidden_layers,
        vision_heads=vision.num_attention_heads,
        vision_ffn_size=vision.intermediate_size,
        vision_image_pixels=vision.image_size,
        vision_patch_pixels=vision.patch_size,
        vision_drops_last_layer=config.drop_vision_last_layer,
        resampler_queries=config.query_num,
        resampler_heads=max(1, config.thinker.hidden_size // RESAMPLER_HEAD_DIM),
    )


def weight_shapes(config: CheckpointConfig) -> dict[str, Shape]:
    """Every tensor of the safetensors file(s), unused ones included: what a maker writes."""
    return (
        thinker_shapes(config.thinker)
        | shapes(encoder_shape(config))
        | talker_shapes(config.talker)
    )


def optional_names(config: CheckpointConfig) -> frozenset[str]:
    """Names of `weight_shapes` that no stage loads: they may be absent or of another shape."""
    names = weight_shapes(config)
    unused_talker = {name for name in names if name.startswith(TALKER_UNUSED_PREFIXES)}
    return unused_names(encoder_shape(config)) | unused_talker


def asset_shapes(config: CheckpointConfig) -> dict[PurePosixPath, dict[str, Shape]]:
    """The state dicts beside the safetensors file: path in the folder -> key -> shape."""
    return {
        FLOW_NAME: flow_shapes(config.token2wav),
        HIFT_NAME: hift_shapes(config.token2wav),
    }


def thinker_shapes(config: ThinkerConfig) -> dict[str, Shape]:
    """`llm.*`: a Qwen3ForCausalLM behind its prefix."""
    size, vocab = config.hidden_size, config.vocab_size
    names: dict[str, Shape] = {"llm.model.embed_tokens.weight": (vocab, size)}
    if not config.tie_word_embeddings:
        names["llm.lm_head.weight"] = (vocab, size)
    for layer in range(config.num_hidden_layers):
        prefix = f"llm.model.layers.{layer}"
        names |= _decoder_layer(
            prefix,
            size=size,
            ffn_size=config.intermediate_size,
            query_size=config.num_attention_heads * config.head_dim,
            key_size=config.num_key_value_heads * config.head_dim,
        )
        names[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
        names[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    names["llm.model.norm.weight"] = (size,)
    return names


def talker_shapes(config: TalkerConfig) -> dict[str, Shape]:
    """`tts.*`: a Llama over codec codes, its text table, projectors and weight-normed head."""
    size = config.hidden_size
    head_dim = size // config.num_attention_heads
    names: dict[str, Shape] = {
        "tts.model.embed_tokens.weight": (TALKER_UNUSED_EMBEDDINGS, size),
        "tts.model.norm.weight": (size,),
        "tts.emb_text.weight": (config.num_text_tokens, size),
        "tts.emb_code.0.weight": (config.num_audio_tokens, size),
        "tts.head_code.0.parametrizations.weight.original0": (config.num_audio_tokens, 1),
        "tts.head_code.0.parametrizations.weight.original1": (config.num_audio_tokens, size),
    }
    for layer in range(config.num_hidden_layers):
        names |= _decoder_layer(
            f"tts.model.layers.{layer}",
            size=size,
            ffn_size=config.intermediate_size,
            query_size=size,
            key_size=config.num_key_value_heads * head_dim,
        )
    for projector in ("projector_semantic", "projector_spk"):
        names[f"tts.{projector}.linear1.weight"] = (size, config.llm_dim)
        names[f"tts.{projector}.linear1.bias"] = (size,)
        names[f"tts.{projector}.linear2.weight"] = (size, size)
        names[f"tts.{projector}.linear2.bias"] = (size,)
    return names


def _decoder_layer(
    prefix: str, *, size: int, ffn_size: int, query_size: int, key_size: int
) -> dict[str, Shape]:
    """Attention, gated feed-forward and norms that Qwen3 and Llama share."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (query_size, size),
        f"{prefix}.self_attn.k_proj.weight": (key_size, size),
        f"{prefix}.self_attn.v_proj.weight": (key_size, size),
        f"{prefix}.self_attn.o_proj.weight": (size, query_size),
        f"{prefix}.mlp.gate_proj.weight": (ffn_size, size),
        f"{prefix}.mlp.up_proj.weight": (ffn_size, size),
        f"{prefix}.mlp.down_proj.weight": (size, ffn_size),
        f"{prefix}.input_layernorm.weight": (size,),
        f"{prefix}.post_attention_layernorm.weight": (size,),
    }
