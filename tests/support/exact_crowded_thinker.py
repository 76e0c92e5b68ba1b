"""`duplex_sidecar.stages.thinker.process` without its guard against too few KV blocks."""

from collections.abc import Awaitable
from pathlib import Path

import msgspec

from duplex_sidecar.stages.engine.scratch import use_scratch_folder
from duplex_sidecar.stages.process_main import StageService, run_stage_process
from duplex_sidecar.stages.thinker.config import ThinkerSettings


def _load(config: bytes) -> Awaitable[StageService]:
    settings = msgspec.json.decode(config, type=ThinkerSettings)
    use_scratch_folder(Path(settings.runtime_dir))
    from support.exact_crowding import load

    return load(settings)


if __name__ == "__main__":
    run_stage_process("thinker", _load)
