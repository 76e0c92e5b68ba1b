"""Where the sidecar's own processor time goes: by room of the product and by library, cProfile.

The profiler makes small functions look dearer than they are: read the shares, not the milliseconds.
"""

import pstats
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.bench.figures import Broken, Figure
from tests.bench.rig import Rig, Scenario, root_process
from tests.bench.scenarios import CONTEXT, OFF, converse

TOP = 40
WRITE_TIMEOUT_S = 10.0


def measure_profile(rig: Rig) -> tuple[list[Figure], dict[str, object]]:
    """Raises Broken, SidecarFailed."""
    units = 40 if rig.quick else 120
    sidecar = rig.new_sidecar("profiled")
    config = Path(sidecar.settings.runtime_dir) / "sidecar.json"
    config.write_bytes(msgspec.json.encode(sidecar.settings))
    target = Path(sidecar.settings.runtime_dir) / "profile"
    with sidecar.log.open("ab") as log:
        sidecar.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.profiled", str(config), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    sidecar.wait_ready()
    data: dict[str, object] = {"units": units}
    figures: list[Figure] = []
    for scenario in (OFF, CONTEXT):
        converse(rig, sidecar, scenario, 5)
        root = root_process(sidecar)
        root.send_signal(signal.SIGUSR1)
        converse(rig, sidecar, scenario, units)
        root.send_signal(signal.SIGUSR2)
        rooms, functions = _read(_taken(target), units)
        total = sum(rooms.values())
        data[scenario.name] = {"rooms_ms_a_unit": rooms, "functions": functions}
        figures += _shares(scenario, rooms, total)
    sidecar.stop()
    return figures, data


def _taken(target: Path) -> pstats.Stats:
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while not target.exists():
        if time.monotonic() > deadline:
            raise Broken("no profile was written")
        time.sleep(0.05)
    stats = pstats.Stats(str(target))
    target.unlink()
    return stats


def _read(stats: pstats.Stats, units: int) -> tuple[dict[str, float], list[dict[str, object]]]:
    """(ms a unit by room or library, the dearest functions): own time, without what they call."""
    rows = cast("dict[tuple[str, int, str], tuple[Any, ...]]", cast(Any, stats).stats)
    rooms: dict[str, float] = {}
    functions: list[tuple[float, dict[str, object]]] = []
    for (file, line, function), (_, calls, own_s, total_s, _) in rows.items():
        room = room_of(file, function)
        ms = own_s * 1000 / units
        rooms[room] = rooms.get(room, 0.0) + ms
        functions.append(
            (
                ms,
                {
                    "function": f"{short_name(file)}:{line} {function}" if line else function,
                    "calls_a_unit": round(calls / units, 2),
                    "own_ms_a_unit": round(ms, 4),
                    "with_callees_ms_a_unit": round(total_s * 1000 / units, 4),
                },
            )
        )
    functions.sort(key=lambda pair: -pair[0])
    ordered = sorted(rooms.items(), key=lambda pair: -pair[1])
    return {room: round(ms, 4) for room, ms in ordered}, [row for _, row in functions[:TOP]]


def room_of(file: str, function: str) -> str:
    """`session`, `ledger`, ... of the product, a library's name, or `built-in`."""
    name = short_name(file)
    parts = name.split("/")
    if parts[0] == "duplex_sidecar":
        return parts[1].removesuffix(".py")
    if file == "~" or not file:
        return (
            f"built-in {function.split(' of ')[-1].strip('<>')}" if "of" in function else "built-in"
        )
    return parts[0].removesuffix(".py")


def short_name(file: str) -> str:
    """From the package on: no path of this machine."""
    for mark in ("/site-packages/", "/sidecar/", "/crds/", "/lib/python3"):
        if mark in file:
            rest = file.rsplit(mark, 1)[1]
            return rest.partition("/")[2] if mark == "/lib/python3" else rest
    return Path(file).name


def _shares(scenario: Scenario, rooms: dict[str, float], total: float) -> list[Figure]:
    return [
        Figure(f"profile, {scenario.name}: {room}", ms / total * 100 if total else None, "%")
        for room, ms in list(rooms.items())[:10]
    ]
