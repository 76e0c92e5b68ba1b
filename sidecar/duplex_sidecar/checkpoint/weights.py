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

WEIGHTS_VERSION = 2
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

NORM_SPREAD = 0.1
BIAS_SPREAD = 0.02


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator that belongs to this name and seed."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def spread(
    name: str,
    shape: Shape,
    seed: int,
    *,
    offset: float = 0.0,
    scale: float = 1.0,
    element_type: torch.dtype = torch.float32,
) -> Tensor:
    """Normal numbers of `shape` with that mean and deviation."""
    count = math.prod(shape)
    block = torch.randn(min(count, _BLOCK_ELEMENTS), generator=generator_of(name, seed))
    block = block.mul_(scale).add_(offset).to(element_type)
    if count > _BLOCK_ELEMENTS:
        block = block.repeat(-(-count // _BLOCK_ELEMENTS))[:count]
    return block.reshape(shape)


def sinusoids(length: int, channels: int) -> Tensor:
    """The fixed position table of a Whisper encoder [length, channels]."""
    rates = torch.exp(
        -math.log(10_000.0) / (channels // 2 - 1) * torch.arange(channels // 2, dtype=torch.float32)
    )
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def transformer_tensor(
    name: str,
    shape: Shape,
    config: CheckpointConfig,
    seed: int,
    element_type: torch.dtype = torch.float32,
) -> Tensor:
    """A tensor of the safetensors file(s)."""
    if name == "apm.embed_positions.weight":
        return (POSITION_SCALE * sinusoids(shape[0], shape[1])).to(element_type)
    if name.endswith("original0"):
        # Magnitudes of the weight-normed codec head; its last row is the end code's.
        magnitudes = 0.5 + spread(name, shape, seed).abs().clamp_max(3.0) / 3.0
        magnitudes[-1] = END_CODE_MAGNITUDE
        return magnitudes.to(element_type)
    offset, scale = _offset_and_scale(name, shape, config)
    return spread(name, shape, seed, offset=offset, scale=scale, element_type=element_type)


def _offset_and_scale(name: str, shape: Shape, config: CheckpointConfig) -> tuple[float, float]:
    """Mean and deviation. What writes into a residual stream is scaled by 1 / sqrt(2 * layers of
    its stack), so depth does not blow it up."""
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    if kind in ("bias", "in_proj_bias"):
        return 0.0, BIAS_SPREAD
    if "norm" in leaf or leaf.startswith("ln_"):
        mean = QUERY_GAIN if leaf == "q_norm" else 1.0
        return mean, mean * NORM_SPREAD
    if leaf in ("embed_tokens", "emb_text", "position_embedding") or kind == "query":
        return 0.0, EMBEDDING_SPREAD
    if module == "tts.emb_code.0":
        return 0.0, EMBEDDING_SPREAD
    fan_in = shape[0] if name == "resampler.proj" else math.prod(shape[1:])
    gain = 1.0
    if leaf in ("o_proj", "down_proj", "out_proj", "fc2"):
        gain = 1.0 / math.sqrt(2 * _layers(name, config))
    if leaf == "o_proj":
        gain *= ATTENTION_GAIN
    if module in ("apm.conv1", "apm.conv2"):
        gain = CONVOLUTION_GAIN
    if module == "audio_projection_layer.linear2":
        # Audio rows are as long as embedded tokens.
        gain = EMBEDDING_SPREAD
    return 0.0, gain / math.sqrt(fan_in)


def _layers(name: str, config: CheckpointConfig) -> int:
    """Layers of the stack that a tensor belongs to."""
    stacks = {
        "llm": config.thinker.num_hidden_layers,
        "apm": config.audio.encoder_layers,
        "vpm": config.vision.num_hidden_layers,
        "tts": config.talker.num_hidden_layers,
    }
    return stacks.get(name.partition(".")[0], 1)
