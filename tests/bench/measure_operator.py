"""python -m tests.bench.measure_operator: how fast the operator is, on a real API server.

Pods are objects, their sidecars stand-ins that speak the real admin API: no engine, no node.
Operator, stand-ins and the load share one process and this machine's cores with the API server, so
the figures are upper bounds. Writes results/cluster-operator.json.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from support.api_servers import ApiServer, running_api_server
from support.operators import Place, RunningOperator, operating, placed, until

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from scripts.cluster import say
from tests.bench import conditions
from tests.bench.__main__ import RESULTS, dump
from tests.bench.figures import Figure, as_json, print_table
from tests.bench.session_times import SessionTimes
from tests.bench.stats import percentile

PODS, SLOTS = 9, 100
PRESENT = 500
CALM_PER_S, CALM_S = 5.0, 20.0
RUSH_PER_S, RUSH_S = 50.0, 4.0
WAIT_S = 60.0
NO_COUNT = ("leases", "duplexpools")


@dataclass
class Found:
    """Milliseconds, a value for each session."""

    calm_placed_ms: list[float] = field(default_factory=list[float])
    calm_ready_ms: list[float] = field(default_factory=list[float])
    rush_placed_ms: list[float] = field(default_factory=list[float])
    requests: dict[str, float] = field(default_factory=dict[str, float])
    """Of the operator for one calm session up to Ready, by verb and resource."""
    present_s: float = 0.0
    """Seconds until the sessions that shall be present were Ready, all created at once."""
    moved_sessions: int = 0
    moved_s: float = 0.0
    """Seconds from a pod's death, process and object, until its sessions were placed again."""


async def arrive(place: Place, prefix: str, per_s: float, seconds: float) -> dict[str, float]:
    """An open loop: each is created when its time has come, whatever the others do. Returns when
    each request was sent."""
    sent: dict[str, float] = {}
    began = time.monotonic()

    async def create(number: int) -> None:
        await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
        name = f"{prefix}-{number}"
        sent[name] = time.monotonic()
        await place.make_session(name)

    await asyncio.gather(*(create(number) for number in range(round(per_s * seconds))))
    return sent


async def waited(times: SessionTimes, sent: dict[str, float], condition: str) -> list[float]:
    def look() -> list[float]:
        return [
            round(1e3 * (times.at(name, condition, WAIT_S) - at), 1) for name, at in sent.items()
        ]

    return await asyncio.to_thread(look)


def counted(operator: RunningOperator) -> dict[str, int]:
    return {
        what: count for what, count in operator.api.requests.items() if not what.endswith(NO_COUNT)
    }


async def measure(server: ApiServer, redis_url: str) -> Found:
    found = Found()
    with server.namespace("bench") as namespace:
        async with placed(server.kubeconfig, redis_url, namespace) as place:
            await place.make_pool(slots=SLOTS)
            for number in range(PODS):
                await place.make_pod(f"pod-{number}", slots=SLOTS)
            times = SessionTimes(server.kubeconfig, namespace)
            async with operating(place) as operator:
                say(f"{PRESENT} sessions at once")
                began = time.monotonic()
                await waited(times, await arrive(place, "present", 1e6, PRESENT / 1e6), "Ready")
                found.present_s = round(time.monotonic() - began, 2)
                say(f"{CALM_PER_S:.0f} sessions a second beside them")
                before = counted(operator)
                calm = await arrive(place, "calm", CALM_PER_S, CALM_S)
                found.calm_ready_ms = await waited(times, calm, "Ready")
                found.calm_placed_ms = await waited(times, calm, "Placed")
                found.requests = {
                    what: round((count - before.get(what, 0)) / len(calm), 2)
                    for what, count in counted(operator).items()
                    if count != before.get(what, 0)
                }
                say(f"{RUSH_PER_S:.0f} sessions a second")
                rush = await arrive(place, "rush", RUSH_PER_S, RUSH_S)
                found.rush_placed_ms = await waited(times, rush, "Placed")
                say("a pod dies")
                await measure_death(place, found)
    return found


async def measure_death(place: Place, found: Found) -> None:
    """Without clients they would wait for theirs; these are attached."""
    name, sidecar = max(place.pods.items(), key=lambda pod: len(pod[1].sessions))
    victims = list(sidecar.sessions)[:32]
    for uid in victims:
        sidecar.attach(uid)
    await asyncio.sleep(2.0)
    began = time.monotonic()
    await place.kill_pod(name)

    async def all_placed() -> bool:
        return all(place.owner_of(uid) for uid in victims)

    await until(all_placed, "all sessions elsewhere", WAIT_S)
    found.moved_sessions = len(victims)
    found.moved_s = round(time.monotonic() - began, 2)


def figures_of(found: Found) -> list[Figure]:
    beside = f"{CALM_PER_S:.0f}/s, {PRESENT} others present"
    rush = f"{RUSH_PER_S:.0f}/s for {RUSH_S:.0f} s"
    figures: list[Figure] = []
    for name, values, target, note in (
        ("create to Placed", found.calm_placed_ms, None, beside),
        ("create to Ready", found.calm_ready_ms, 500.0, beside),
        ("create to Placed in a rush", found.rush_placed_ms, 1_000.0, rush),
    ):
        figures.append(Figure(f"{name}, p50", percentile(values, 0.5), "ms", None, note))
        figures.append(Figure(f"{name}, p99", percentile(values, 0.99), "ms", target, note))
    requests = sum(found.requests.values())
    figures.append(Figure("operator's requests a session up to Ready", requests, "", 5.0, beside))
    figures.append(Figure(f"{PRESENT} sessions at once, all Ready", found.present_s, "s"))
    what = f"a pod dies with {found.moved_sessions} sessions in use, all placed again"
    figures.append(Figure(what, found.moved_s, "s", 5.0, "detection 3 s, placing 2 s"))
    return figures


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    before, began = conditions.load_average(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, running_api_server() as server:
        server.install_crds()
        valkey = EmbeddedValkey(Path(folder))
        valkey.start()
        try:
            found = asyncio.run(measure(server, valkey.url))
        finally:
            valkey.stop()
    figures = figures_of(found)
    document = {
        "date": conditions.now_utc(),
        "revision": conditions.revision(),
        "settings": {"pods": PODS, "slots": SLOTS},
        "conditions": {
            "machine": conditions.machine(),
            "load_before": before,
            "load_after": conditions.load_average(),
            "seconds": round(time.monotonic() - began, 1),
            "versions": conditions.versions(),
        },
        "figures": [as_json(figure) for figure in figures],
        "data": asdict(found),
    }
    print_table(Console(), figures)
    (RESULTS / "cluster-operator.json").write_text(dump(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
