"""A checkpoint of the real shapes with random weights, for benches on a GPU.

About 19 GB in bf16, written shard by shard: never more than one shard and one tensor in memory.
It says nothing sensible; whoever measures with it scripts the Thinker's decisions.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from duplex_sidecar.checkpoint.config import CheckpointConfig
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.folder import Recipe, make_folder, write_tensors
from duplex_sidecar.checkpoint.layout import INDEX_NAME, asset_shapes, weight_shapes
from duplex_sidecar.checkpoint.parts import write_parts
from duplex_sidecar.checkpoint.presets import FULL_LAYERS, Shape, full_config, full_special_ids
from duplex_sidecar.checkpoint.tokenizer import SPECIAL_TOKENS, train_tokenizer
from duplex_sidecar.checkpoint.weights import WEIGHTS_VERSION, transformer_tensor
from duplex_sidecar.checkpoint.weights_front_end import FRONT_END_VERSION

TEXT_PIECES = 1002
"""The tokenizer is the tiny one; the rest of the vocabulary has no token and is never sampled."""

SHARD_BYTES = 4 * 1024**3
_WEIGHT_BYTES = 2
_ASSET_BYTES = 4

Shapes = Mapping[str, tuple[int, ...]]


def make_dummy8b(folder: Path, seed: int = 0, *, thinker_layers: int = FULL_LAYERS) -> bool:
    """Make the dummy. False: exactly this one was there already.

    thinker_layers: fewer than the real 36 give a smaller checkpoint by the same code. Raises
    CheckpointError (not_writable, disk_full); then nothing is left behind.
    """
    config = full_config(thinker_layers)
    tokenizer_data = train_tokenizer(TEXT_PIECES + len(SPECIAL_TOKENS), full_special_ids())
    inputs = hashlib.blake2b(digest_size=16)
    versions = f"{WEIGHTS_VERSION}:{FRONT_END_VERSION}".encode()
    for part in (versions, msgspec.json.encode(config), tokenizer_data):
        inputs.update(part)

    def write(staging: Path) -> None:
        _require_space(staging, config)
        write_parts(staging, config, tokenizer_data, seed)
        write_shards(staging, config, seed, SHARD_BYTES)

    return make_folder(folder, Recipe(Shape.FULL, seed, inputs.hexdigest()), write)


def checkpoint_bytes(config: CheckpointConfig) -> int:
    """Size of all tensors of a dummy on disk."""
    assets = sum(_elements(shapes) for shapes in asset_shapes(config).values())
    return _WEIGHT_BYTES * _elements(weight_shapes(config)) + _ASSET_BYTES * assets


def plan_shards(shapes: Shapes, shard_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `shard_bytes`; a larger tensor has one of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = _WEIGHT_BYTES * _elements({name: shape})
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_shards(folder: Path, config: CheckpointConfig, seed: int, shard_bytes: int) -> None:
    """Every tensor of the safetensors files in bf16, and the index. Raises OSError."""
    shapes = weight_shapes(config)
    shards = plan_shards(shapes, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: transformer_tensor(name, shapes[name], config, seed, torch.bfloat16)
            for name in names
        }
        write_tensors(folder / file_name, tensors)
        weight_map |= dict.fromkeys(names, file_name)
    index = {
        "metadata": {"total_size": _WEIGHT_BYTES * _elements(shapes)},
        "weight_map": weight_map,
    }
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(index))


def _require_space(folder: Path, config: CheckpointConfig) -> None:
    """Better now than after some minutes of writing."""
    needed = checkpoint_bytes(config)
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"{needed / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB are free"
        raise CheckpointError(CheckpointFault.DISK_FULL, str(folder), reason)


def _elements(shapes: Shapes) -> int:
    total = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
