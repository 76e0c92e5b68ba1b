"""The sidecar under cProfile, for `measure_profile`: counts processor time of its main thread.

python -m tests.bench.profiled CONFIG PROFILE: SIGUSR1 starts counting, SIGUSR2 stops it and writes
the file, so that neither start nor end is in it.
"""

import cProfile
import signal
import sys
import time
from pathlib import Path

import msgspec

from duplex_sidecar.cli.serve import run_sidecar
from duplex_sidecar.settings import SidecarSettings


def main() -> int:
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SidecarSettings)
    target = Path(sys.argv[2])
    profile = cProfile.Profile(time.thread_time)

    def start(*_: object) -> None:
        profile.clear()
        profile.enable()

    def stop(*_: object) -> None:
        profile.disable()
        partial = target.with_suffix(".partial")
        profile.dump_stats(partial)
        partial.rename(target)

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)
    return run_sidecar(settings)


if __name__ == "__main__":
    sys.exit(main())
