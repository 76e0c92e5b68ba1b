"""A server's disk and clock in a test's hand: syncs that wait or take long, how much of each file
is on the disk for certain, and a clock that steps. Done by a small library that is loaded into the
server (`disk_shim.c`); the C compiler that builds it is the one that the engine needs anyway."""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("disk_shim.c")
_NUMBERS = struct.Struct("=3q")
_BUILD_TIMEOUT_S = 60.0


def build_shim(folder: Path) -> Path:
    """The library. Raises RuntimeError without a C compiler: then nothing here can be proved."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("a C compiler (cc or gcc) is needed to slow a server's disk down")
    library = folder / "disk_shim.so"
    command = (compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl")
    subprocess.run(command, check=True, timeout=_BUILD_TIMEOUT_S)
    return library


class DiskShim:
    """Of one server, over all its lives."""

    def __init__(self, library: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._synced = folder / "synced"
        control = folder / "control"
        control.write_bytes(_NUMBERS.pack(0, 0, 0))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _NUMBERS.size)
        self.environment = {
            "LD_PRELOAD": str(library),
            "DUPLEX_SHIM_CONTROL": str(control),
            "DUPLEX_SHIM_SYNCED": str(self._synced),
        }

    def set(self, *, hold: bool = False, delay_ms: int = 0, clock_step_s: int = 0) -> None:
        """From now on. hold: no sync ends. delay_ms: each takes so much longer."""
        values = (int(hold), delay_ms * 1_000, clock_step_s * 1_000_000)
        self._control[:] = _NUMBERS.pack(*values)

    def close(self) -> None:
        self._control.close()

    def cut(self, folder: Path) -> int:
        """What a power cut leaves of the server's append-only files in that folder: of each as much
        as its last sync had. Returns the bytes that are gone. The server must not run."""
        sure = self._sure()
        gone = 0
        for file, size in sizes_of(folder).items():
            left = min(size, sure.get(file, 0))
            gone += size - left
            with file.open("r+b") as opened:
                opened.truncate(left)
        return gone

    def has(self, sizes: dict[Path, int]) -> bool:
        """Whether so much of these files is on the disk for certain."""
        sure = self._sure()
        return all(sure.get(file, 0) >= size for file, size in sizes.items())

    def _sure(self) -> dict[Path, int]:
        sure: dict[Path, int] = {}
        for line in self._synced.read_text().splitlines():
            size, _, path = line.partition(" ")
            sure[Path(path)] = int(size)
        return sure


def sizes_of(folder: Path) -> dict[Path, int]:
    """Of a server's append-only files, as written."""
    return {file.resolve(): file.stat().st_size for file in folder.rglob("*.incr.aof")}
