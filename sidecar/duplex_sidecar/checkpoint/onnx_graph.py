"""Writes small ONNX files: a graph of nodes and float or integer constants, and nothing else.

The bytes depend on the graph alone. There is no need for the `onnx` package to make a checkpoint;
tests have it check what is written here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from duplex_sidecar.checkpoint import onnx_wire as wire

IR_VERSION = 8
OPSET_VERSION = 17

Constant = NDArray[np.float32] | NDArray[np.int64]
Attribute = int | Sequence[int]

_ATTRIBUTE_INT, _ATTRIBUTE_INTS = 2, 7
_ELEMENTS = {"float32": wire.FLOAT, "int32": wire.INT32, "int64": wire.INT64}


@dataclass(slots=True)
class Graph:
    """Nodes in the order in which they run; each is named by its output."""

    name: str
    _nodes: list[bytes] = field(default_factory=list[bytes])
    _constants: list[bytes] = field(default_factory=list[bytes])
    _inputs: list[bytes] = field(default_factory=list[bytes])
    _outputs: list[bytes] = field(default_factory=list[bytes])

    def takes(self, name: str, element: type[np.generic], shape: Sequence[int | str]) -> str:
        """An input. A dimension may have a name for a length."""
        self._inputs.append(_value(name, element, shape))
        return name

    def gives(self, name: str, element: type[np.generic], shape: Sequence[int | str]) -> None:
        """An output: what a node of that name makes."""
        self._outputs.append(_value(name, element, shape))

    def constant(self, name: str, values: Constant) -> str:
        """A weight."""
        tensor = b"".join(_number(1, size) for size in values.shape)
        tensor += _number(2, _ELEMENTS[values.dtype.name]) + _bytes(wire.TENSOR_NAME, name.encode())
        self._constants.append(tensor + _bytes(9, np.ascontiguousarray(values).tobytes()))
        return name

    def node(self, output: str, kind: str, *inputs: str, **attributes: Attribute) -> str:
        """An operation of one output."""
        body = b"".join(_bytes(1, name.encode()) for name in inputs)
        body += _bytes(2, output.encode()) + _bytes(3, output.encode()) + _bytes(4, kind.encode())
        for name, value in sorted(attributes.items()):
            body += _bytes(5, _attribute(name, value))
        self._nodes.append(body)
        return output

    def encode(self) -> bytes:
        """The file."""
        graph = b"".join(_bytes(1, node) for node in self._nodes) + _bytes(2, self.name.encode())
        graph += b"".join(_bytes(wire.GRAPH_INITIALIZER, each) for each in self._constants)
        graph += b"".join(_bytes(wire.GRAPH_INPUT, each) for each in self._inputs)
        graph += b"".join(_bytes(wire.GRAPH_OUTPUT, each) for each in self._outputs)
        operators = _bytes(1, b"") + _number(2, OPSET_VERSION)
        return _number(1, IR_VERSION) + _bytes(wire.MODEL_GRAPH, graph) + _bytes(8, operators)


def _attribute(name: str, value: Attribute) -> bytes:
    named = _bytes(1, name.encode())
    if isinstance(value, int):
        return named + _number(3, value) + _number(20, _ATTRIBUTE_INT)
    return named + b"".join(_number(8, each) for each in value) + _number(20, _ATTRIBUTE_INTS)


def _value(name: str, element: type[np.generic], shape: Sequence[int | str]) -> bytes:
    dimensions = b""
    for size in shape:
        inner = _bytes(2, size.encode()) if isinstance(size, str) else _number(1, size)
        dimensions += _bytes(wire.SHAPE_DIMENSION, inner)
    tensor = _number(wire.TENSOR_ELEMENT, _ELEMENTS[np.dtype(element).name])
    tensor += _bytes(wire.TENSOR_SHAPE, dimensions)
    kind = _bytes(wire.TYPE_TENSOR, tensor)
    return _bytes(wire.VALUE_NAME, name.encode()) + _bytes(wire.VALUE_TYPE, kind)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | wire.VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | wire.BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out += struct.pack("B", value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + struct.pack("B", value))
