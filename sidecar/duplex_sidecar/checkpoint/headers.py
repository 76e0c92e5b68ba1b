"""What tensors a weight file holds, read from its header alone. Torch-free, executes nothing.

A safetensors file opens with its header. A `.pt` file is a zip whose `data.pkl` names the tensors;
it is read by an unpickler that knows five harmless names and refuses every other one.
"""

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault

MAX_HEADER_BYTES = 100 * 1000 * 1000
"""The limit of the safetensors format itself."""
MAX_INDEX_BYTES = 64 * 1024 * 1024
_METADATA = "__metadata__"


class TensorHeader(msgspec.Struct, frozen=True):
    """element_type is the file's own spelling, for example `F32` or `BF16`."""

    element_type: str
    shape: tuple[int, ...]


class _SafetensorsEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_SafetensorsEntry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode
_decode_index = msgspec.json.Decoder(_Index).decode


def read_safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """Name -> header of every tensor. Raises CheckpointError (missing, unreadable)."""
    entries, size, file_bytes = _read_entries(path)
    found: dict[str, TensorHeader] = {}
    needed_bytes = 8 + size
    for name, raw in entries.items():
        if name == _METADATA:
            continue
        try:
            entry = _decode_entry(raw)
        except msgspec.MsgspecError as error:
            raise _unreadable(path, f"header entry {name}: {error}") from None
        needed_bytes = max(needed_bytes, 8 + size + entry.data_offsets[1])
        found[name] = TensorHeader(entry.dtype, entry.shape)
    if needed_bytes > file_bytes:
        raise _unreadable(path, f"cut off: {file_bytes} of {needed_bytes} bytes")
    return found


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """What the file says of itself beside its tensors. Raises CheckpointError (missing,
    unreadable)."""
    raw = _read_entries(path)[0].get(_METADATA)
    try:
        return {} if raw is None else _decode_metadata(raw)
    except msgspec.MsgspecError as error:
        raise _unreadable(path, f"metadata: {error}") from None


def _read_entries(path: Path) -> tuple[dict[str, msgspec.Raw], int, int]:
    """Entries of the header, its size and the file's."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > MAX_HEADER_BYTES:
                raise _unreadable(path, f"header of {size} bytes")
            entries = _decode_header(file.read(size))
            return entries, size, file.seek(0, io.SEEK_END)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (struct.error, msgspec.MsgspecError) as error:
        raise _unreadable(path, f"no safetensors header: {error}") from None


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name. Raises CheckpointError (missing, unreadable)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
        if len(data) > MAX_INDEX_BYTES:
            raise _unreadable(path, f"longer than {MAX_INDEX_BYTES} bytes")
        weight_map = _decode_index(data).weight_map
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except msgspec.MsgspecError as error:
        raise _unreadable(path, f"no shard index: {error}") from None
    for shard in weight_map.values():
        if Path(shard).name != shard:
            raise _unreadable(path, f"shard {shard!r} is not a plain file name")
    return weight_map


class _HeaderUnpickler(pickle.Unpickler):
    """Rebuilds a state dict with headers in place of tensors."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor_header
        if (module_name, global_name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter_header
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict
        if module_name == "torch" and global_name.endswith("Storage"):
            return global_name.removesuffix("Storage")
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")

    def persistent_load(self, pid: Any, /) -> str:
        return str(pid[1])


def _tensor_header(storage: str, offset: int, shape: tuple[int, ...], *_rest: object) -> object:
    return TensorHeader(storage, tuple(shape))


def _parameter_header(header: TensorHeader, *_rest: object) -> object:
    return header


def read_state_dict_header(path: Path) -> dict[str, TensorHeader]:
    """Key -> header of every tensor of a `.pt` file. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if len(members) != 1 or members[0].file_size > MAX_HEADER_BYTES:
                raise _unreadable(path, "no state dict in the archive")
            loaded: object = _HeaderUnpickler(io.BytesIO(archive.read(members[0]))).load()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(path) from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything; nothing of it has run
        raise _unreadable(path, f"no state dict: {error}") from None
    if not isinstance(loaded, dict):
        raise _unreadable(path, "no state dict: not a mapping")
    found: dict[str, TensorHeader] = {}
    for key, header in loaded.items():
        if not isinstance(key, str) or not isinstance(header, TensorHeader):
            raise _unreadable(path, f"no state dict: {key!r} is no tensor")
        found[key] = header
    return found


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(CheckpointFault.MISSING, str(path), "no such file")


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(CheckpointFault.UNREADABLE, str(path), reason)
