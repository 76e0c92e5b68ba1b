"""python -m tests.bench.measure_pods: an operator with eight real pods, on this machine's cluster.

Scheduler, kubelets, containers, charts, operator, gateway, ledger and sidecars are the real ones;
the stages behind the sidecars are the tests' fakes, since the engines of eight pods do not fit on
one machine. Sessions come in an open loop, then pods with 32 sessions in use die. Writes
results/cluster-pods.json.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from support.callers import Caller, all_calling
from support.clusters import OwnCluster, running_cluster
from support.kube import Json, KubeError
from support.operators import login
from support.releases import RELEASE, Voice, named, running_voice
from support.sidecar_pods import Stages

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import ApiError
from duplex_operator.kube.resources import PODS, SESSIONS
from duplex_operator.objects import ObjectKey
from duplex_sidecar.cli.places import default_checkpoint
from scripts.cluster import say
from tests.bench import conditions
from tests.bench.__main__ import RESULTS, dump
from tests.bench.figures import Figure, as_json, print_table
from tests.bench.operator_requests import dispatched, flow_schemas
from tests.bench.revision import revision
from tests.bench.session_watch import SessionWatch
from tests.bench.stats import percentile

POD_COUNT, SLOTS = 8, 32
PRESENT = 64
PER_S, SECONDS = 5.0, 20.0
TALK_S, SPEED = 300.0, 0.25
"""Of the clients: so slow that 32 of them leave the others room on a small machine."""
WAIT_S = 120.0
STAYS = {"disconnectGrace": "1h", "parkAfter": "1h"}
"""Sessions without a client wait for one."""


@dataclass
class Found:
    placed_ms: list[float] = field(default_factory=list[float])
    ready_ms: list[float] = field(default_factory=list[float])
    requests: dict[str, float] = field(default_factory=dict[str, float])
    """Of the operators while sessions came, by the API server's count (see operator_requests)."""
    deaths: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    """By what died: when each session was placed again, in seconds from then."""
    answers_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By what died: when each client had its first unit from another pod."""


@dataclass(frozen=True)
class Site:
    voice: Voice
    machine: OwnCluster
    user: KubernetesApi
    watch: SessionWatch
    found: Found
    talked: set[str] = field(default_factory=set[str])
    """Sessions that have had a client."""

    async def create(self, name: str) -> None:
        await self.user.create(SESSIONS, self.voice.namespace, named(name, lifecycle=STAYS))

    def requests(self) -> dict[str, float]:
        """Of the operators so far."""
        return dispatched(self.machine.kubectl("get", "--raw", "/metrics"))

    async def full_pod(self) -> tuple[str, list[str]]:
        """One whose slots are all taken, by sessions that nobody has talked to: its name, and
        theirs."""
        listed = (await self.user.list(SESSIONS, self.voice.namespace)).items
        where = {each["metadata"]["name"]: each["status"]["placement"]["pod"] for each in listed}
        quiet = Counter(pod for name, pod in where.items() if name not in self.talked)
        pod = next(pod for pod, count in quiet.items() if count == SLOTS)
        names = [name for name, its in where.items() if its == pod]
        self.talked.update(names)
        return pod, names


async def measure_arrivals(site: Site) -> None:
    """An open loop: each is created when its time has come, whatever the others do."""
    say(f"{PRESENT} sessions are there")
    present = [f"present-{number}" for number in range(PRESENT)]
    for name in present:
        await site.create(name)
    await site.watch.until(present, "Ready", WAIT_S)
    before = await asyncio.to_thread(site.requests)
    say(f"{PER_S:.0f} sessions a second")
    sent: dict[str, float] = {}
    began = time.monotonic()

    async def come(number: int) -> None:
        await asyncio.sleep(max(0.0, began + number / PER_S - time.monotonic()))
        name = f"timed-{number}"
        sent[name] = time.monotonic()
        await site.create(name)

    await asyncio.gather(*(come(number) for number in range(round(PER_S * SECONDS))))
    for condition, values in (("Placed", site.found.placed_ms), ("Ready", site.found.ready_ms)):
        await site.watch.until(list(sent), condition, WAIT_S)
        seen = site.watch.first_true
        values += [round(1e3 * (seen[name, condition] - at), 1) for name, at in sent.items()]
    await asyncio.sleep(1.0)  # the Events follow
    after = await asyncio.to_thread(site.requests)
    site.found.requests = {what: count - before[what] for what, count in after.items()}


async def measure_death(site: Site, what: str, kill: Callable[[str, str], Awaitable[None]]) -> None:
    """Of a pod whose sessions all have a client that talks. kill: gets its name and its uid."""
    say(what)
    name, sessions = await site.full_pod()
    pod = await site.user.get(PODS, ObjectKey(site.voice.namespace, name))
    uids = [site.watch.uids[session] for session in sessions]
    talking = all_calling(site.voice, sessions, seconds=TALK_S, speed=SPEED)
    async with talking as callers:
        before = [await caller.until_unit(1, WAIT_S) for caller in callers]
        at_s = time.monotonic()
        await kill(name, pod["metadata"]["uid"])
        moved = await site.watch.moved(uids, at_s, WAIT_S)
        answers = [
            await answered(caller, unit) for caller, unit in zip(callers, before, strict=True)
        ]
        for caller in callers:
            caller.assert_whole()
    again_s = sorted(round(at - at_s, 3) for at in moved.values())
    site.found.deaths.setdefault(what, []).append(again_s)
    answers_s = site.found.answers_s.setdefault(what, [])
    answers_s += [round(at - at_s, 3) for at in answers]


async def answered(caller: Caller, before: Json) -> float:
    """When its first unit from another pod was there (monotonic)."""
    unit = await caller.until(
        lambda event: event["type"] == "duplex.unit" and event["replica"] != before["replica"],
        "a unit on another pod",
    )
    return caller.talk.done_at_s[unit["unit"]]


async def measure(voice: Voice, machine: OwnCluster, found: Found, deaths: int) -> None:
    """deaths: of each kind."""
    connection = login(machine.kubeconfig)
    user = KubernetesApi(ApiConnection(connection, requests_per_s=200))

    async def delete(name: str, uid: str) -> None:
        """At once, without a word to its processes."""
        await user.delete(PODS, ObjectKey(voice.namespace, name), uid=uid, grace_s=0)

    async def kill(name: str, uid: str) -> None:
        await asyncio.to_thread(machine.kill_processes, uid)

    flows = flow_schemas(f"{RELEASE}-operator", voice.namespace)
    machine.apply(flows)
    try:
        async with SessionWatch(connection, voice.namespace) as watch:
            site = Site(voice, machine, user, watch, found)
            await measure_arrivals(site)
            for what, how in (("its processes die", kill), ("it is deleted", delete)):
                for _ in range(deaths):
                    await asyncio.to_thread(voice.await_free, SLOTS)
                    await measure_death(site, f"a pod in use: {what}", how)
    finally:
        machine.delete(flows)
        await user.connection.close()


def figures_of(found: Found) -> list[Figure]:
    note = f"{PER_S:.0f}/s for {SECONDS:.0f} s, {PRESENT} others present, {POD_COUNT} pods"
    figures: list[Figure] = []
    for name, values, target in (
        ("create to Placed", found.placed_ms, 1_000.0),
        ("create to Ready", found.ready_ms, 500.0),
    ):
        p50, p99 = (percentile(values, share) if values else None for share in (0.5, 0.99))
        figures.append(Figure(f"{name}, p50", p50, "ms", None, note))
        figures.append(Figure(f"{name}, p99", p99, "ms", target, note))
    if found.requests:
        requests = found.requests["sessions"] / len(found.ready_ms)
        counted = "the API server's count; upkeep of pools and Lease is in the data"
        figures.append(Figure("operator's requests a session", requests, "", 5.0, counted))
    for what, times in found.deaths.items():
        note = f"{SLOTS} sessions in use; {len(times)} times, the worst"
        detection = max(each[0] for each in times)
        rest = max(each[-1] - each[0] for each in times)
        figures.append(Figure(f"{what}: detection", detection, "s", 3.0, note))
        figures.append(Figure(f"{what}: all placed again after that", rest, "s", 2.0, note))
        heard = found.answers_s[what]
        slow = f"clients at {SPEED} of real time: a unit takes {1 / SPEED:.0f} s by itself"
        name = f"{what}: first unit elsewhere"
        figures.append(Figure(f"{name}, p50", percentile(heard, 0.5), "s", None, slow))
        figures.append(Figure(f"{name}, the last", max(heard), "s", None, slow))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deaths", type=int, default=2, help="of pods, of each kind")
    deaths: int = parser.parse_args().deaths
    before, began = conditions.load_average(), time.monotonic()
    found, trouble = Found(), ""
    with running_cluster() as cluster:
        assert isinstance(cluster, OwnCluster)
        with running_voice(cluster, POD_COUNT, slots=SLOTS, stages=Stages.FAKE) as voice:
            started_s = time.monotonic() - began
            try:
                asyncio.run(measure(voice, cluster, found, deaths))
            except (TimeoutError, AssertionError, OSError, ApiError, KubeError) as error:
                trouble = f"{type(error).__name__}: {error}"
            except KeyboardInterrupt:
                trouble = "interrupted"
    figures = figures_of(found)
    document: Json = {
        "date": conditions.now_utc(),
        "revision": revision(),
        "settings": {
            "pods": POD_COUNT,
            "slots": SLOTS,
            "present": PRESENT,
            "per_s": PER_S,
            "seconds": SECONDS,
            "deaths": deaths,
            "clients_speed": SPEED,
        },
        "conditions": {
            "machine": conditions.machine(),
            "cluster": "the recipe's: 2 nodes, API server and all pods on this machine's cores",
            "pods": "real sidecars under the real scheduler and kubelets; their stages are fakes",
            "load_before": before,
            "load_after": conditions.load_average(),
            "seconds": {"all": round(time.monotonic() - began, 1), "up": round(started_s, 1)},
            "versions": conditions.versions(),
            "checkpoint": conditions.checkpoint(default_checkpoint()),
        },
        "broken": trouble,
        "figures": [as_json(figure) for figure in figures],
        "data": asdict(found),
    }
    print_table(Console(), figures)
    path: Path = RESULTS / "cluster-pods.json"
    path.write_text(dump(document))
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
