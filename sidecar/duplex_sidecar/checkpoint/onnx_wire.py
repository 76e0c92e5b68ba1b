"""The wire format of ONNX files (Protocol Buffers), as much of it as names a graph's inputs and
outputs. Torch-free, loads nothing: a file of half a gigabyte is looked at in milliseconds.

Numbers of fields are those of onnx.proto3 (IR version 8).
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FLOAT, INT32, INT64 = 1, 6, 7
"""TensorProto.DataType"""
ELEMENT_TYPES = {FLOAT: "float32", INT32: "int32", INT64: "int64"}

MODEL_GRAPH = 7
GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_OUTPUT = 5, 11, 12
TENSOR_NAME = 8
VALUE_NAME, VALUE_TYPE = 1, 2
TYPE_TENSOR = 1
TENSOR_ELEMENT, TENSOR_SHAPE = 1, 2
SHAPE_DIMENSION = 1
DIMENSION_VALUE = 1

_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph. shape: None for a length that is not fixed."""

    name: str
    element_type: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class GraphPorts:
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def read_graph_ports(path: Path) -> GraphPorts:
    """What the graph of an ONNX file takes and gives. Raises CheckpointError (missing,
    unreadable)."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _ports(data)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(CheckpointFault.MISSING, str(path), "no such file") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(CheckpointFault.UNREADABLE, str(path), reason) from None
    except (ValueError, IndexError) as error:
        # An empty file cannot be mapped, which is a ValueError too.
        reason = f"no ONNX graph: {error}"
        raise CheckpointError(CheckpointFault.UNREADABLE, str(path), reason) from None


def _ports(data: mmap.mmap) -> GraphPorts:
    inputs: list[Port] = []
    outputs: list[Port] = []
    constants: set[str] = set()
    graphs = 0
    for number, begin, end in _fields(data, 0, len(data)):
        if number != MODEL_GRAPH:
            continue
        graphs += 1
        for inner, first, last in _fields(data, begin, end):
            if inner == GRAPH_INPUT:
                inputs.append(_port(data, first, last))
            elif inner == GRAPH_OUTPUT:
                outputs.append(_port(data, first, last))
            elif inner == GRAPH_INITIALIZER:
                constants.add(_text(data, first, last, TENSOR_NAME))
    if graphs != 1 or not outputs:
        raise ValueError(f"{graphs} graphs, {len(outputs)} outputs")
    # Older files list their weights among the inputs.
    return GraphPorts(tuple(p for p in inputs if p.name not in constants), tuple(outputs))


def _port(data: mmap.mmap, begin: int, end: int) -> Port:
    name = _text(data, begin, end, VALUE_NAME)
    shape: list[int | None] = []
    element = 0
    for type_begin, type_end in _inside(data, begin, end, VALUE_TYPE):
        for first, last in _inside(data, type_begin, type_end, TYPE_TENSOR):
            for number, at, stop in _fields(data, first, last):
                if number == TENSOR_ELEMENT:
                    element = at
                elif number == TENSOR_SHAPE:
                    for one in _inside(data, at, stop, SHAPE_DIMENSION):
                        shape.append(_dimension(data, *one))
    return Port(name, ELEMENT_TYPES.get(element, f"type {element}"), tuple(shape))


def _dimension(data: mmap.mmap, begin: int, end: int) -> int | None:
    found: int | None = None
    for number, value, _ in _fields(data, begin, end):
        if number == DIMENSION_VALUE:
            found = value
    return found


def _text(data: mmap.mmap, begin: int, end: int, wanted: int) -> str:
    for first, last in _inside(data, begin, end, wanted):
        return data[first:last].decode()
    return ""


def _inside(data: mmap.mmap, begin: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    for number, first, last in _fields(data, begin, end):
        if number == wanted:
            yield first, last


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number of each field, and begin and end of its bytes; of a varint its value and 0. Raises
    ValueError or IndexError where the bytes are none."""
    at = begin
    for _ in range(_MAX_FIELDS):
        if at == end:
            return
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value, 0
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > end:
            raise ValueError("cut off")
        yield number, at, at + size
        at += size
    raise ValueError("too many fields")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number without an end")
