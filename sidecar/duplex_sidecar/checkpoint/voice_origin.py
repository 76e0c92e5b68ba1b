"""What a voice file was made with and for, told in its metadata. Torch-free.

A voice is codes and mel for one flow decoder: with another one it would sound like nobody, and
nothing would say so. A file without an origin, made elsewhere, is taken on trust.
"""

import hashlib
from pathlib import Path

import msgspec

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.headers import read_safetensors_metadata
from duplex_sidecar.checkpoint.layout import FLOW_NAME
from duplex_sidecar.checkpoint.layout_front_end import FRONT_END_NAMES

_KEY = "duplex_voice"
"""One entry only: the order of several would be another in each file."""
_END_BYTES = 1024 * 1024
_READ_BYTES = 4 * 1024 * 1024


class VoiceOrigin(msgspec.Struct, frozen=True):
    """checkpoint: digest of the flow decoder that the voice is for. front_end: of the two models
    that made it."""

    checkpoint: str
    front_end: str


def origin_of(folder: Path) -> VoiceOrigin:
    """Of a voice that this checkpoint's front end makes. Raises CheckpointError (missing,
    unreadable)."""
    digest = hashlib.sha256()
    for name in FRONT_END_NAMES:
        path = folder / name
        try:
            with path.open("rb") as file:
                digest.update(f"{name}:{path.stat().st_size}:".encode())
                while data := file.read(_READ_BYTES):
                    digest.update(data)
        except OSError as error:
            raise _unreadable(path, error) from None
    return VoiceOrigin(_flow_digest(folder), digest.hexdigest()[:32])


def origin_metadata(origin: VoiceOrigin) -> dict[str, str]:
    """As it stands in a voice file."""
    return {_KEY: msgspec.json.encode(origin).decode()}


def read_origin(path: Path) -> VoiceOrigin | None:
    """Of a voice file; None if it does not say. Raises CheckpointError (missing, unreadable,
    invalid_voice)."""
    text = read_safetensors_metadata(path).get(_KEY)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=VoiceOrigin)
    except msgspec.MsgspecError as error:
        raise CheckpointError(CheckpointFault.INVALID_VOICE, str(path), str(error)) from None


def check_origin(path: Path, folder: Path) -> None:
    """Raises CheckpointError (invalid_voice) for a voice that says it is for another checkpoint
    than that in `folder`."""
    origin = read_origin(path)
    if origin is not None and origin.checkpoint != _flow_digest(folder):
        reason = f"made for another checkpoint ({origin.checkpoint})"
        raise CheckpointError(CheckpointFault.INVALID_VOICE, str(path), reason)


def _flow_digest(folder: Path) -> str:
    """sha256 over the size and both ends of the flow decoder's file: at its end stand the
    checksums of all its tensors."""
    path = folder / FLOW_NAME
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(_END_BYTES)
            file.seek(max(0, size - _END_BYTES))
            end = file.read(_END_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None
    return hashlib.sha256(f"{size}:".encode() + begin + end).hexdigest()[:32]


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    fault = CheckpointFault.MISSING if missing else CheckpointFault.UNREADABLE
    return CheckpointError(fault, str(path), error.strerror or str(error))
