"""Recorded files: `.jsonl` (one case a line) or `.json` (an object of lists), plain or gzipped."""

import gzip
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec

from duplex_sidecar.contract.types import ContractFileError

T = TypeVar("T")

MAX_CASE_BYTES = 1 << 28
MAX_FILE_BYTES = 1 << 30
"""Bounds on the unpacked size of a line and of a `.json` file, so that a wrong file cannot fill the
memory. A `.jsonl` file is read line by line and may have any size."""


def kind_of(path: Path) -> str:
    """Kind by name: the part before the first dot, without a `_held` ending."""
    return path.name.split(".", 1)[0].removesuffix("_held")


class RecordedFile:
    """One file of recorded cases. Every problem with it is a `ContractFileError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = kind_of(path)

    def lines(self) -> Iterator[bytes]:
        """The cases of a `.jsonl` file, as JSON texts."""
        with self._opened() as source:
            while line := source.readline(MAX_CASE_BYTES + 1):
                if len(line) > MAX_CASE_BYTES:
                    raise ContractFileError(
                        f"{self.path}: a line is larger than {MAX_CASE_BYTES} bytes unpacked"
                    )
                if line.strip():
                    yield line

    def parts(self) -> dict[str, msgspec.Raw]:
        """The values of a `.json` file, as JSON texts by key."""
        return self._decode_all(self._read(), dict[str, msgspec.Raw])

    def listed(self, key: str) -> list[msgspec.Raw]:
        """The cases under one key of a `.json` file; none when the key is absent."""
        part = self.parts().get(key)
        return [] if part is None else self._decode_all(part, list[msgspec.Raw])

    def _decode_all(self, data: bytes | msgspec.Raw, type_: type[T]) -> T:
        try:
            return self.decode(data, type_)
        except ContractFileError as error:
            raise ContractFileError(f"{self.path}: {error}") from error

    def decode(self, data: bytes | msgspec.Raw, type_: type[T]) -> T:
        """The JSON text of one case as `type_`. The error does not name the file."""
        try:
            return msgspec.json.decode(data, type=type_)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ContractFileError(f"not in the schema of {self.kind}: {error}") from error

    def _read(self) -> bytes:
        with self._opened() as source:
            data = source.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ContractFileError(f"{self.path}: larger than {MAX_FILE_BYTES} bytes unpacked")
        return data

    @contextmanager
    def _opened(self) -> Generator[gzip.GzipFile | BufferedReader]:
        """The file, unpacked on the way."""
        try:
            with self.path.open("rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                with gzip.open(raw) if packed else raw as source:
                    yield source
        except (OSError, EOFError, zlib.error) as error:
            raise ContractFileError(f"{self.path}: cannot be read: {error}") from error
