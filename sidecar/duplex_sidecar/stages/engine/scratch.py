"""A folder of its own for what vLLM drops into the temporary folder.

The engine's two processes talk through sockets with random names there, and nobody removes them
after a kill. In the stage's own folder the next start sweeps them.
"""

import os
import shutil
import tempfile
from pathlib import Path

_MAX_FOLDER_BYTES = 66
"""A socket path has at most 107 bytes, the names take 37."""


def use_scratch_folder(runtime_dir: Path) -> None:
    """Point temporary files of this process and its children at an empty folder in runtime_dir.
    Call before vllm is imported. Does nothing where the path is too long for sockets."""
    folder = runtime_dir / "tmp"
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # read the variable anew
