"""The two models of the reference front end: where they lie, what they take and give. Torch-free.

ONNX files with the names of the public checkpoint: the S3 speech tokenizer (codes at 25 Hz) and
CAM++ (speaker vector). Only making a voice file needs them; serving does not. The public code goes
by the order of inputs and outputs, not by their names, and so does this one.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from duplex_sidecar.checkpoint.config import Token2WavConfig
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.onnx_wire import Port, read_graph_ports

TOKENIZER_MODEL_NAME = PurePosixPath("assets/token2wav/speech_tokenizer_v2_25hz.onnx")
SPEAKER_MODEL_NAME = PurePosixPath("assets/token2wav/campplus.onnx")
FRONT_END_NAMES = (TOKENIZER_MODEL_NAME, SPEAKER_MODEL_NAME)

TOKENIZER_MEL_BINS = 128
SPEAKER_MEL_BINS = 80

_FLOAT = frozenset({"float32"})
_INTEGER = frozenset({"int32", "int64"})


@dataclass(frozen=True, slots=True)
class _Expected:
    """shape: None for any length."""

    element_types: frozenset[str]
    shape: tuple[int | None, ...]


def check_front_end(folder: Path, name: PurePosixPath, config: Token2WavConfig) -> None:
    """Raises CheckpointError (missing, unreadable, shape_mismatch) unless the file's graph takes
    and gives what the public one does. A shape that a file leaves open fits any.

    Tokenizer: log mel [1, 128, T] float32 and T [1] -> codes. CAM++: filter bank [1, T, 80] float32
    -> vector [1, speaker size].
    """
    path = folder / name
    ports = read_graph_ports(path)
    if name == TOKENIZER_MODEL_NAME:
        mel = _Expected(_FLOAT, (None, TOKENIZER_MEL_BINS, None))
        inputs, output = (mel, _Expected(_INTEGER, (None,))), _Expected(_INTEGER, (None, None))
    else:
        inputs = (_Expected(_FLOAT, (None, None, SPEAKER_MEL_BINS)),)
        output = _Expected(_FLOAT, (None, config.speaker_dim))
    if len(ports.inputs) != len(inputs):
        raise _mismatch(path, f"takes {len(ports.inputs)} inputs, expected {len(inputs)}")
    for port, expected in zip((*ports.inputs, ports.outputs[0]), (*inputs, output), strict=True):
        if not _fits(port, expected):
            wanted = f"{'/'.join(sorted(expected.element_types))} {_shown(expected.shape)}"
            found = f"{port.element_type} {_shown(port.shape)}"
            raise _mismatch(path, f"{port.name} is {found}, expected {wanted}")


def _fits(port: Port, expected: _Expected) -> bool:
    if port.element_type not in expected.element_types:
        return False
    if not port.shape:
        return True
    if len(port.shape) != len(expected.shape):
        return False
    pairs = zip(port.shape, expected.shape, strict=True)
    return all(said is None or wanted is None or said == wanted for said, wanted in pairs)


def _shown(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _mismatch(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(CheckpointFault.SHAPE_MISMATCH, str(path), reason)
