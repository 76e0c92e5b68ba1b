"""python -m tests.bench.measure_cluster: times of a release on the cluster of this machine.

Two real sidecars with one slot each, everything installed by the charts. How long a session takes
to be placed and ready on a warm pod, how many requests the operator makes for it, how long a client
hears nothing when its pod is drained or killed. Writes results/cluster-cpu.json.
"""

import argparse
import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from support.callers import calling
from support.clusters import OwnCluster, running_cluster
from support.kube import Json
from support.operators import login
from support.releases import SIDECARS, Voice, named, running_voice

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.resources import SESSIONS
from duplex_sidecar.cli.places import default_checkpoint
from scripts.cluster import say
from tests.bench import conditions
from tests.bench.__main__ import RESULTS, dump
from tests.bench.figures import Figure, as_json, print_table
from tests.bench.operator_requests import requests_for_sessions
from tests.bench.revision import revision
from tests.bench.session_watch import SessionWatch
from tests.bench.stats import percentile

OPENINGS = 20
MOVES = 4
UNITS_BEFORE, UNITS_AFTER = 4, 4
OPERATORS = "app.kubernetes.io/component=operator"
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Opened:
    """Milliseconds from sending the create request: to its answer, and to seeing the condition."""

    answered_ms: float
    placed_ms: float
    ready_ms: float


@dataclass
class Found:
    opened: list[Opened] = field(default_factory=list[Opened])
    requests: dict[str, float] = field(default_factory=dict[str, float])
    """Of the operators for one session up to Ready, by verb and resource."""
    drain_s: list[float] = field(default_factory=list[float])
    kill_s: list[float] = field(default_factory=list[float])
    """From the last unit on the old pod to the first on the new one; 1.0 is no silence."""


async def opened(user: KubernetesApi, watch: SessionWatch, namespace: str, name: str) -> Opened:
    """Without kubectl, whose start would be most of the time. Raises TimeoutError."""
    began = time.monotonic()
    await user.create(SESSIONS, namespace, named(name))
    answered = time.monotonic()
    ready = await watch.until([name], "Ready", WAIT_S)
    moments = (answered, await watch.until([name], "Placed", WAIT_S), ready)
    return Opened(*(round(1e3 * (at - began), 1) for at in moments))


def operator_requests(voice: Voice) -> dict[str, float]:
    """What all operators have asked of the API server for sessions, by verb and resource."""
    counted: dict[str, float] = {}
    for pod in voice.cluster.items("pods", voice.namespace, OPERATORS):
        with voice.cluster.port_forward(
            f"pod/{pod['metadata']['name']}", 8080, voice.namespace
        ) as port:
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text: str = answer.read().decode()
        for key, count in requests_for_sessions(text).items():
            counted[key] = counted.get(key, 0) + count
    return counted


async def measure_opening(voice: Voice, found: Found) -> None:
    kube, namespace = voice.cluster, voice.namespace
    connection = login(kube.kubeconfig)
    user = KubernetesApi(ApiConnection(connection))
    up_to_ready: dict[str, float] = {}
    try:
        async with SessionWatch(connection, namespace) as watch:
            await opened(user, watch, namespace, "warm-up")
            await asyncio.to_thread(kube.kubectl, "delete", "dxs/warm-up", namespace=namespace)
            for number in range(OPENINGS):
                name = f"timed-{number}"
                await asyncio.to_thread(voice.await_free, 2)
                before = await asyncio.to_thread(operator_requests, voice)
                found.opened.append(await opened(user, watch, namespace, name))
                after = await asyncio.to_thread(operator_requests, voice)
                for key, count in after.items():
                    up_to_ready[key] = up_to_ready.get(key, 0) + count - before.get(key, 0)
                await asyncio.to_thread(kube.kubectl, "delete", f"dxs/{name}", namespace=namespace)
    finally:
        await user.connection.close()
    found.requests = {key: count / OPENINGS for key, count in up_to_ready.items() if count}


async def measure_move(voice: Voice, name: str, leave: Callable[[str], None]) -> float:
    """Seconds between the last unit on the one pod and the first on the other, at real time."""
    voice.await_free(2)
    voice.cluster.apply(named(name), voice.namespace)
    voice.cluster.wait(f"dxs/{name}", "condition=Ready", voice.namespace)
    async with calling(voice, name) as caller:
        before = await caller.until_unit(UNITS_BEFORE)
        await asyncio.to_thread(leave, voice.pod_of(name))
        moved = await caller.until(
            lambda event: event["type"] == "duplex.unit" and event["replica"] != before["replica"],
            "a unit on another pod",
        )
        await caller.until_unit(moved["unit"] + UNITS_AFTER)
        caller.assert_whole()
    done = caller.talk.done_at_s
    voice.cluster.kubectl("delete", f"dxs/{name}", "--timeout=60s", namespace=voice.namespace)
    return done[moved["unit"]] - done[moved["unit"] - 1]


def drain_of(voice: Voice) -> Callable[[str], None]:
    def drain(pod: str) -> None:
        node: str = voice.cluster.get("pod", pod, voice.namespace)["spec"]["nodeName"]
        options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
        selector = f"--pod-selector={SIDECARS}"
        voice.cluster.kubectl("drain", node, *options, selector, timeout_s=70)
        voice.cluster.kubectl("uncordon", node)

    return drain


def kill_of(voice: Voice) -> Callable[[str], None]:
    def kill(pod: str) -> None:
        now = ("--grace-period=0", "--force", "--wait=false")
        voice.cluster.kubectl("delete", "pod", pod, *now, namespace=voice.namespace)

    return kill


def figures_of(found: Found) -> list[Figure]:
    note = f"{len(found.opened)} sessions one after another, 2 warm pods"
    figures: list[Figure] = []
    for name, values, target in (
        ("create to Placed", [one.placed_ms for one in found.opened], None),
        ("create to Ready", [one.ready_ms for one in found.opened], 500.0),
    ):
        figures.append(Figure(f"{name}, p50", percentile(values, 0.5), "ms", None, note))
        figures.append(Figure(f"{name}, slowest", max(values), "ms", target, note))
    requests = sum(found.requests.values())
    figures.append(Figure("operator's requests a session up to Ready", requests, "", 5.0))
    for name, gaps in (("drained", found.drain_s), ("killed", found.kill_s)):
        what = f"last unit to next unit, pod {name} under speech"
        p50 = percentile(gaps, 0.5)
        figures.append(Figure(f"{what}, p50", p50, "s", None, "1.0 is no silence"))
        figures.append(Figure(f"{what}, most", max(gaps), "s", None, f"{len(gaps)} times"))
    return figures


def measure(voice: Voice) -> Found:
    found = Found()
    say(f"{OPENINGS} sessions are opened")
    asyncio.run(measure_opening(voice, found))
    for kind, leave, gaps in (
        ("drained", drain_of(voice), found.drain_s),
        ("killed", kill_of(voice), found.kill_s),
    ):
        for number in range(MOVES):
            say(f"a pod is {kind}")
            gap = asyncio.run(measure_move(voice, f"{kind}-{number}", leave))
            gaps.append(round(gap, 3))
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    before, began = conditions.load_average(), time.monotonic()
    with running_cluster() as cluster:
        assert isinstance(cluster, OwnCluster)
        with running_voice(cluster) as voice:
            started_s = time.monotonic() - began
            found = measure(voice)
    figures = figures_of(found)
    document: Json = {
        "date": conditions.now_utc(),
        "revision": revision(),
        "conditions": {
            "machine": conditions.machine(),
            "cluster": "the recipe's: 2 nodes, API server and all pods on this machine's cores",
            "load_before": before,
            "load_after": conditions.load_average(),
            "seconds": {"all": round(time.monotonic() - began, 1), "up": round(started_s, 1)},
            "versions": conditions.versions(),
            "checkpoint": conditions.checkpoint(default_checkpoint()),
        },
        "figures": [as_json(figure) for figure in figures],
        "data": asdict(found),
    }
    print_table(Console(), figures)
    path: Path = RESULTS / "cluster-cpu.json"
    path.write_text(dump(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
