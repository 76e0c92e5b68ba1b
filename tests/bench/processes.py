"""Processor time and memory of a sidecar's process tree, read from Linux itself, and its end."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from duplex_sidecar.client.local_sidecar import LocalSidecar

_STAGE_MODULE = "duplex_sidecar.stages."
_ENGINE_CORE = "EngineCore"


@dataclass(frozen=True)
class Memory:
    """KiB. pss: proportional share; the sum over a tree counts shared pages once. own: its part
    that no file backs, which processes that come and go elsewhere on the machine do not move."""

    pss_kib: int
    rss_kib: int
    own_kib: int


def cpu_s(pid: int) -> float:
    """Processor seconds that all threads of the process have used, ended ones too.

    The process's CPU-time clock (see clock_getcpuclockid): nanoseconds, where `psutil.cpu_times`
    counts in ticks of 10 ms. Raises OSError when the process is gone.
    """
    return time.clock_gettime((~pid << 3) | 2)


def main_thread_cpu_s(pid: int) -> float:
    """The same of its main thread alone. Raises OSError."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def memory(pid: int) -> Memory:
    """Raises OSError when the process is gone."""
    values = {"Pss": 0, "Rss": 0, "Pss_Anon": 0, "Pss_Shmem": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in values:
            values[name] = int(rest.split()[0])
    return Memory(values["Pss"], values["Rss"], values["Pss_Anon"] + values["Pss_Shmem"])


def roles(root: psutil.Process) -> dict[int, str]:
    """Process id -> what it is: sidecar, a stage, a stage's engine, or a helper of one of these."""
    found = {root.pid: "sidecar"}
    for process in root.children(recursive=True):
        try:
            parent = found.get(process.ppid(), "sidecar")
            found[process.pid] = _role(process, parent)
        except psutil.NoSuchProcess:
            continue
    return found


def _role(process: psutil.Process, parent: str) -> str:
    words = process.cmdline()
    for word in words:
        if word.startswith(_STAGE_MODULE) and word.endswith(".process"):
            return word.removeprefix(_STAGE_MODULE).removesuffix(".process")
    if any(_ENGINE_CORE in word for word in [process.name(), *words]):
        return f"{parent} engine"
    return f"{parent} helper"


def memory_by_role(root: psutil.Process) -> dict[str, Memory]:
    """Helpers of one role are added up."""
    table: dict[str, Memory] = {}
    for pid, role in roles(root).items():
        try:
            one = memory(pid)
        except OSError:
            continue
        before = table.get(role, Memory(0, 0, 0))
        table[role] = Memory(
            before.pss_kib + one.pss_kib,
            before.rss_kib + one.rss_kib,
            before.own_kib + one.own_kib,
        )
    return table


def cpu_by_role(root: psutil.Process) -> dict[str, float]:
    """Processor seconds so far, by role."""
    table: dict[str, float] = {}
    for pid, role in roles(root).items():
        try:
            table[role] = table.get(role, 0.0) + cpu_s(pid)
        except OSError:
            continue
    return table


def kill_at_once(victim: LocalSidecar, tree: Sequence[psutil.Process]) -> None:
    """SIGKILL to every process. Returns when the one that held the lease is gone: the others need
    longer to give their memory back, and nobody has to wait for that."""
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if victim.process is not None:
        victim.process.wait(timeout=10)
