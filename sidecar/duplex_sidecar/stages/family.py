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
    if os.getppid() != int(marked) and not _is_alive(int(marked)):
        # It ended between our start and the call: nobody will send the signal any more.
        os._exit(1)
    mark_children()


def _is_alive(pid: int) -> bool:
    """False for a zombie, too."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


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
