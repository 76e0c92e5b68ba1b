"""Where a verb writes what it has made: looked at before minutes of work, and told by name when it
does not take it after them."""

import os
import secrets
import tempfile
from collections.abc import Generator, Sequence
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
    """The name of a file beside `path`, to be written inside; it takes `path`'s place at the end,
    and until then whatever is there stays as it is. Raises OutputFailed for an OSError, and leaves
    nothing of the new file then. A device or a pipe is written itself."""
    if path.exists() and not path.is_file():
        try:
            yield path
        except OSError as error:
            raise OutputFailed(path, error.strerror or str(error)) from error
        return
    target = path.resolve()  # of a link, what it points to
    new = target.with_name(f".{target.stem}-{secrets.token_hex(4)}{target.suffix}")
    try:
        yield new
        new.replace(target)
    except OSError as error:
        raise OutputFailed(path, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


@contextmanager
def swapped_in(folder: Path, names: Sequence[str]) -> Generator[Path]:
    """A new folder inside `folder` for files of these names. At the end those that are there take
    the place of the files in `folder`; those of before stay until then, and for good when what is
    inside fails."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
        yield Path(new)
        for name in names:
            if (Path(new) / name).exists():
                (Path(new) / name).replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
