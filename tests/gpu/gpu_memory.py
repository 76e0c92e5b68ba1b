"""How much memory of the GPU is taken, by all processes together and by some of them."""

import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from tests.gpu.full_shape import nvidia_smi

_LOOK_EVERY_S = 0.05


def used_gib() -> float | None:
    """By everybody on the device, this process's own context included. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (total_bytes - free_bytes) / 2**30


def held_gib(pids: Iterable[int]) -> float | None:
    """By these processes, as the driver counts them. None where it does not name any of them."""
    wanted = set(pids)
    held = _held_mib(nvidia_smi("--query-compute-apps=pid,used_memory"))
    named = [mib for pid, mib in held if pid in wanted]
    return sum(named) / 1024 if named else None


def _held_mib(lines: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for line in lines.splitlines():
        pid, _, mib = line.partition(",")
        if pid.strip().isdigit() and mib.strip().isdigit():
            found.append((int(pid), int(mib)))
    return found


class Ebb:
    """Follows from its beginning how far the memory in use falls. Use as a context."""

    def __init__(self) -> None:
        self.looks: list[tuple[float, float]] = []
        """(seconds since the beginning, GiB in use)."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gpu-memory", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def lowest_gib(self) -> float | None:
        return min((used for _, used in self.looks), default=None)

    def below_after_s(self, limit_gib: float) -> float | None:
        """When the memory in use first was at most that; None when it never was."""
        return next((at_s for at_s, used in self.looks if used <= limit_gib), None)

    def wait_for(self, limit_gib: float, within_s: float) -> None:
        """Until the memory in use was at most that, or the time is over."""
        deadline_s = time.monotonic() + within_s
        while self.below_after_s(limit_gib) is None and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)

    def _look(self) -> None:
        while not self._over.is_set():
            used = used_gib()
            if used is None:
                return
            self.looks.append((time.monotonic() - self._began, used))
            self._over.wait(_LOOK_EVERY_S)
