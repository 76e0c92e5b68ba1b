"""Keys and shapes of `flow.pt` (codes to mel) and `hift.pt` (mel to samples). Torch-free.

Names are those of the public state dicts: a causal conformer with up-sampling, a DiT estimator,
and a HiFT vocoder with rates 8 x 5 x 3 (contract sections E and H).
"""

from duplex_sidecar.checkpoint.config import Token2WavConfig

Shape = tuple[int, ...]

TIME_FEATURES = 256
"""Sinusoid features of the ODE time at the estimator's input."""
MODULATIONS = 9
"""Shift, scale and gate of a DiT block's attention, feed-forward and convolution."""
HARMONICS = 9
"""The fundamental and 8 overtones of the harmonic source."""
SPECTRUM = 18
"""Real and imaginary parts of the 9 bins of a 16-point transform."""
PROMPT_FEATURES = 4
"""Noisy mel, conditioning mel, speaker and prompt mel are stacked at the estimator's input."""


def _linear(names: dict[str, Shape], key: str, outputs: int, inputs: int) -> None:
    names[f"{key}.weight"] = (outputs, inputs)
    names[f"{key}.bias"] = (outputs,)


def _norm(names: dict[str, Shape], key: str, size: int) -> None:
    names[f"{key}.weight"] = (size,)
    names[f"{key}.bias"] = (size,)


def _conv(names: dict[str, Shape], key: str, outputs: int, inputs: int, width: int) -> None:
    names[f"{key}.weight"] = (outputs, inputs, width)
    names[f"{key}.bias"] = (outputs,)


def flow_shapes(config: Token2WavConfig) -> dict[str, Shape]:
    """`flow.pt`: code table, conformer encoder, DiT estimator."""
    size, mel = config.conformer_size, config.mel_bins
    names: dict[str, Shape] = {"input_embedding.weight": (config.codebook_size, size)}
    _linear(names, "spk_embed_affine_layer", mel, config.speaker_dim)
    _linear(names, "encoder_proj", mel, size)
    for embed in ("embed", "up_embed"):
        _linear(names, f"encoder.{embed}.out.0", size, size)
        _norm(names, f"encoder.{embed}.out.1", size)
    _conv(names, "encoder.pre_lookahead_layer.conv1", size, size, 4)
    _conv(names, "encoder.pre_lookahead_layer.conv2", size, size, 3)
    _conv(names, "encoder.up_layer.conv", size, size, 5)
    _norm(names, "encoder.after_norm", size)
    for stack, layers in (
        ("encoders", config.conformer_layers),
        ("up_encoders", config.conformer_up_layers),
    ):
        for layer in range(layers):
            _conformer_layer(names, f"encoder.{stack}.{layer}", config)
    _estimator(names, "decoder.estimator", config)
    return names


def _conformer_layer(names: dict[str, Shape], prefix: str, config: Token2WavConfig) -> None:
    size = config.conformer_size
    for projection in ("linear_q", "linear_k", "linear_v", "linear_out"):
        _linear(names, f"{prefix}.self_attn.{projection}", size, size)
    names[f"{prefix}.self_attn.linear_pos.weight"] = (size, size)
    heads = (size // config.conformer_head_dim, config.conformer_head_dim)
    names[f"{prefix}.self_attn.pos_bias_u"] = heads
    names[f"{prefix}.self_attn.pos_bias_v"] = heads
    _linear(names, f"{prefix}.feed_forward.w_1", config.conformer_ffn_size, size)
    _linear(names, f"{prefix}.feed_forward.w_2", size, config.conformer_ffn_size)
    _norm(names, f"{prefix}.norm_ff", size)
    _norm(names, f"{prefix}.norm_mha", size)


def _estimator(names: dict[str, Shape], prefix: str, config: Token2WavConfig) -> None:
    size, ffn_size, mel = config.estimator_size, config.estimator_ffn_size, config.mel_bins
    _linear(names, f"{prefix}.t_embedder.mlp.0", size, TIME_FEATURES)
    _linear(names, f"{prefix}.t_embedder.mlp.2", size, size)
    _linear(names, f"{prefix}.in_proj", size, PROMPT_FEATURES * mel)
    _linear(names, f"{prefix}.final_layer.linear", mel, size)
    _linear(names, f"{prefix}.final_layer.adaLN_modulation.1", 2 * size, size)
    for block in range(config.estimator_blocks):
        key = f"{prefix}.blocks.{block}"
        for projection in ("to_q", "to_k", "to_v", "proj"):
            _linear(names, f"{key}.attn.{projection}", size, size)
        _norm(names, f"{key}.attn.q_norm", config.estimator_head_dim)
        _norm(names, f"{key}.attn.k_norm", config.estimator_head_dim)
        _linear(names, f"{key}.mlp.fc1", ffn_size, size)
        _linear(names, f"{key}.mlp.fc2", size, ffn_size)
        _linear(names, f"{key}.adaLN_modulation.1", MODULATIONS * size, size)
        _conv(names, f"{key}.conv.block.1", size, size, 3)
        _norm(names, f"{key}.conv.block.3", size)
        _conv(names, f"{key}.conv.block.6", size, size, 3)


def _weight_norm_conv(
    names: dict[str, Shape], key: str, outputs: int, inputs: int, width: int
) -> None:
    names[f"{key}.parametrizations.weight.original0"] = (outputs, 1, 1)
    names[f"{key}.parametrizations.weight.original1"] = (outputs, inputs, width)
    names[f"{key}.bias"] = (outputs,)


def _residual_block(names: dict[str, Shape], key: str, channels: int, width: int) -> None:
    for step in range(3):
        for stack in ("convs1", "convs2"):
            _weight_norm_conv(names, f"{key}.{stack}.{step}", channels, channels, width)
        for stack in ("activations1", "activations2"):
            names[f"{key}.{stack}.{step}.alpha"] = (channels,)


def hift_shapes(config: Token2WavConfig) -> dict[str, Shape]:
    """`hift.pt`: F0 predictor, harmonic source, up-sampling stack (rates 8, 5, 3)."""
    size, f0_size, mel = config.vocoder_size, config.f0_size, config.mel_bins
    names: dict[str, Shape] = {}
    for layer in range(5):
        inputs = f0_size if layer else mel
        _weight_norm_conv(names, f"f0_predictor.condnet.{2 * layer}", f0_size, inputs, 3)
    _linear(names, "f0_predictor.classifier", 1, f0_size)
    _linear(names, "m_source.l_linear", 1, HARMONICS)
    _weight_norm_conv(names, "conv_pre", size, mel, 7)
    _weight_norm_conv(names, "conv_post", SPECTRUM, size // 8, 7)
    widths = (16, 11, 7)
    source_strides = (15, 3, 1)
    source_widths = (7, 7, 11)
    for stage in range(3):
        channels = size >> (stage + 1)
        key = f"ups.{stage}"
        # A transposed convolution: weight norm runs over its input channels.
        names[f"{key}.parametrizations.weight.original0"] = (2 * channels, 1, 1)
        names[f"{key}.parametrizations.weight.original1"] = (2 * channels, channels, widths[stage])
        names[f"{key}.bias"] = (channels,)
        stride = source_strides[stage]
        source_width = 1 if stride == 1 else 2 * stride
        _conv(names, f"source_downs.{stage}", channels, SPECTRUM, source_width)
        _residual_block(names, f"source_resblocks.{stage}", channels, source_widths[stage])
        for block, width in enumerate((3, 7, 11)):
            _residual_block(names, f"resblocks.{3 * stage + block}", channels, width)
    return names
