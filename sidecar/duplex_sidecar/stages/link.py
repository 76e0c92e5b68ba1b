"""The sidecar's end of one stage, across restarts of its process.

A client holds a link for ever; the supervisor hangs a fresh connection behind it each time the
process comes up. Between two processes every call fails with `StageFault.GONE` at once.
"""

from pathlib import Path
from typing import TypeVar

from duplex_sidecar.stages.envelope import Request
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.rpc import RpcClient

_T = TypeVar("_T")


class StageLink:
    """Calls one stage. `stage` is its name in errors, telemetry and logs."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._generation = 0
        self._rpc: RpcClient | None = None

    @property
    def generation(self) -> int:
        """0 before the first process is up; grows with each one. Streams of an older generation
        are gone."""
        return self._generation

    @property
    def connected(self) -> bool:
        return self._rpc is not None

    async def call(self, request: Request, answer: type[_T], timeout_s: float) -> _T:
        """One call. Raises StageError: gone, timeout, or what the stage replied."""
        if self._rpc is None:
            raise StageError(self.stage, StageFault.GONE, "the stage is starting or restarting")
        return await self._rpc.call(request, answer, timeout_s)

    async def attach(self, socket: Path) -> None:
        """Connect to a process that serves at `socket`: the next generation. Raises OSError while
        nothing serves there."""
        rpc = RpcClient(self.stage)
        await rpc.connect(socket)
        await self.detach()
        self._generation += 1
        self._rpc = rpc

    async def detach(self) -> None:
        """Drop the connection: calls under way fail as gone. Does nothing when there is none."""
        rpc, self._rpc = self._rpc, None
        if rpc is not None:
            await rpc.close()
