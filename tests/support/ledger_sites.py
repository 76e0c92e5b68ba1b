"""Servers that hold a ledger with a durability, and what can happen to them: the host loses its
power, the primary is replaced while its replica lags, all is gone, a process ends or stands still,
the clock steps."""

import asyncio
import shutil
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from support.disk_shim import DiskShim, sizes_of
from support.valkeys import ValkeyProcess, crash, wait_until

from duplex_sidecar.ledger.server import Durability


class Fault(StrEnum):
    POWER_CUT = "power_cut"
    """The disk stalls; then the server's host goes, and what was not synced with it. With a replica
    that one takes over, else the server starts again on what the disk has."""
    SLOW_DISK = "slow_disk"
    """The same, but each sync ends after a while: what waits for it is acknowledged late."""
    FAILOVER = "failover"
    """What is on its way to the replica stays there; then the replica takes over."""
    EMPTIED = "emptied"
    """The server starts again without its files."""
    KILLED = "killed"
    """SIGKILL to the server, whose disk keeps up; it starts again."""
    STOPPED = "stopped"
    """The server stands still for longer than a lease."""
    CLOCK_AHEAD = "clock_ahead"
    CLOCK_BACK = "clock_back"
    """The server's time of day steps, by many leases."""


_SYNC = {Durability.FSYNC: "always"}
CLOCK_STEP_S = 30
SLOW_SYNC_MS = 300


class ReplicationLine:
    """The connection of a replica to its primary, byte by byte. keep_back: nothing more arrives at
    the replica; what is under way is lost when the line ends."""

    def __init__(self, primary_port: int) -> None:
        self._primary_port = primary_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open = asyncio.Event()
        self._open.set()
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def keep_back(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _begin(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _end(self) -> None:
        self._server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets

    async def _serve(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            far, far_writer = await asyncio.open_connection("127.0.0.1", self._primary_port)
            ends.append(far_writer)
            await asyncio.gather(self._carry(far, writer, True), self._carry(near, far_writer))
        except OSError:
            pass
        finally:
            for end in ends:
                end.transport.abort()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, held: bool = False
    ) -> None:
        while data := await source.read(65_536):
            if held:
                await self._open.wait()
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError


class Site:
    """A primary, with a replica where the durability or the fault wants one."""

    def __init__(self, folder: Path, library: Path, durability: Durability, fault: Fault) -> None:
        self.durability = durability
        self.fault = fault
        self._folder = folder
        self.shim = DiskShim(library, folder / "shim")
        self._primary = ValkeyProcess(
            folder / "primary", *self._arguments(), environment=self.shim.environment
        )
        self._replica: ValkeyProcess | None = None
        self._fresh: ValkeyProcess | None = None
        self._line: ReplicationLine | None = None
        self._serving = self._primary

    @property
    def url(self) -> str:
        """Of the server that is the ledger now."""
        return self._serving.url

    def start(self) -> None:
        self._primary.start()
        replicated = self.durability is Durability.REPLICATED
        if replicated or self.fault is Fault.FAILOVER:
            self._line = ReplicationLine(self._primary.port)
            self._replica = self._follower("replica", self._primary, self._line.port)

    def begin(self) -> None:
        """What goes before the blow, while everybody still talks."""
        if self.fault in (Fault.POWER_CUT, Fault.SLOW_DISK):
            written = sizes_of(self._primary.folder)
            wait_until(lambda: self.shim.has(written))  # so that something is left
            slow = self.fault is Fault.SLOW_DISK
            self.shim.set(hold=not slow, delay_ms=SLOW_SYNC_MS if slow else 0)
        elif self.fault is Fault.FAILOVER:
            assert self._line is not None
            self._line.keep_back()
        elif self.fault is Fault.STOPPED:
            self._primary.signal(signal.SIGSTOP)
        elif self.fault is Fault.CLOCK_AHEAD:
            self.shim.set(clock_step_s=CLOCK_STEP_S)
        elif self.fault is Fault.CLOCK_BACK:
            self.shim.set(clock_step_s=-CLOCK_STEP_S)

    def strike(self) -> int:
        """The blow, and what an installation does about it; returns when there is a ledger again.
        The bytes that the disk lost, 0 for what is not about disks."""
        gone = 0
        match self.fault:
            case Fault.POWER_CUT | Fault.SLOW_DISK:
                self._primary.kill()
                self.shim.set()
                gone = self.shim.cut(self._primary.folder)
                self._promote() if self._replica else self._primary.start()
            case Fault.FAILOVER:
                self._primary.kill()
                self._promote()
            case Fault.EMPTIED:
                self._primary.kill()
                shutil.rmtree(self._primary.folder / "appendonlydir")
                self._primary.start()
                self._wait_for_replica()
            case Fault.KILLED:
                crash(self._primary)
                self._primary.start()
                self._wait_for_replica()
            case Fault.STOPPED:
                self._primary.signal(signal.SIGCONT)
            case Fault.CLOCK_AHEAD | Fault.CLOCK_BACK:
                pass
        return gone

    def close(self) -> None:
        self.shim.set()
        for server in (self._primary, self._replica, self._fresh):
            if server is not None:
                server.kill()
        if self._line is not None:
            self._line.close()
        self.shim.close()

    # --- servers ----------------------------------------------------------------------------------

    def _arguments(self) -> list[str]:
        needed = "1" if self.durability is Durability.REPLICATED else "0"
        return [
            *("--appendonly", "yes", "--appendfsync", _SYNC.get(self.durability, "everysec")),
            *("--min-replicas-to-write", needed, "--repl-diskless-sync-delay", "0"),
        ]

    def _follower(self, name: str, primary: ValkeyProcess, port: int) -> ValkeyProcess:
        follower = ValkeyProcess(
            self._folder / name, *self._arguments(), "--replicaof", f"127.0.0.1 {port}"
        )
        follower.start()
        _confirmed(primary)
        return follower

    def _promote(self) -> None:
        """The replica becomes the primary, with another one where the durability wants one."""
        assert self._replica is not None
        with self._replica.client as client:
            client.replicaof("no", "one")
        self._serving = self._replica
        if self.durability is Durability.REPLICATED:
            self._fresh = self._follower("fresh", self._replica, self._replica.port)

    def _wait_for_replica(self) -> None:
        if self._replica is not None:
            _confirmed(self._primary)


def _confirmed(primary: ValkeyProcess) -> None:
    """A replica is in step and has said so; the first confirmation after a sync takes a second."""
    with primary.client as client:
        wait_until(lambda: _is_online(client.info("replication")))
        client.set("first", 1)
        wait_until(lambda: client.wait(1, 1_000) == 1)


def _is_online(replication: dict[str, Any]) -> bool:
    return replication.get("slave0", {}).get("state") == "online"


@contextmanager
def site(folder: Path, library: Path, durability: Durability, fault: Fault) -> Generator[Site]:
    made = Site(folder, library, durability, fault)
    try:
        made.start()
        yield made
    finally:
        made.close()
