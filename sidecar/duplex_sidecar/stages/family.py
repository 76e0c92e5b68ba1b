"""Keeps a stage's processes from outliving whoever started them, also after SIGKILL.

The tree is sidecar -> stage process -> engine core. Every child asks the kernel to be killed when
the thread that started it ends, so the death of any ancestor falls through to the leaves without a
line of ours having to run. Besides, a stage's stdin is a pipe whose other end only the sidecar
holds: end of file there is the friendly request to leave (and the way out on a kernel without
parent death signals).
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_STAGE_PID_VARIABLE = "DUPLEX_STAGE_PID"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Does nothing off Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended between our start and the call: nobody will send the signal any more.
        os._exit(1)


def mark_stage_process() -> None:
    """Called by a stage process: processes that it starts inherit the mark."""
    os.environ[_STAGE_PID_VARIABLE] = str(os.getpid())


def die_with_stage() -> None:
    """Called in every process that loads the engine plugin: ties the engine core to its stage
    process. Elsewhere (the stage itself, other users of vLLM) it does nothing."""
    stage_pid = os.environ.get(_STAGE_PID_VARIABLE)
    if stage_pid is not None and stage_pid != str(os.getpid()):
        die_with_parent()


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
