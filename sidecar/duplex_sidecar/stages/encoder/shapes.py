"""Sizes and parameter names of the encoder's four parts, without torch.

Names follow the public MiniCPM-o 4.5 layout (contract section H): `apm.` is a Whisper encoder,
`audio_projection_layer.` maps it into the Thinker's space, `vpm.` is a NaViT-style SigLIP and
`resampler.` turns its patches into a fixed number of rows. `shapes()` is the complete list: the
checkpoint maker writes exactly these, the loader accepts exactly these.
"""

import msgspec

AUDIO_POOL_STEP = 5
"""CNN frames (20 ms each) averaged into one audio row (contract section G)."""

_CHUNK_POSITIONS = 50
"""Rows of the position table that one chunk takes."""


class EncoderShape(msgspec.Struct, frozen=True):
    """Sizes as the public config names them (`audio_config`, `vision_config`, `query_num`).

    hidden_size is the Thinker's. vision_drops_last_layer: the checkpoint holds the last SigLIP
    layer, but rows are taken before it.
    """

    hidden_size: int
    audio_size: int
    audio_layers: int
    audio_heads: int
    audio_ffn_size: int
    audio_positions: int
    mel_bins: int
    vision_size: int
    vision_layers: int
    vision_heads: int
    vision_ffn_size: int
    vision_image_pixels: int
    vision_patch_pixels: int
    vision_drops_last_layer: bool
    resampler_queries: int
    resampler_heads: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.audio_ffn_size != 4 * self.audio_size:
            # The public projector takes its input width from the feed-forward width.
            raise ValueError("audio_ffn_size must be 4 * audio_size")
        for width, heads in (
            ("audio_size", "audio_heads"),
            ("vision_size", "vision_heads"),
            ("hidden_size", "resampler_heads"),
        ):
            if getattr(self, width) % getattr(self, heads):
                raise ValueError(f"{width} is not a multiple of {heads}")
        if self.audio_positions < _CHUNK_POSITIONS:
            raise ValueError(f"audio_positions must hold one chunk of {_CHUNK_POSITIONS}")
        if self.hidden_size % 4:
            raise ValueError("hidden_size must be a multiple of 4 (2-D sine positions)")
        if self.vision_drops_last_layer and self.vision_layers < 2:
            raise ValueError("vision_drops_last_layer leaves no vision layer")

    @property
    def vision_used_layers(self) -> int:
        return self.vision_layers - self.vision_drops_last_layer

    @property
    def vision_side_patches(self) -> int:
        """Patches along one side of the position table."""
        return self.vision_image_pixels // self.vision_patch_pixels


def shapes(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    """Every encoder parameter: public name -> shape. Whisper's key projections carry no bias."""
    return _audio_shapes(shape) | _vision_shapes(shape) | _resampler_shapes(shape)


def unused_names(shape: EncoderShape) -> frozenset[str]:
    """Names of `shapes()` that the checkpoint carries and the encoder does not load."""
    dropped = f"vpm.encoder.layers.{shape.vision_used_layers}."
    return frozenset(name for name in _vision_shapes(shape) if name.startswith(dropped))


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _audio_shapes(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    size = shape.audio_size
    names: dict[str, tuple[int, ...]] = {
        "apm.conv1.weight": (size, shape.mel_bins, 3),
        "apm.conv1.bias": (size,),
        "apm.conv2.weight": (size, size, 3),
        "apm.conv2.bias": (size,),
        "apm.embed_positions.weight": (shape.audio_positions, size),
    }
    for layer in range(shape.audio_layers):
        prefix = f"apm.layers.{layer}"
        names |= _linear(f"{prefix}.self_attn.q_proj", size, size)
        names[f"{prefix}.self_attn.k_proj.weight"] = (size, size)
        names |= _linear(f"{prefix}.self_attn.v_proj", size, size)
        names |= _linear(f"{prefix}.self_attn.out_proj", size, size)
        names |= _norm(f"{prefix}.self_attn_layer_norm", size)
        names |= _linear(f"{prefix}.fc1", size, shape.audio_ffn_size)
        names |= _linear(f"{prefix}.fc2", shape.audio_ffn_size, size)
        names |= _norm(f"{prefix}.final_layer_norm", size)
    names |= _norm("apm.layer_norm", size)
    names |= _linear("audio_projection_layer.linear1", size, shape.hidden_size)
    names |= _linear("audio_projection_layer.linear2", shape.hidden_size, shape.hidden_size)
    return names


def _vision_shapes(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    size, patch = shape.vision_size, shape.vision_patch_pixels
    names: dict[str, tuple[int, ...]] = {
        "vpm.embeddings.patch_embedding.weight": (size, 3, patch, patch),
        "vpm.embeddings.patch_embedding.bias": (size,),
        "vpm.embeddings.position_embedding.weight": (shape.vision_side_patches**2, size),
    }
    for layer in range(shape.vision_layers):
        prefix = f"vpm.encoder.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            names |= _linear(f"{prefix}.self_attn.{projection}", size, size)
        names |= _norm(f"{prefix}.layer_norm1", size)
        names |= _norm(f"{prefix}.layer_norm2", size)
        names |= _linear(f"{prefix}.mlp.fc1", size, shape.vision_ffn_size)
        names |= _linear(f"{prefix}.mlp.fc2", shape.vision_ffn_size, size)
    names |= _norm("vpm.post_layernorm", size)
    return names


def _resampler_shapes(shape: EncoderShape) -> dict[str, tuple[int, ...]]:
    size = shape.hidden_size
    names: dict[str, tuple[int, ...]] = {"resampler.query": (shape.resampler_queries, size)}
    if shape.vision_size != size:
        # The public module has no projection when the widths already agree.
        names["resampler.kv_proj.weight"] = (size, shape.vision_size)
    names["resampler.attn.in_proj_weight"] = (3 * size, size)
    names["resampler.attn.in_proj_bias"] = (3 * size,)
    names |= _linear("resampler.attn.out_proj", size, size)
    for norm in ("ln_q", "ln_kv", "ln_post"):
        names |= _norm(f"resampler.{norm}", size)
    names["resampler.proj"] = (size, size)
    return names
