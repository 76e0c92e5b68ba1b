"""From exec to ready, with warm and with empty caches, and the memory of the ready tree."""

from collections.abc import Mapping

from duplex_sidecar.client.local_sidecar import LocalSidecar
from tests.bench.figures import Figure
from tests.bench.processes import Memory, memory_by_role
from tests.bench.rig import Rig, root_process

READY_WARM_S = 50.0
TREE_GIB = 4.5
_KIB_A_GIB = 1024 * 1024


def measure_start(rig: Rig) -> tuple[LocalSidecar, list[Figure], dict[str, object]]:
    """Returns the warm sidecar, still running. Raises SidecarFailed."""
    cold_s: float | None = None
    if not rig.quick:
        cold, cold_s = rig.start_sidecar("cold", cache_dir=str(rig.folder / "empty-cache"))
        cold.stop()
    # Once more than needed where nothing has filled the caches yet.
    first, first_s = rig.start_sidecar("first")
    if rig.quick:
        warm, warm_s = first, first_s
    else:
        first.stop()
        warm, warm_s = rig.start_sidecar("warm")
    ready = memory_by_role(root_process(warm))
    figures = [
        Figure("ready from exec, warm caches", warm_s, "s", READY_WARM_S),
        Figure("ready from exec, empty caches", cold_s, "s"),
        tree_figure("process tree when ready, PSS", ready),
    ]
    data: dict[str, object] = {
        "cold_s": cold_s,
        "first_s": first_s,
        "warm_s": warm_s,
        "ready": memory_table(ready),
    }
    return warm, figures, data


def tree_figure(name: str, table: Mapping[str, Memory]) -> Figure:
    total_kib = sum(one.pss_kib for one in table.values())
    parts = ", ".join(f"{role} {one.pss_kib / 1024:.0f}" for role, one in table.items())
    return Figure(name, total_kib / _KIB_A_GIB, "GiB", TREE_GIB, f"MiB: {parts}")


def memory_table(table: Mapping[str, Memory]) -> dict[str, dict[str, int]]:
    return {
        role: {"pss_kib": one.pss_kib, "rss_kib": one.rss_kib, "own_kib": one.own_kib}
        for role, one in table.items()
    }
