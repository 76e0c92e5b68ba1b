"""Where a verb writes what it has made: looked at before minutes of work, and told by name when it
does not take it after them."""

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


class OutputFailed(Exception):
    """A file could not be written, because its disk is full for example; nothing of it is left."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be written: {reason}")
        self.path = path


def require_room(folder: Path, size_bytes: int) -> None:
    """Raises OSError when `folder` cannot be written or has no room for `size_bytes` more."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, size_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


@contextmanager
def written(path: Path) -> Generator[Path]:
    """Around what writes a file. Raises OutputFailed for an OSError of it, and then leaves no part
    of the file behind: half a picture is worth nothing, and the disk may be full of it."""
    try:
        yield path
    except OSError as error:
        with suppress(OSError):
            if path.is_file():  # and no device
                path.unlink()
        raise OutputFailed(path, error.strerror or str(error)) from error
