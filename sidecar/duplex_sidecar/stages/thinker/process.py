"""The Thinker's process. See `stages/process_main.py` for its command line and its exit status.

This module stays almost empty on purpose: vLLM spawns the engine core, which imports the main
module again, and everything that is imported here is then paid for twice.
"""

from collections.abc import Awaitable
from pathlib import Path

import msgspec

from duplex_sidecar.stages.engine.scratch import use_scratch_folder
from duplex_sidecar.stages.family import die_with_stage
from duplex_sidecar.stages.process_main import StageService, run_stage_process
from duplex_sidecar.stages.thinker.config import ThinkerSettings


def _load(config: bytes) -> Awaitable[StageService]:
    settings = msgspec.json.decode(config, type=ThinkerSettings)
    use_scratch_folder(Path(settings.runtime_dir))
    from duplex_sidecar.stages.thinker.service import load

    return load(settings)


if __name__ == "__main__":
    run_stage_process("thinker", _load)
elif __name__ == "__mp_main__":
    # The engine core, before anything else: its own start waits for minutes for a stage that is no
    # more.
    die_with_stage()
