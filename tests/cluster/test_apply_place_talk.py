"""The main job: apply, place, talk, drain in mid-sentence, talk on, delete.

Everything is the product's own, installed by its charts, but for the sidecar's image (see
sidecar_pods). The client is the demo's, and keeps one connection to the gateway throughout.
"""

import asyncio

import pytest
from support.callers import Caller, calling
from support.kube import Json, until
from support.releases import SIDECARS, Voice, example, ledger_of, left_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SESSION = "hello"
DRAIN = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--pod-selector={SIDECARS}")


async def test_apply_place_talk_drain_delete(voice: Voice) -> None:
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    kube.apply(example("session.yaml"), namespace)
    kube.wait(f"dxs/{SESSION}", "condition=Ready", namespace)

    status: Json = kube.get("dxs", SESSION, namespace)["status"]
    pod = kube.get("pod", status["placement"]["pod"], namespace)
    assert pod["metadata"]["uid"] == status["placement"]["podUID"]
    assert pod["metadata"]["labels"]["duplex.dev/occupied"] == "true"

    async with calling(voice, SESSION) as caller:
        await caller.until_unit(5)
        kube.wait(f"dxs/{SESSION}", "jsonpath={.status.phase}=Active", namespace)
        spoke = await caller.until_mid_sentence(after_unit=5)
        await drained(voice, pod["spec"]["nodeName"])
        await settled_elsewhere(voice, caller, spoke, pod["metadata"]["name"])
        await caller.until_unit(caller.last_unit + 5)
        caller.assert_whole()

        await deleted(voice, caller, status)


async def drained(voice: Voice, node: str) -> None:
    """What `kubectl drain` does ends well although the pod's budget forbids to evict it as long
    as it is occupied: the cordon alone makes the operator empty it."""
    drain = ("drain", node, *DRAIN, "--timeout=60s")
    await asyncio.to_thread(voice.cluster.kubectl, *drain, timeout_s=70)
    await asyncio.to_thread(voice.cluster.kubectl, "uncordon", node)


async def settled_elsewhere(voice: Voice, caller: Caller, spoke: Json, old_pod: str) -> None:
    """The sentence was spoken to its end by the old pod; the next unit is a rebuild by another."""
    moved = await caller.until(
        lambda event: event["type"] == "duplex.unit" and event["replica"] != spoke["replica"],
        "a unit on another pod",
    )
    assert moved["rebuild_cause"] == "move"
    ends = [each for each in caller.events if each["type"] == "response.done"]
    assert any(spoke["unit"] < end["duplex"]["unit"] < moved["unit"] for end in ends)
    assert voice.pod_of(SESSION) not in ("", old_pod)
    assert caller.talk.replies


async def deleted(voice: Voice, caller: Caller, status: Json) -> None:
    """While the client talks. Nothing stays: no ledger, no Secret, no finalizer, no taken slot."""
    kube, namespace = voice.cluster, voice.namespace
    await asyncio.to_thread(
        kube.kubectl, "delete", f"dxs/{SESSION}", "--timeout=60s", namespace=namespace, timeout_s=70
    )
    await caller.until(lambda event: event["type"] == "session.closed", "the session's end")
    assert kube.find("dxs", SESSION, namespace) is None
    assert kube.find("secret", status["tokenSecret"]["name"], namespace) is None
    with ledger_of(kube, voice.namespace) as redis:
        until(lambda: left_of(redis, status["ledgerId"]) == [], "the ledger's erasure")
    await asyncio.to_thread(voice.await_free, 2)
    pods = kube.items("pods", namespace, SIDECARS)
    assert {pod["metadata"]["labels"]["duplex.dev/occupied"] for pod in pods} == {"false"}


async def test_the_charts_own_test_holds_a_conversation(voice: Voice) -> None:
    voice.await_free(1)
    said = await asyncio.to_thread(
        voice.cluster.helm, "test", "talk", "-n", voice.namespace, "--logs", timeout_s=120
    )
    assert "Phase:          Succeeded" in said
