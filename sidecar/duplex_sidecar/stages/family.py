"""Keeps a stage's processes from outliving whoever started them, also after SIGKILL.

The tree is sidecar -> stage process -> engine core. Every child asks the kernel to be killed when
the thread that started it ends, so the death of any ancestor falls through to the leaves without a
line of ours having to run. Besides, a stage's stdin is a pipe whose other end only the sidecar
holds: end of file there is the friendly request to leave, and the way out where the sidecar ended
before the kernel was asked.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PARENT_VARIABLE = "DUPLEX_PARENT_PID"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Does nothing off Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def mark_children() -> None:
    """Called by a stage process: processes that it starts can tell whether it still lives."""
    os.environ[_PARENT_VARIABLE] = str(os.getpid())


def die_with_stage() -> None:
    """Called in every process that loads the engine plugin: ties the engine core to its stage
    process. Elsewhere (the stage itself, other users of vLLM) it does nothing."""
    marked = os.environ.get(_PARENT_VARIABLE)
    if marked is None or marked == str(os.getpid()):
        return
    die_with_parent()
    status = _status(int(marked))
    if os.getppid() != int(marked) and (status is None or status.is_zombie):
        # It ended between our start and the call: nobody will send the signal any more.
        os._exit(1)
    mark_children()


class _Status(NamedTuple):
    is_zombie: bool
    group: int


def _status(pid: int) -> _Status | None:
    """From /proc; None when there is no such process (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Status(is_zombie=fields[0] == "Z", group=int(fields[2]))


def group_runs(group: int) -> bool:
    """Whether any process of the group runs. Zombies do not: where process 1 collects nobody, the
    orphans of a killed stage stay zombies for ever."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    statuses = (_status(pid) for pid in pids)
    return any(s is not None and s.group == group and not s.is_zombie for s in statuses)


def kill_own_group() -> None:
    """End this process and all that it started, at once. The stage leads its own process group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def on_stdin_end(action: Callable[[], None]) -> None:
    """Call `action` (from a daemon thread) when the other end of stdin is closed."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        action()

    threading.Thread(target=wait, name="stdin-end", daemon=True).start()
