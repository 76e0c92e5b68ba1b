"""make demo-cluster: the main job on a real Kubernetes cluster, made on this machine.

Starts the cluster if it is not up, installs both charts, applies examples/pool-cpu.yaml and
examples/session.yaml, talks through the gateway with the demo's client, drains the node of the pod
in mid-sentence, talks on over the same connection, deletes the session, and looks at what is left.
The release goes again, the cluster stays up: `make cluster-down` ends it.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from support.callers import Caller, calling
from support.clusters import OwnCluster, running_cluster
from support.kube import Json, KubeError
from support.releases import (
    SIDECARS,
    Voice,
    cpu_pool,
    example,
    install,
    install_kinds,
    ledger_of,
    left_of,
    load_images,
    uninstall,
)

from duplex_sidecar.client.conversation import OUTPUT_RATE_HZ, ConversationFailed
from scripts import cluster
from scripts.cluster import ClusterError, say

SESSION = "hello"
PODS = 2
READY_TIMEOUT_S = 600.0
DRAIN_AFTER_UNIT = 10
UNITS_AFTER_DRAIN = 20
SETTLING_TIMEOUT_S = 30.0


@dataclass
class Story:
    """What the summary tells."""

    placed_s: float = 0.0
    """Seconds from `kubectl apply` of the session, on pods that run, to Ready."""
    pods_s: float = 0.0
    """Seconds from `kubectl apply` of the pool to its pods being ready."""
    pods: list[str] = field(default_factory=list)
    units: int = 0
    turns: int = 0
    audio_s: float = 0.0
    silence_s: float = 0.0
    """How much later than a second the first unit after the drain came behind the last before."""
    whole: bool = False
    left: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.whole and len(self.pods) == PODS and not self.left

    def sentence(self) -> str:
        left = f"left behind: {', '.join(self.left)}" if self.left else "nothing left of it"
        return (
            f"{'OK' if self.good else 'FAILED'}: {PODS} pods ready in {self.pods_s:.0f} s, "
            f"1 session Ready {self.placed_s:.2f} s after apply, {self.units} units "
            f"contiguous={self.whole} in {self.turns} turns ({self.audio_s:.1f} s of audio) on "
            f"{' -> '.join(self.pods)}, one connection, {self.silence_s:.2f} s of silence over the "
            f"drain; deleted: {left} (ledger, token Secret, route, slot)"
        )


async def demo(own: OwnCluster) -> Story:
    """Raises what goes wrong."""
    story = Story()
    say("images: operator and gateway, a Valkey, the sidecar (built once, then from the cache)")
    await asyncio.to_thread(load_images, own)
    with own.namespace("duplex-demo") as namespace:
        say(f"helm install duplex-crds, then duplex in {namespace} (Pod Security restricted)")
        await asyncio.to_thread(install_kinds, own)
        await asyncio.to_thread(install, own, namespace)
        try:
            await converse(own, namespace, story)
        finally:
            say("helm uninstall")
            await asyncio.to_thread(uninstall, own, namespace)
    return story


async def converse(own: OwnCluster, namespace: str, story: Story) -> None:
    pool = await asyncio.to_thread(cpu_pool, own, namespace)
    voice = Voice(own, namespace, pool["metadata"]["name"])
    with watching(own, namespace):
        say(
            f"kubectl apply -f examples/pool-cpu.yaml in {namespace}: engines start, about a minute"
        )
        began = time.monotonic()
        own.apply(pool, namespace)
        await asyncio.to_thread(voice.await_free, PODS * pool["spec"]["slots"])
        story.pods_s = time.monotonic() - began
        say("kubectl apply -f examples/session.yaml")
        began = time.monotonic()
        own.apply(example("session.yaml"), namespace)
        await asyncio.to_thread(
            own.wait, f"dxs/{SESSION}", "condition=Ready", namespace, READY_TIMEOUT_S
        )
        story.placed_s = time.monotonic() - began
        uid: str = own.get("dxs", SESSION, namespace)["status"]["ledgerId"]
        async with calling(voice, SESSION) as caller:
            await talk_and_drain(voice, caller, story)
        say(f"kubectl delete dxs/{SESSION}")
        delete = ("delete", f"dxs/{SESSION}", "--timeout=60s")
        await asyncio.to_thread(own.kubectl, *delete, namespace=namespace, timeout_s=70)
        story.left = await asyncio.to_thread(left_behind, voice, uid)


async def talk_and_drain(voice: Voice, caller: Caller, story: Story) -> None:
    telling = asyncio.create_task(tell(voice, caller))
    try:
        spoke = await caller.until_mid_sentence(DRAIN_AFTER_UNIT)
        pod = voice.pod_of(SESSION)
        node: str = voice.cluster.get("pod", pod, voice.namespace)["spec"]["nodeName"]
        say(f"kubectl drain {node}, while {pod} speaks")
        await asyncio.to_thread(drain, voice, node)
        moved = await caller.until(
            lambda event: event["type"] == "duplex.unit" and event["replica"] != spoke["replica"],
            "a unit on another pod",
        )
        await caller.until_unit(moved["unit"] + UNITS_AFTER_DRAIN)
        caller.assert_whole()
        story.whole = True
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    done = caller.talk.done_at_s
    first: int = moved["unit"]
    story.silence_s = max(0.0, done[first] - done[first - 1] - 1.0)
    story.pods = [pod, voice.pod_of(SESSION)]
    story.units = len(caller.talk.units)
    story.turns = len(caller.talk.transcript)
    samples = sum(unit["audio_samples"] for unit in caller.talk.units)
    story.audio_s = samples / OUTPUT_RATE_HZ


async def tell(voice: Voice, caller: Caller) -> None:
    """A line for each unit that speaks or was rebuilt for a move, and for what the gateway says."""
    pods = {
        pod["metadata"]["uid"]: pod["metadata"]["name"]
        for pod in voice.cluster.items("pods", voice.namespace, SIDECARS)
    }
    seen = 0
    while True:
        await caller.came.wait()
        caller.came.clear()
        for event in caller.events[seen:]:
            line = shown(event, pods)
            if line:
                say(f"  {line}")
        seen = len(caller.events)


def shown(event: Json, pods: dict[str, str]) -> str:
    match event["type"]:
        case "duplex.unit":
            told = event["decision"] == "speak" or event["rebuild_cause"] == "move"
            pod = next((name for uid, name in pods.items() if event["replica"].startswith(uid)), "")
            rebuilt = f", rebuilt ({event['rebuild_cause']})" if event["rebuild_cause"] else ""
            seconds = event["audio_samples"] / OUTPUT_RATE_HZ
            spoken = f", {seconds:.1f} s of sound" if event["audio_samples"] else ""
            line = f"unit {event['unit']:3} on {pod}: {event['decision']}{spoken}{rebuilt}"
            return line if told else ""
        case "session.queued" | "session.moved" as kind:
            return f"gateway: {kind}"
        case _:
            return ""


def drain(voice: Voice, node: str) -> None:
    """Of the pool's pods alone: a trial ledger would lose everything with its pod."""
    arguments = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s")
    voice.cluster.kubectl("drain", node, *arguments, f"--pod-selector={SIDECARS}", timeout_s=100)
    voice.cluster.kubectl("uncordon", node)


def left_behind(voice: Voice, uid: str) -> list[str]:
    """What there still is of a session that is deleted."""
    kube, namespace = voice.cluster, voice.namespace
    found = [f"dxs/{SESSION}"] if kube.find("dxs", SESSION, namespace) else []
    found += ["its Secret"] if kube.find("secret", f"{SESSION}-token", namespace) else []
    with ledger_of(kube, voice.namespace) as redis:
        deadline = time.monotonic() + SETTLING_TIMEOUT_S
        while (left := [*left_of(redis, uid), *taken(voice)]) and time.monotonic() < deadline:
            time.sleep(0.2)
    return found + left


def taken(voice: Voice) -> list[str]:
    """A slot that is not given back, by the pool's status."""
    status: Json = voice.cluster.get("dxp", voice.pool, voice.namespace)["status"]
    return [] if status["freeSlots"] == status["slots"] else ["a slot"]


@contextmanager
def watching(own: OwnCluster, namespace: str) -> Generator[None]:
    """Beside it: what `kubectl get dxs -w` prints."""
    with own.watch("dxs", namespace) as process:
        reader = threading.Thread(target=echo, args=(process,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            reader.join(5)


def echo(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(f"  dxs  {line.rstrip()}")


def leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    argparse.ArgumentParser(description="The demo on a cluster of this machine.").parse_args()
    if cluster.foreign_kubeconfig() is not None:
        print("demo-cluster: needs this machine's own cluster: unset KUBECONFIG", file=sys.stderr)
        return 1
    # So that a `kill` or a timeout of this program leaves nothing in the cluster.
    signal.signal(signal.SIGTERM, leave)
    try:
        cluster.up()
        with running_cluster() as running:
            assert isinstance(running, OwnCluster)
            story = asyncio.run(demo(running))
    except (AssertionError, ClusterError, ConversationFailed, KubeError, TimeoutError) as error:
        print(f"demo-cluster: {error}", file=sys.stderr)
        return 1
    print(story.sentence())
    print("The cluster stays up (make cluster-up tells its KUBECONFIG); make cluster-down ends it.")
    return 0 if story.good else 1


if __name__ == "__main__":
    sys.exit(main())
