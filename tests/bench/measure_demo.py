"""`duplex demo` as a newcomer runs it: packages installed, nothing else there."""

import os
import subprocess
import sys
import time

from tests.bench.figures import Broken, Figure
from tests.bench.revision import ROOT
from tests.bench.rig import Rig

DEMO_S = 240.0
TIMEOUT_S = 900.0


def measure_demo(rig: Rig) -> tuple[list[Figure], dict[str, object]]:
    """Raises Broken when the demo fails."""
    out = rig.folder / "demo-out"
    environment = os.environ | {"DUPLEX_CACHE_DIR": str(rig.folder / "demo-cache")}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "duplex_sidecar.cli.main", "demo", "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise Broken(f"the demo failed: {(done.stdout + done.stderr).strip()[-300:]}")
    verdict = [line for line in done.stdout.splitlines() if line.startswith("OK:")]
    note = "with making the checkpoint, at real time"
    return [Figure("make demo, from exec to its last line", seconds, "s", DEMO_S, note)], {
        "seconds": round(seconds, 1),
        "verdict": verdict[0] if verdict else "",
    }
