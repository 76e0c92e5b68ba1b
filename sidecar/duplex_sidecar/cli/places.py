"""Where things lie by default on one machine: caches, checkpoints, run-time files."""

import os
import shutil
import sys
from pathlib import Path


def default_cache_dir() -> Path:
    """DUPLEX_CACHE_DIR, else $XDG_CACHE_HOME/duplex, else ~/.cache/duplex."""
    named = os.environ.get("DUPLEX_CACHE_DIR")
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "duplex"


def own_command() -> str:
    """How this program is called here, for commands that are to be typed: as it was called, or
    `duplex` where the shell finds it by that name."""
    called = sys.argv[0]
    if Path(called).name != "duplex" or shutil.which("duplex") == os.path.abspath(called):
        return "duplex"
    return called


def default_checkpoint() -> Path:
    """The tiny checkpoint that the demo makes once."""
    return default_cache_dir() / "checkpoints" / "tiny"
