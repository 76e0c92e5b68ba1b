"""Small made-up models of the reference front end, as ONNX files: seeded random weights behind the
inputs and outputs of the public ones. Another sound gives other codes and another vector; what they
mean, nobody knows.
"""

import math
from pathlib import Path, PurePosixPath

import numpy as np

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.layout_front_end import (
    SPEAKER_MEL_BINS,
    SPEAKER_MODEL_NAME,
    TOKENIZER_MEL_BINS,
    TOKENIZER_MODEL_NAME,
)
from duplex_sidecar.checkpoint.onnx_graph import Constant, Graph
from duplex_sidecar.checkpoint.weights import spread

FRONT_END_VERSION = 1
"""Part of the recipe of every checkpoint: a change of any number here raises it."""

_WIDTH = 16
_LEVELS = 3
_BELOW_ONE = 0.999
"""The quantizer of the public tokenizer rounds tanh(x) times this to -1, 0 or 1."""
_LOUDNESS = 4.0
"""Of what is quantized: all levels are used."""
_SPEAKER_WIDTH = 32


def write_front_end(folder: Path, config: Token2WavConfig, seed: int) -> None:
    """Write both files. Raises OSError."""
    graphs = {
        TOKENIZER_MODEL_NAME: _tokenizer(config, seed),
        SPEAKER_MODEL_NAME: _speaker(config, seed),
    }
    for name, graph in graphs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(graph.encode())


def _tokenizer(config: Token2WavConfig, seed: int) -> Graph:
    """Two convolutions of stride 2 (100 frames a second to 25), then a finite scalar quantizer of
    3 levels, as the public one has after its transformer."""
    graph = Graph("speech_tokenizer")
    weights = _Weights(graph, TOKENIZER_MODEL_NAME, seed)
    digits = round(math.log(config.codebook_size, _LEVELS))
    graph.takes("feats", np.float32, ("batch", TOKENIZER_MEL_BINS, "frames"))
    graph.takes("feats_length", np.int32, ("batch",))
    node, constant = graph.node, graph.constant
    zero, one = (constant(name, np.array(value)) for name, value in (("zero", 0), ("one", 1)))
    two = constant("two", np.array(2))
    frames = node("frame_count", "Gather", node("shape", "Shape", "feats"), two)
    places = node("places", "Range", zero, frames, one)
    length = node("length", "Cast", "feats_length", to=7)
    heard = node("heard", "Cast", node("is_heard", "Less", places, length), to=1)
    masked = node("masked", "Mul", "feats", heard)
    first = weights.convolution("conv1", masked, (_WIDTH, TOKENIZER_MEL_BINS, 3), stride=2, pad=1)
    second = weights.convolution("conv2", first, (_WIDTH, _WIDTH, 3), stride=2, pad=1)
    hidden = node("hidden", "Transpose", second, perm=(0, 2, 1))
    down = weights.matrix("project_down", (_WIDTH, digits), _LOUDNESS)
    soft = node("soft", "Tanh", node("projected", "MatMul", hidden, down))
    scaled = node("scaled", "Mul", soft, constant("below_one", np.array(_BELOW_ONE, np.float32)))
    levels = node("levels", "Round", scaled)
    shifted = node("shifted", "Add", levels, constant("one_level", np.array(1, np.float32)))
    powers = np.array([_LEVELS**digit for digit in range(digits)], np.float32)
    sums = node("sums", "MatMul", shifted, constant("powers", powers[:, None]))
    codes = node("codes", "Squeeze", sums, constant("last_axis", np.array([2])))
    node("indices", "Cast", codes, to=6)
    graph.gives("indices", np.int32, ("batch", "codes"))
    return graph


def _speaker(config: Token2WavConfig, seed: int) -> Graph:
    """A convolution, mean and deviation over time, a projection."""
    graph = Graph("campplus")
    weights = _Weights(graph, SPEAKER_MODEL_NAME, seed)
    graph.takes("input", np.float32, ("batch", "frames", SPEAKER_MEL_BINS))
    node = graph.node
    turned = node("turned", "Transpose", "input", perm=(0, 2, 1))
    shape = (_SPEAKER_WIDTH, SPEAKER_MEL_BINS, 5)
    heard = node("heard", "Relu", weights.convolution("conv", turned, shape, stride=2, pad=2))
    mean = node("mean", "ReduceMean", heard, axes=(2,), keepdims=1)
    square = node("square", "Pow", node("around", "Sub", heard, mean), weights.scalar("two", 2))
    spread_ = node("variance", "ReduceMean", square, axes=(2,), keepdims=0)
    level = node("level", "Squeeze", mean, graph.constant("last_axis", np.array([2])))
    pooled = node("pooled", "Concat", level, node("deviation", "Sqrt", spread_), axis=1)
    projection = weights.matrix("projection", (2 * _SPEAKER_WIDTH, config.speaker_dim), 1.0)
    node("output", "MatMul", pooled, projection)
    graph.gives("output", np.float32, ("batch", config.speaker_dim))
    return graph


class _Weights:
    """Constants of one graph, drawn by name."""

    def __init__(self, graph: Graph, file: PurePosixPath, seed: int) -> None:
        self._graph = graph
        self._file = file.stem
        self._seed = seed

    def convolution(
        self, name: str, values: str, shape: tuple[int, int, int], *, stride: int, pad: int
    ) -> str:
        weight = self._constant(f"{name}.weight", shape, 1 / math.sqrt(math.prod(shape[1:])))
        node = self._graph.node(
            name, "Conv", values, weight, strides=(stride,), pads=(pad, pad), kernel_shape=shape[2:]
        )
        return self._graph.node(f"{name}.out", "Tanh", node)

    def matrix(self, name: str, shape: tuple[int, int], scale: float) -> str:
        return self._constant(name, shape, scale / math.sqrt(shape[0]))

    def scalar(self, name: str, value: float) -> str:
        return self._graph.constant(name, np.array(value, np.float32))

    def _constant(self, name: str, shape: tuple[int, ...], scale: float) -> str:
        values = spread(f"{self._file}.{name}", shape, self._seed, scale=scale)
        constant: Constant = values.numpy()
        return self._graph.constant(name, constant)
