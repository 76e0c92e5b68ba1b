"""What a process was started as, for those who look for one among many."""

from contextlib import suppress

import psutil


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; of one that has ended meanwhile, or is a zombie that nobody has waited for
    yet, none."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
