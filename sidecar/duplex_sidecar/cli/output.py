"""Where a verb writes what it has made; looked at before minutes of work, not after them."""

import os
import tempfile
from pathlib import Path


def require_room(folder: Path, size_bytes: int) -> None:
    """Raises OSError when `folder` cannot be written or has no room for `size_bytes` more."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, size_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
