"""usage.py STATE [SECONDS]: memory and CPU of each process of the cluster, over SECONDS."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DEFAULT_SECONDS = 10.0
MEBIBYTE = 2**20


class Use(NamedTuple):
    command: str
    ticks: int
    resident_bytes: int


def names_by_pid(state: Path) -> dict[int, str]:
    return {
        int(file.read_text()): file.name
        for file in (state / "pids").iterdir()
        if file.suffix != ".started"
    }


def processes_in(space: str) -> Iterator[tuple[int, Use]]:
    """Every process of one PID namespace."""
    page = os.sysconf("SC_PAGE_SIZE")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "pid") != space:
                continue
            head, tail = (folder / "stat").read_text().rsplit(") ", 1)
        except OSError:
            continue
        fields = tail.split()
        ticks = int(fields[11]) + int(fields[12])
        yield int(folder.name), Use(head.split("(", 1)[1], ticks, int(fields[21]) * page)


def main() -> None:
    state = Path(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else DEFAULT_SECONDS
    names = names_by_pid(state)
    init = next(pid for pid, name in names.items() if name == "init")
    space = os.readlink(f"/proc/{init}/ns/pid")
    before = dict(processes_in(space))
    time.sleep(seconds)
    after = dict(processes_in(space))
    total_percent, total_bytes = 0.0, 0
    for pid, use in sorted(after.items(), key=lambda pair: -pair[1].resident_bytes):
        ticks = use.ticks - (before[pid].ticks if pid in before else 0)
        percent = ticks / os.sysconf("SC_CLK_TCK") / seconds * 100
        total_percent, total_bytes = total_percent + percent, total_bytes + use.resident_bytes
        print(line(names.get(pid, use.command), use.resident_bytes, percent))
    print(line("all", total_bytes, total_percent))


def line(name: str, resident_bytes: int, percent: float) -> str:
    return f"{name:28} {resident_bytes / MEBIBYTE:7.0f} MiB {percent:6.1f} % of a core"


if __name__ == "__main__":
    main()
