"""python -m tests.bench.measure_operator: how fast the operator is, on a real API server.

Pods are objects, their sidecars stand-ins that speak the real admin API: no engine, no node. The
operator is a process of its own, as in its image; API server, ledger server, stand-ins and load
share this machine's cores with it, so the figures are upper bounds: the JSON has the processor time
of each part. Writes results/cluster-operator-SECTION.json (--quick: .cache/bench/).
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from support.kube import KubeError
from support.operators import login

from duplex_operator.kube.errors import ApiError
from scripts.cluster import say
from tests.bench import conditions
from tests.bench.__main__ import QUICK_RESULTS, RESULTS, dump
from tests.bench.figures import Figure, as_json, exit_status, print_table
from tests.bench.operator_world import NAMESPACE, Clock, Operator, World, made
from tests.bench.revision import revision
from tests.bench.session_watch import SessionWatch
from tests.bench.stats import percentile

WAIT_S = 300.0
FULL = 100
"""Slots of a pod of which many fit into a world."""
VICTIMS = 32
"""Sessions of a pod that dies, in `deaths`: its slots, all in use."""
STATUS_WRITES = 'duplex_operator_api_requests_total{verb="patch-status",resource="duplexsessions"}'

Data = dict[str, object]


@dataclass
class Run:
    """quick: shorter, for those who work on it; its figures say little."""

    quick: bool
    figures: list[Figure] = field(default_factory=list[Figure])
    data: dict[str, Data] = field(default_factory=dict[str, Data])

    def note(
        self, section: str, name: str, value: float, unit: str, at_most: float | None, note: str
    ) -> None:
        self.figures.append(Figure(f"{section}: {name}", round(value, 3), unit, at_most, note))


async def arrive(world: World, prefix: str, per_s: float, seconds: float) -> dict[str, float]:
    """An open loop: each is created when its time has come, whatever the others do. Returns when
    each request was sent."""
    sent: dict[str, float] = {}
    began = time.monotonic()

    async def create(number: int) -> None:
        await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
        name = f"{prefix}-{number}"
        sent[name] = time.monotonic()
        await world.make_session(name)

    await asyncio.gather(*(create(number) for number in range(round(per_s * seconds))))
    return sent


async def waited(watch: SessionWatch, sent: dict[str, float], condition: str) -> list[float]:
    """Milliseconds of each from sending its creation."""
    await watch.until(list(sent), condition, WAIT_S)
    return [round(1e3 * (watch.first_true[name, condition] - at), 1) for name, at in sent.items()]


def watching(world: World) -> SessionWatch:
    return SessionWatch(login(world.server.kubeconfig), NAMESPACE)


# --- sessions come, while others are there ---------------------------------------------------


async def measure_arrivals(run: Run) -> None:
    """`calm`, `rush` and `death` share one world, and what is in it."""
    rush_s, present = (15.0, 100) if run.quick else (60.0, 500)
    pods = 20 if run.quick else 50
    async with made(pods=pods, slots=FULL) as world, watching(world) as watch:
        with world.operator() as operator:
            await operator.until_ready()
            names = [f"present-{number}" for number in range(present)]
            await world.make_sessions(names)
            await watch.until(names, "Ready", WAIT_S)
            await measure_calm(run, world, watch, present)
            await measure_rush(run, world, watch, rush_s)
            for delete in (False, True):
                await measure_death(run, world, watch, delete=delete)


async def measure_calm(run: Run, world: World, watch: SessionWatch, present: int) -> None:
    per_s, seconds = 5.0, 10.0 if run.quick else 20.0
    say(f"{per_s:.0f} sessions a second beside {present}")
    clock, before = Clock.of(world), world.requests()
    sent = await arrive(world, "calm", per_s, seconds)
    ready_ms, placed_ms = await waited(watch, sent, "Ready"), await waited(watch, sent, "Placed")
    cores = clock.cores()
    await asyncio.sleep(1.0)  # the Events follow
    requests = {what: count - before[what] for what, count in world.requests().items()}
    note = f"{per_s:.0f}/s for {seconds:.0f} s, {present} others present"
    run.note("calm", "create to Placed, p99", percentile(placed_ms, 0.99), "ms", None, note)
    run.note("calm", "create to Ready, p50", percentile(ready_ms, 0.5), "ms", None, note)
    run.note("calm", "create to Ready, p99", percentile(ready_ms, 0.99), "ms", 500, note)
    a_session = requests["sessions"] / len(sent)
    told = "the API server's count; upkeep of pools and Lease is in the data"
    run.note("calm", "operator's requests a session", a_session, "", 5, told)
    run.data["calm"] = {
        "placed_ms": placed_ms,
        "ready_ms": ready_ms,
        "requests": requests,
        "cores": cores,
    }


async def measure_rush(run: Run, world: World, watch: SessionWatch, seconds: float) -> None:
    per_s = 50.0
    say(f"{per_s:.0f} sessions a second")
    clock, before = Clock.of(world), world.requests()
    sent = await arrive(world, "rush", per_s, seconds)
    cores = clock.cores()
    placed_ms, ready_ms = await waited(watch, sent, "Placed"), await waited(watch, sent, "Ready")
    await asyncio.sleep(1.0)
    requests = {what: count - before[what] for what, count in world.requests().items()}
    note = f"{per_s:.0f}/s for {seconds:.0f} s"
    run.note("rush", "create to Placed, p50", percentile(placed_ms, 0.5), "ms", None, note)
    run.note("rush", "create to Placed, p99", percentile(placed_ms, 0.99), "ms", 1_000, note)
    run.note("rush", "create to Ready, p99", percentile(ready_ms, 0.99), "ms", None, note)
    run.note("rush", "operator's processor time", cores["operator"], "cores", None, note)
    run.note("rush", "API server's processor time", cores["api server"], "cores", None, note)
    run.data["rush"] = {
        "placed_ms": placed_ms,
        "ready_ms": ready_ms,
        "requests": requests,
        "cores": cores,
    }


async def measure_death(
    run: Run, world: World, watch: SessionWatch, *, delete: bool, times: int = 1
) -> None:
    """Of pods that are full. All clients are attached: without one a session would wait for its
    own."""
    what = "a pod's process dies, and its object goes" if delete else "a pod's process dies"
    section = f"{what}, {world.slots} sessions in use"
    noticed_s: list[float] = []
    after_s: list[float] = []
    moved_s: list[list[float]] = []
    for _ in range(times):
        say(section)
        await world.order("attach")
        await watch.until(list(watch.uids), "Connected", WAIT_S)
        await asyncio.sleep(1.0)
        killed = await world.order("kill", sessions=world.slots, delete=delete)
        uids, at_s = killed["uids"], float(killed["at_s"])
        if len(uids) != world.slots:
            raise RuntimeError(f"a pod with {len(uids)} sessions was killed, not {world.slots}")
        moved = await watch.moved(uids, at_s, WAIT_S)
        first_s, last_s = min(moved.values()) - at_s, max(moved.values()) - at_s
        noticed_s.append(first_s)
        after_s.append(last_s - first_s)
        moved_s.append(sorted(round(at - at_s, 3) for at in moved.values()))
    note = f"{world.slots} of {len(watch.uids)} sessions; {times} times, the worst"
    heard = "the first is placed again: it was noticed before"
    run.note(section, "detection", max(noticed_s), "s", 3, heard)
    run.note(section, "all placed again after that", max(after_s), "s", 2, note)
    run.data[section] = {"moved_s": moved_s}


async def measure_deaths(run: Run) -> None:
    """Of pods with 32 slots, one after another, among enough others for their sessions."""
    times, present = (1, 4) if run.quick else (5, 16)
    pods = present + 2 * times + 1
    async with made(pods=pods, slots=VICTIMS) as world, watching(world) as watch:
        with world.operator() as operator:
            await operator.until_ready()
            names = [f"present-{number}" for number in range(present * VICTIMS)]
            await world.make_sessions(names)
            await watch.until(names, "Ready", WAIT_S)
            for delete in (False, True):
                await measure_death(run, world, watch, delete=delete, times=times)


# --- an operator starts ------------------------------------------------------------------------


async def measure_start(run: Run, count: int, within_s: float, pods: int) -> None:
    """Sessions that nobody has placed, then an operator. `idle` and `active` follow in the largest
    of these worlds."""
    section = f"start with {count:,} unplaced"
    async with made(pods=pods, slots=FULL) as world, watching(world) as watch:
        names = [f"waiting-{number}" for number in range(count)]
        say(f"{count:,} sessions without an operator")
        await world.make_sessions(names)
        say("an operator")
        with world.operator() as operator:
            clock = Clock.of(world)
            await watch.until(names, "Placed", WAIT_S)
            cores = clock.cores()
            placed_s = sorted(watch.first_true[name, "Placed"] - operator.began_s for name in names)
            note = "from exec"
            run.note(section, "the first placed", placed_s[0], "s", 5, note)
            run.note(section, "all placed", placed_s[-1], "s", within_s, note)
            await watch.until(names, "Ready", WAIT_S)
            ready_s = max(watch.first_true[name, "Ready"] for name in names) - operator.began_s
            run.note(section, "all Ready", ready_s, "s", None, note)
            run.data[section] = {
                "placed_s": [round(percentile(placed_s, n / 20), 2) for n in range(21)],
                "cores": cores,
            }
            if within_s > 15:
                await measure_standing(run, world, operator, count)


async def measure_standing(run: Run, world: World, operator: Operator, count: int) -> None:
    seconds = 10.0 if run.quick else 60.0
    settle_s = 5.0 if run.quick else 20.0
    note = f"{count:,} sessions, {seconds:.0f} s"
    for section, order, core, memory, writes in (
        ("idle", "count", 0.05, 300.0, None),
        ("active", "talk", None, None, 100.0),
    ):
        say(f"{count:,} sessions are {section}")
        if section == "active":
            await world.order("attach")
        await world.order(order)
        await asyncio.sleep(settle_s if section == "idle" else 2 * settle_s)
        clock, before = Clock.of(world), operator.metrics()[STATUS_WRITES]
        await asyncio.sleep(seconds)
        cores, after = clock.cores(), operator.metrics()[STATUS_WRITES]
        per_s = (after - before) / seconds
        memory_mib = operator.memory_mib()
        run.note(section, "operator's processor time", cores["operator"], "cores", core, note)
        run.note(section, "operator's memory", memory_mib, "MiB", memory, note)
        run.note(section, "status writes a second", per_s, "1/s", writes, note)
        run.data[section] = {"cores": cores, "memory_mib": memory_mib, "writes_per_s": per_s}


async def _start_small(run: Run) -> None:
    await measure_start(run, *((200, 15.0, 3) if run.quick else (1_000, 15.0, 12)))


async def _start_large(run: Run) -> None:
    await measure_start(run, *((1_000, 90.0, 12) if run.quick else (5_000, 90.0, 52)))


SECTIONS: dict[str, Callable[[Run], Coroutine[Any, Any, None]]] = {
    "arrivals": measure_arrivals,
    "deaths": measure_deaths,
    "start": _start_small,
    "many": _start_large,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast the operator is.")
    parser.add_argument("sections", nargs="*", help=f"some of: {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="shorter; its figures say little")
    parser.add_argument("--strict", action="store_true", help="a missed target is a failure")
    arguments = parser.parse_args()
    chosen: list[str] = arguments.sections or list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"unknown section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    figures, broken = list[Figure](), list[str]()
    for name in chosen:
        run, trouble = measure(name, arguments.quick)
        print_table(Console(), run.figures)
        figures += run.figures
        broken += [trouble] if trouble else []
    return exit_status(figures, broken, arguments.strict)


def measure(section: str, quick: bool) -> tuple[Run, str]:
    """Runs one section and writes its file; why it broke, or an empty string."""
    before, began = conditions.load_average(), time.monotonic()
    run, trouble = Run(quick), ""
    try:
        asyncio.run(SECTIONS[section](run))
    except (TimeoutError, RuntimeError, OSError, ApiError, KubeError) as error:
        trouble = f"{type(error).__name__}: {error}"
        say(trouble)
    document = {
        "date": conditions.now_utc(),
        "revision": revision(),
        "settings": {"section": section, "quick": quick},
        "conditions": {
            "machine": conditions.machine(),
            "load_before": before,
            "load_after": conditions.load_average(),
            "seconds": round(time.monotonic() - began, 1),
            "versions": conditions.versions(),
        },
        "broken": trouble,
        "figures": [as_json(figure) for figure in run.figures],
        "data": run.data,
    }
    path: Path = (QUICK_RESULTS if quick else RESULTS) / f"cluster-operator-{section}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(document))
    return run, trouble


if __name__ == "__main__":
    sys.exit(main())
