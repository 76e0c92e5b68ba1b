"""Making a checkpoint folder: whole or not at all, once, with typed errors.

Everything is written into a hidden folder beside the target, which is then renamed. A marker file
names the recipe: the same recipe again is left alone, another of ours is replaced, anything else is
never touched.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.report import make_report

RECIPE_NAME = "recipe.json"
LOCK_TIMEOUT_S = 900.0
FILE_MODE = 0o644
"""The library writes files that only their owner may read; a sidecar may be another user."""
_LOCK_POLL_S = 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Recipe(msgspec.Struct, frozen=True):
    """What a folder was made from. inputs: digest of everything that went in."""

    shape: str
    seed: int
    inputs: str


def make_folder(folder: Path, recipe: Recipe, write: Callable[[Path], None]) -> bool:
    """Make `folder` by calling `write` with an empty folder. False: it was there already.

    Raises CheckpointError (not_writable, disk_full, or what `write` raises); then nothing is left.
    """
    folder = folder.absolute()
    with _translated(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_maker(folder.parent):
            for stale in folder.parent.glob(f".{folder.name}.*.partial"):
                shutil.rmtree(stale, ignore_errors=True)
            if _is_complete(folder, recipe):
                return False
            _require_ours(folder)
            staging = Path(
                tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent)
            )
            try:
                write(staging)
                (staging / RECIPE_NAME).write_bytes(msgspec.json.encode(recipe))
                staging.chmod(0o755)
                shutil.rmtree(folder, ignore_errors=True)
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return True


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file. Raises OSError."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        # The library tells the number of an I/O error in its text alone.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None
    path.chmod(FILE_MODE)


def write_state_dict(path: Path, state: Mapping[str, Tensor]) -> None:
    """One `.pt` file. Raises OSError."""
    buffer = io.BytesIO()
    cast(Any, torch).save(dict(state), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())


def _is_complete(folder: Path, recipe: Recipe) -> bool:
    try:
        data = (folder / RECIPE_NAME).read_bytes()
        return msgspec.json.decode(data, type=Recipe) == recipe and make_report(folder).complete
    except (OSError, msgspec.MsgspecError, CheckpointError):
        return False


def _require_ours(folder: Path) -> None:
    """Refuse to replace what this module has not made."""
    if not folder.exists() or (folder / RECIPE_NAME).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        reason = "in the way: it is not a checkpoint made by this command"
        raise CheckpointError(CheckpointFault.NOT_WRITABLE, str(folder), reason)


@contextlib.contextmanager
def _one_maker(parent: Path) -> Generator[None]:
    """Holds the lock of a folder; a second maker waits for the first and finds its work done."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason = f"another maker held it for {LOCK_TIMEOUT_S:.0f} s"
                    raise CheckpointError(
                        CheckpointFault.NOT_WRITABLE, str(parent), reason
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        fault = CheckpointFault.DISK_FULL if full else CheckpointFault.NOT_WRITABLE
        reason = error.strerror or str(error)
        raise CheckpointError(fault, str(error.filename or folder), reason) from error
