"""Seeded random weights by name and shape, for checkpoints that nobody has trained.

A tensor depends on its name, its shape and the seed alone, so the order of making does not matter
and a shard can be made by itself. Scales follow the number of inputs and the depth, so activations
stay finite at any size.
"""

import hashlib
import math

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.config import CheckpointConfig

Shape = tuple[int, ...]

WEIGHTS_VERSION = 1
"""Part of the recipe of every checkpoint: a change of any number here raises it."""

_BLOCK_ELEMENTS = 4_194_301
"""Larger tensors repeat a block of so many numbers (a prime, so that no two rows are alike):
drawing billions of them would take longer than writing them."""

CONVOLUTION_GAIN = 3.0
POSITION_SCALE = 0.1
"""What is heard outweighs when: else a readout would have to learn each position by itself."""

EMBEDDING_SPREAD = 0.5
QUERY_GAIN = 2.0
ATTENTION_GAIN = 2.0
"""Attention that picks and counts: what stands in the context shows in every hidden state, so a
prompt that is not exactly right gives other logits. With evenly spread attention it would not."""

END_CODE_MAGNITUDE = 1.75
"""Long enough to be sampled once in some dozen codes: turn ends then drain for a second or two."""

_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator that belongs to this name and seed."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def normal(name: str, shape: Shape, seed: int) -> Tensor:
    """Standard normal numbers of `shape`, float32."""
    count = math.prod(shape)
    generator = generator_of(name, seed)
    if count <= _BLOCK_ELEMENTS:
        return torch.randn(shape, generator=generator)
    block = torch.randn(_BLOCK_ELEMENTS, generator=generator)
    return block.repeat(-(-count // _BLOCK_ELEMENTS))[:count].reshape(shape)


def sinusoids(length: int, channels: int) -> Tensor:
    """The fixed position table of a Whisper encoder [length, channels]."""
    rates = torch.exp(
        -math.log(10_000.0) / (channels // 2 - 1) * torch.arange(channels // 2, dtype=torch.float32)
    )
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def transformer_tensor(name: str, shape: Shape, config: CheckpointConfig, seed: int) -> Tensor:
    """A tensor of the safetensors file. What writes into a residual stream is scaled by
    1 / sqrt(2 * layers of its stack), so depth does not blow it up."""
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    if name == "apm.embed_positions.weight":
        return POSITION_SCALE * sinusoids(shape[0], shape[1])
    values = normal(name, shape, seed)
    if kind in ("bias", "in_proj_bias"):
        return _BIAS_SPREAD * values
    if "norm" in leaf or leaf.startswith("ln_"):
        return (QUERY_GAIN if leaf == "q_norm" else 1.0) * (1.0 + _NORM_SPREAD * values)
    if leaf.endswith(("embed_tokens", "emb_text")) or module.endswith("emb_code.0"):
        return EMBEDDING_SPREAD * values
    if kind == "original0":
        # Magnitudes of the weight-normed codec head; its last row is the end code's.
        magnitudes = 0.5 + values.abs().clamp_max(3.0) / 3.0
        magnitudes[-1] = END_CODE_MAGNITUDE
        return magnitudes
    if name == "resampler.query" or leaf == "position_embedding":
        return 0.5 * values
    fan_in = shape[0] if name == "resampler.proj" else math.prod(shape[1:])
    if name in ("apm.conv1.weight", "apm.conv2.weight"):
        values = CONVOLUTION_GAIN * values
    scale = 1.0
    if leaf in ("o_proj", "down_proj", "out_proj", "fc2"):
        scale = 1.0 / math.sqrt(2 * _layers(name, config))
    if leaf == "o_proj":
        scale *= ATTENTION_GAIN
    if name == "audio_projection_layer.linear2.weight":
        # Audio rows are as long as embedded tokens.
        scale = EMBEDDING_SPREAD
    return scale * values / math.sqrt(fan_in)


def _layers(name: str, config: CheckpointConfig) -> int:
    """Layers of the stack that a tensor belongs to."""
    stacks = {
        "llm": config.thinker.num_hidden_layers,
        "apm": config.audio.encoder_layers,
        "vpm": config.vision.num_hidden_layers,
        "tts": config.talker.num_hidden_layers,
    }
    return stacks.get(name.partition(".")[0], 1)


def flow_tensor(key: str, shape: Shape, seed: int) -> Tensor:
    """A tensor of `flow.pt`."""
    values = normal(f"flow.{key}", shape, seed)
    module, _, kind = key.rpartition(".")
    leaf = module.rpartition(".")[2]
    if key == "input_embedding.weight":
        return values
    if len(shape) == 1:
        is_norm = "norm" in leaf or module.endswith((".out.1", "conv.block.3"))
        return (1.0 if is_norm and kind == "weight" else 0.0) + _BIAS_SPREAD * values
    return values / math.sqrt(math.prod(shape[1:]))


F0_GAIN_HZ = 400.0
"""Scale of the predicted pitch: the voiced branch of the source has to run."""
RESIDUAL_MAGNITUDE = 0.3
LOG_LOUDNESS = -0.4
"""Added to the vocoder's log magnitudes: what comes out is well audible and does not clip."""


def hift_tensor(key: str, shape: Shape, seed: int) -> Tensor:
    """A tensor of `hift.pt`. Weight-normed layers have rows of about unit length, residual ones
    shorter, up-sampling ones longer by what their stride thins out."""
    values = normal(f"hift.{key}", shape, seed)
    if key.endswith("original1"):
        return values
    if key.endswith("original0"):
        if "resblocks" in key:
            return torch.full(shape, RESIDUAL_MAGNITUDE)
        magnitudes = {"ups": 2.0, "conv_post": 0.5}
        return torch.full(shape, magnitudes.get(key.partition(".")[0], 1.0))
    if key.endswith("alpha"):
        return 1.0 + _NORM_SPREAD * values
    if key == "f0_predictor.classifier.weight":
        return F0_GAIN_HZ * values / math.sqrt(shape[1])
    if key == "conv_post.bias":
        spectrum_bins = shape[0] // 2
        loudness = torch.zeros(shape)
        loudness[:spectrum_bins] = LOG_LOUDNESS
        return loudness + _BIAS_SPREAD * values
    if len(shape) == 1:
        return _BIAS_SPREAD * values
    return values / math.sqrt(math.prod(shape[1:]))
