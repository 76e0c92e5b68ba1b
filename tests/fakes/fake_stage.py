"""What all fake stages have in common: a process that can die, stall, or fail a call by name.

The fakes keep the semantics of the real stages (positions, units, epochs, limits), so that a
session which does something wrong is refused here as it would be there. What they answer is a hash
of all that they were given, so that nothing wrong can pass for right.
"""

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from duplex_sidecar.stages.envelope import ElementType, HealthReport, Tensor
from duplex_sidecar.stages.errors import StageError, StageFault

HIDDEN = 4
ROW_BYTES = 4 * HIDDEN


def hash_of(*parts: bytes) -> bytes:
    """16 bytes that follow from the parts and from where they are divided."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def rows(*names: bytes) -> Tensor:
    """One row per name: small whole numbers as float32, so every row is finite."""
    data = b"".join(
        struct.pack("<4f", *(int.from_bytes(hash_of(name)[k : k + 2], "little") for k in range(4)))
        for name in names
    )
    return Tensor(ElementType.FLOAT32, (len(names), HIDDEN), data)


def rows_in(tensor: Tensor) -> list[bytes]:
    return [tensor.data[i : i + ROW_BYTES] for i in range(0, len(tensor.data), ROW_BYTES)]


@dataclass
class Pause:
    """A call that waits inside the stage: `reached` when it is there, until `go`."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Fault:
    fault: StageFault
    after: bool
    times: int


class FakeStage:
    """down: health calls until a dead process is back; None while it lives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.generation = 1
        self.calls = 0
        self.deaths = 0
        self._down: int | None = None
        self._faults: dict[int, list[_Fault]] = {}
        self._pauses: dict[tuple[int, bool], Pause] = {}

    # --- what a test does ------------------------------------------------------------------------

    def kill(self, *, health_calls: int = 1) -> None:
        """The process is gone with all that it held; it is back at the n-th health call."""
        self.deaths += 1
        self._down = health_calls
        self._forget_all()

    def fail(self, unit: int, fault: StageFault, *, after: bool = False, times: int = 1) -> None:
        """The next feeds of this unit fail. after: when the work is done, so the answer is lost.
        GONE kills the process."""
        self._faults.setdefault(unit, []).append(_Fault(fault, after, times))

    def pause(self, unit: int, *, after: bool = False) -> Pause:
        """The next feed of this unit waits, before or after its work."""
        return self._pauses.setdefault((unit, after), Pause())

    # --- for the stages --------------------------------------------------------------------------

    async def health(self) -> HealthReport:
        if self._down is not None:
            self._down -= 1
            if self._down > 0:
                raise self.error(StageFault.GONE, "starting")
            self._down = None
            self.generation += 1
        return HealthReport(self.name, {}, tuple(self._held()))

    def error(self, fault: StageFault, reason: str) -> StageError:
        return StageError(self.name, fault, reason)

    async def _enter(self, unit: int | None = None) -> None:
        self.calls += 1
        await asyncio.sleep(0)
        if unit is not None:
            await self._meet(unit, after=False)
        if self._down is not None:
            raise self.error(StageFault.GONE, "no process")

    async def _leave(self, unit: int) -> None:
        generation = self.generation
        await self._meet(unit, after=True)
        if self._down is not None or self.generation != generation:
            raise self.error(StageFault.GONE, "died on the way")

    async def _meet(self, unit: int, *, after: bool) -> None:
        pause = self._pauses.pop((unit, after), None)
        if pause is not None:
            pause.reached.set()
            await pause.go.wait()
        for fault in self._faults.get(unit, []):
            if fault.after == after and fault.times > 0:
                fault.times -= 1
                if fault.fault is StageFault.GONE:
                    self.kill()
                else:
                    self._failed(unit, fault.fault)
                raise self.error(fault.fault, "as told")

    def _failed(self, unit: int, fault: StageFault) -> None:
        """What else a failure of this kind does."""

    def _forget_all(self) -> None:
        raise NotImplementedError

    def drop_notes(self) -> None:
        """Of all that a test would look at: a process that lives long would be full of it."""
        raise NotImplementedError

    def _held(self) -> Sequence[str]:
        raise NotImplementedError
