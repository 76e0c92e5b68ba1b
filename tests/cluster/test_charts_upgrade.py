"""An earlier release, from packages of both charts with another version and another image tag, is
upgraded to this one while somebody talks, and back.

No earlier release has been published: what is packaged as one is this checkout. So the way of an
upgrade is tested here (who goes, who comes, what a client notices), not what earlier code left.
"""

import asyncio
from collections.abc import Iterator

import pytest
from support.callers import Caller, lasting_gateway_port, speaking, ticket
from support.clusters import OwnCluster
from support.kube import until
from support.releases import (
    CHARTS,
    RELEASE,
    Charts,
    Voice,
    applied,
    applied_beside,
    install_kinds,
    named,
    running_voice,
)

from scripts.cluster import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

EARLIER, NOW = "0.0.9", "0.1.0"
DRAIN_GRACE_S = 5
UPGRADED_WITHIN_S = 300
LONG_TALK_S = 1_500.0
CONTROL = "app.kubernetes.io/component in (operator, gateway)"


@pytest.fixture(scope="module")
def earlier(own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Voice]:
    """A release of that version, and a pool of one real sidecar with two slots."""
    folder = tmp_path_factory.mktemp("packages")
    dockerfile = ROOT / "docker" / "control.Dockerfile"
    own_cluster.build_image(f"duplex-control:{EARLIER}", dockerfile, ROOT)
    for chart in ("duplex-crds", "duplex"):
        versions = ("--version", EARLIER, "--app-version", EARLIER)
        own_cluster.helm("package", str(CHARTS / chart), *versions, "-d", str(folder))
    packages = Charts(*(folder / f"{name}-{EARLIER}.tgz" for name in ("duplex-crds", "duplex")))
    with running_voice(own_cluster, pods=1, slots=2, charts=packages) as running:
        yield running


def images(voice: Voice) -> set[str]:
    """Of the pods of operator and gateway, those that go included."""
    pods = voice.cluster.items("pods", voice.namespace, CONTROL)
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def upgrade(voice: Voice) -> None:
    install_kinds(voice.cluster)
    chart = str(Charts().release)
    grace = ("--set", f"gateway.drainGraceSeconds={DRAIN_GRACE_S}")
    changed(voice, "upgrade", RELEASE, chart, *grace, "--reset-then-reuse-values")


def changed(voice: Voice, *command: str) -> None:
    bound = ("--wait", f"--timeout={UPGRADED_WITHIN_S}s")
    where = ("-n", voice.namespace)
    voice.cluster.helm(*command, *where, *bound, timeout_s=UPGRADED_WITHIN_S + 10)


async def goes_on(voice: Voice, caller: Caller, image: str) -> None:
    """All old pods have gone, and the client talks through a new gateway, having missed nothing."""
    told = f"only {image} in operators and gateways"
    await asyncio.to_thread(until, lambda: images(voice) == {image}, told, UPGRADED_WITHIN_S)
    await caller.until_unit(caller.last_unit + 5)
    caller.assert_whole(connections=1 + len(caller.talk.resumes))


async def test_an_upgrade_under_a_call(earlier: Voice) -> None:
    voice, kube, namespace = earlier, earlier.cluster, earlier.namespace
    assert images(voice) == {f"duplex-control:{EARLIER}"}
    with applied(voice, named("lasting")):
        kube.wait("dxs/lasting", "condition=Ready", namespace)
        call = ticket(kube, "lasting", namespace)
        async with lasting_gateway_port(voice) as port:
            url = f"http://127.0.0.1:{port}/v1"
            async with speaking(url, call, LONG_TALK_S) as caller:
                before = await caller.until_unit(3)
                await asyncio.to_thread(upgrade, voice)
                await goes_on(voice, caller, f"duplex-control:{NOW}")
                # The gateway that went sent its client on; the conversation stayed where it was.
                assert caller.talk.resumes
                assert {unit["replica"] for unit in caller.talk.units} == {before["replica"]}
                async with applied_beside(voice, named("after")):
                    ready = ("dxs/after", "condition=Ready", namespace)
                    await asyncio.to_thread(kube.wait, *ready)
                resumed = len(caller.talk.resumes)
                back = ("rollback", RELEASE, "1")
                await asyncio.to_thread(changed, voice, *back)
                await goes_on(voice, caller, f"duplex-control:{EARLIER}")
                assert len(caller.talk.resumes) > resumed
                assert {unit["replica"] for unit in caller.talk.units} == {before["replica"]}
                active = ("dxs/lasting", "jsonpath={.status.phase}=Active", namespace)
                await asyncio.to_thread(kube.wait, *active)
