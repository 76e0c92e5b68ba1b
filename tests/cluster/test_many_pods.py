"""Eight pods of one pool, on two nodes, under a release of its own.

Scheduler, kubelets, operator, gateway, ledger and sidecars are the real ones; behind the sidecars
are fake stages, since the engines of eight pods do not fit on one machine.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from support.callers import Caller, all_calling
from support.clusters import OwnCluster
from support.kube import Json
from support.releases import SIDECARS, Voice, delete_and_wait, named, running_voice
from support.sidecar_pods import Stages

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PODS, SLOTS = 8, 4
FULL = 7
"""Pods whose slots are all taken; the last one takes up what one of them loses."""
SPEED = 0.5
SECONDS = 300.0
STAYS = {"disconnectGrace": "1h", "parkAfter": "1h"}
"""Sessions without a client wait for one."""


@pytest.fixture(scope="module")
def voice(own_cluster: OwnCluster) -> Iterator[Voice]:
    with running_voice(own_cluster, PODS, slots=SLOTS, stages=Stages.FAKE) as running:
        yield running


def placed(voice: Voice) -> dict[str, str]:
    """By session, its pod."""
    found = voice.cluster.items("dxs", voice.namespace)
    return {each["metadata"]["name"]: each["status"]["placement"]["pod"] for each in found}


@pytest.mark.long
async def test_a_pod_of_eight_dies_under_its_sessions(voice: Voice) -> None:
    """The others never notice; its own go on elsewhere, with nothing missing."""
    kube, namespace = voice.cluster, voice.namespace
    nodes = {each["spec"]["nodeName"] for each in kube.items("pods", namespace, SIDECARS)}
    assert len(nodes) == 2
    sessions = [named(f"call-{n}", lifecycle=STAYS) for n in range(FULL * SLOTS)]
    kube.apply(sessions, namespace)
    kube.kubectl("wait", "dxs", "--all", "--for=condition=Ready", namespace=namespace)
    before = placed(voice)
    assert sorted(Counter(before.values()).values()) == [SLOTS] * FULL
    victim = before["call-0"]
    lost = sorted(name for name, pod in before.items() if pod == victim)
    others = next(pod for pod in before.values() if pod != victim)
    left = sorted(name for name, pod in before.items() if pod == others)
    async with all_calling(voice, lost + left, seconds=SECONDS, speed=SPEED) as callers:
        before_units = [await caller.until_unit(2) for caller in callers]
        now = ("--grace-period=0", "--force", "--wait=false")
        await asyncio.to_thread(kube.kubectl, "delete", "pod", victim, *now, namespace=namespace)
        for name, caller, unit in zip(lost + left, callers, before_units, strict=True):
            if name in lost:
                await moved(caller, unit)
            else:
                later = await caller.until_unit(caller.last_unit + 1)
                assert later["replica"] == unit["replica"]
        for caller in callers:
            caller.assert_whole()
    after = placed(voice)
    assert {name for name in before if before[name] != after[name]} == set(lost)
    delete_and_wait(voice, "dxs", "--all", namespace=namespace)
    voice.await_free(PODS * SLOTS)


async def moved(caller: Caller, before: Json) -> None:
    unit = await caller.until(
        lambda event: event["type"] == "duplex.unit" and event["replica"] != before["replica"],
        "a unit on another pod",
    )
    await caller.until_unit(unit["unit"] + 1)
