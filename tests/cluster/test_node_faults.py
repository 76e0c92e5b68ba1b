"""What a real kubelet does to a pod that talks, and what a real sidecar pod lets in and holds.

A release of its own: pods are broken here in ways that need their time.
"""

import asyncio
import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.callers import REFUSED, Caller, calling, ticket, turned_away
from support.clusters import OwnCluster
from support.kube import Json, KubeError, until
from support.releases import RELEASE, SIDECARS, Voice, applied, ledger_of, named, running_voice
from support.sidecar_pods import READY_TIMEOUT_S

from duplex_api.routes import route_key
from duplex_operator.names import LABEL_VOICE
from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.voice import save_voice, seeded_voice
from duplex_sidecar.cli.places import default_checkpoint
from duplex_sidecar.ledger.token import token_sha256

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

REALTIME_PORT, ADMIN_PORT = 8765, 8766
SIDECAR = "duplex-sidecar"
STORAGE_MIB = 512
CHOOSE_FIRST = "echo 1000 >/proc/1/oom_score_adj"
TAKE_MEMORY = """python3 -c '
import os, time
for _ in range(100):
    if os.fork() == 0:
        held = b"x" * 2**26
        time.sleep(60)
        os._exit(0)
time.sleep(60)'"""
"""In small parts, each of which the kernel holds less against than the first process."""
NOT_READY_WITHIN_S = 180.0
EVICTED_WITHIN_S = 240.0
TOKEN_NOTICED_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def voice(own_cluster: OwnCluster) -> Iterator[Voice]:
    limits = {"ephemeral-storage": f"{STORAGE_MIB}Mi"}
    # As much as the limit: the kernel then holds little against the engines, and it can be told to
    # take the first process.
    requests = {"memory": "5Gi"}
    resources = {"limits": limits, "requests": requests}
    with running_voice(own_cluster, resources=resources) as running:
        yield running


async def moved(caller: Caller, before: Json) -> None:
    """A unit came from another pod than this one did, and the client has missed nothing."""
    await caller.until(
        lambda event: event["type"] == "duplex.unit" and event["replica"] != before["replica"],
        "a unit on another pod",
    )
    await caller.until_unit(caller.last_unit + 3)
    caller.assert_whole()


async def pod_that_talks(voice: Voice, session: str) -> Json:
    """Beside the client, which is cut off when it does not read."""

    def look() -> Json:
        return voice.cluster.get("pod", voice.pod_of(session), voice.namespace)

    return await asyncio.to_thread(look)


def serving(voice: Voice) -> list[Json]:
    """Pods that are ready and stay: one that an earlier test has broken may still be there."""

    def serves(pod: Json) -> bool:
        conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
        return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]

    pods = voice.cluster.items("pods", voice.namespace, SIDECARS)
    return [pod for pod in pods if serves(pod)]


async def shell(voice: Voice, pod: str, program: str) -> str:
    """In the sidecar's container; what it printed. The container may end meanwhile."""
    arguments = ("exec", pod, "-c", SIDECAR, "--", "sh", "-c", program)
    try:
        return await asyncio.to_thread(voice.cluster.kubectl, *arguments, namespace=voice.namespace)
    except KubeError as error:
        return str(error)


# --- a pod ends --------------------------------------------------------------------------------


async def test_a_pod_that_talks_runs_out_of_memory(voice: Voice) -> None:
    """The kernel kills its first process. The kubelet starts the container anew meanwhile."""
    voice.await_free(2)
    with applied(voice, named("oom")):
        voice.cluster.wait("dxs/oom", "condition=Ready", voice.namespace)
        async with calling(voice, "oom") as caller:
            before = await caller.until_unit(4)
            pod = (await pod_that_talks(voice, "oom"))["metadata"]["name"]
            # The kernel is told whom to take; then memory is taken until it must.
            take = asyncio.create_task(shell(voice, pod, f"{CHOOSE_FIRST}; {TAKE_MEMORY}"))
            await moved(caller, before)
            await take

        def killed() -> Json | None:
            found = voice.cluster.get("pod", pod, voice.namespace)
            (status,) = found["status"]["containerStatuses"]
            return status["lastState"].get("terminated")

        assert until(killed, "the container's end")["reason"] == "OOMKilled"
    voice.await_free(2)


async def test_a_pod_that_talks_is_evicted_by_its_kubelet(voice: Voice) -> None:
    """For what it wrote. No budget counts here, and nobody asks the operator."""
    voice.await_free(2)
    with applied(voice, named("evicted")):
        voice.cluster.wait("dxs/evicted", "condition=Ready", voice.namespace)
        async with calling(voice, "evicted") as caller:
            before = await caller.until_unit(4)
            pod = (await pod_that_talks(voice, "evicted"))["metadata"]
            write = f"head -c {STORAGE_MIB + 128}M /dev/zero >$HOME/too-much"
            await shell(voice, pod["name"], write)

            def evicted() -> bool:
                found = voice.cluster.find("pod", pod["name"], voice.namespace)
                reason = found and found["status"].get("reason")
                return found is None or found["metadata"]["uid"] != pod["uid"] or bool(reason)

            evicting = until, evicted, "the eviction", EVICTED_WITHIN_S
            await asyncio.to_thread(*evicting)
            await moved(caller, before)
    voice.await_free(2)


async def test_an_eviction_is_refused_while_somebody_talks(voice: Voice) -> None:
    """By the pod's budget; it leaves no trace. Afterwards the pod goes, and another one comes."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    with applied(voice, named("guarded")):
        kube.wait("dxs/guarded", "condition=Ready", namespace)
        async with calling(voice, "guarded") as caller:
            before = await caller.until_unit(2)
            pod = await pod_that_talks(voice, "guarded")
            with pytest.raises(KubeError, match=r"disruption budget|429"):
                await asyncio.to_thread(evict, voice, pod)
            after = await caller.until_unit(caller.last_unit + 3)
            assert after["replica"] == before["replica"]
            status = (await pod_that_talks(voice, "guarded"))["status"]
            assert "DisruptionTarget" not in {each["type"] for each in status["conditions"]}
    voice.await_free(2)
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    empty = r"jsonpath={.metadata.labels.duplex\.dev/occupied}=false"
    kube.wait(f"pod/{name}", empty, namespace)
    evict(voice, pod)
    until(lambda: uid not in uids(voice), "the pod's end", READY_TIMEOUT_S)
    voice.await_free(2)


def uids(voice: Voice) -> set[str]:
    pods = voice.cluster.items("pods", voice.namespace, SIDECARS)
    return {pod["metadata"]["uid"] for pod in pods}


def evict(voice: Voice, pod: Json) -> None:
    name = pod["metadata"]["name"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": voice.namespace},
    }
    path = f"/api/v1/namespaces/{voice.namespace}/pods/{name}/eviction"
    voice.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


# --- a kubelet ends ----------------------------------------------------------------------------


def on_this_machine(voice: Voice) -> OwnCluster:
    assert isinstance(voice.cluster, OwnCluster)
    return voice.cluster


@contextmanager
def without_kubelet(voice: Voice, node: str) -> Iterator[None]:
    machine = on_this_machine(voice)
    command = machine.kill_kubelet(node)
    try:
        yield
    finally:
        machine.start_kubelet(node, command)
        machine.wait(f"node/{node}", "condition=Ready", timeout_s=NOT_READY_WITHIN_S)


async def test_a_kubelet_is_killed_under_a_pod_that_talks(voice: Voice) -> None:
    """The pod lives, and so does the session, also when the cluster takes its node for lost."""
    kube = voice.cluster
    voice.await_free(2)
    with applied(voice, named("orphan")):
        kube.wait("dxs/orphan", "condition=Ready", voice.namespace)
        async with calling(voice, "orphan") as caller:
            before = await caller.until_unit(2)
            node = (await pod_that_talks(voice, "orphan"))["spec"]["nodeName"]
            with without_kubelet(voice, node):
                lost = (f"node/{node}", "condition=Ready=Unknown", None, NOT_READY_WITHIN_S)
                await asyncio.to_thread(kube.wait, *lost)
                after = await caller.until_unit(caller.last_unit + 3)
                assert after["replica"] == before["replica"]
                caller.assert_whole()
    voice.await_free(2)


async def test_a_node_dies_and_nobody_says_so(voice: Voice) -> None:
    """The API server believes in the pod for most of a minute: its lease has run out before."""
    voice.await_free(2)
    with applied(voice, named("bereft")):
        voice.cluster.wait("dxs/bereft", "condition=Ready", voice.namespace)
        async with calling(voice, "bereft") as caller:
            before = await caller.until_unit(4)
            pod = await pod_that_talks(voice, "bereft")
            with without_kubelet(voice, pod["spec"]["nodeName"]):
                on_this_machine(voice).kill_processes(pod["metadata"]["uid"])
                await moved(caller, before)
                still = (await pod_that_talks(voice, "bereft"))["metadata"]["uid"]
                assert still != pod["metadata"]["uid"]
    voice.await_free(2)


# --- what a pod lets in, and what it holds -------------------------------------------------------


def test_a_sidecar_has_no_way_into_the_cluster(voice: Voice) -> None:
    voice.await_free(2)
    pods = serving(voice)
    assert len(pods) == 2
    for pod in pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not any("projected" in volume for volume in pod["spec"]["volumes"])
        name = pod["metadata"]["name"]
        look = "ls -d /var/run/secrets/* /run/secrets/* 2>/dev/null; true"
        printed = voice.cluster.execute(name, voice.namespace, "sh", "-c", look)
        assert printed == ""


def test_every_port_of_a_sidecar_asks_for_its_token(voice: Voice) -> None:
    """Those that anybody in the cluster can reach: what listens is looked up in the pod."""
    voice.await_free(2)
    kube, namespace = voice.cluster, voice.namespace
    pod = serving(voice)[0]["metadata"]["name"]
    tables = kube.execute(pod, namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    assert reachable(tables) == {REALTIME_PORT, ADMIN_PORT}
    for port, scheme, paths in (
        (REALTIME_PORT, "http", ("/metrics", "/statusz", "/admin/v1/sessions", "/admin/v1/feed")),
        (ADMIN_PORT, "https", ("/", "/metrics", "/admin/v1/sessions", "/admin/v1/feed")),
    ):
        with kube.port_forward(f"pod/{pod}", port, namespace) as local:
            for path in paths:
                url = f"{scheme}://127.0.0.1:{local}{path}"
                assert {status_of(url, token) for token in ("", "wrong")} == {401}, url
    with kube.port_forward(f"pod/{pod}", REALTIME_PORT, namespace) as local:
        url = f"ws://127.0.0.1:{local}/v1/realtime?model=duplex&session=unknown"
        for token in ("", "wrong"):
            assert asyncio.run(turned_away(url, token)) == REFUSED


def reachable(tables: str) -> set[int]:
    """Ports of /proc/net/tcp and tcp6 that listen on more than the pod's own loopback."""
    found: set[int] = set()
    for line in tables.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3] == "0A":
            address, _, port = fields[1].rpartition(":")
            if not address.endswith("7F") and address != f"{'0' * 24}01000000":
                found.add(int(port, 16))
    return found


def status_of(url: str, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    unchecked = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(request, timeout=60, context=unchecked) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


async def test_a_token_is_changed_while_its_client_talks(voice: Voice) -> None:
    """The connection that stands goes on; the old one lets in until somebody talks under the new
    one."""
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(1)
    old, new = "o" * 32, "n" * 32
    both = [token_sha256(old), token_sha256(new)]
    with applied(voice, named("changed", tokenSecretRef={"name": "mine", "key": "token"})):
        kube.apply(token_secret(old), namespace)
        kube.wait("dxs/changed", "condition=Ready", namespace)
        uid = ticket(kube, "changed", namespace).uid
        with kube.port_forward(f"service/{RELEASE}-gateway", 80, namespace) as port:
            url = f"ws://127.0.0.1:{port}/v1/realtime?model=duplex&session={uid}"
            async with calling(voice, "changed") as caller:
                await caller.until_unit(2)
                await asyncio.to_thread(kube.apply, token_secret(new), namespace)
                async with asyncio.timeout(TOKEN_NOTICED_WITHIN_S):
                    while await asyncio.to_thread(route_tokens, voice, uid) != both:
                        await caller.until_unit(caller.last_unit + 1)
                await caller.until_unit(caller.last_unit + 3)
                caller.assert_whole()
            async with calling(voice, "changed") as again:
                await again.until_unit(caller.last_unit + 2)
                async with asyncio.timeout(TOKEN_NOTICED_WITHIN_S):
                    while await asyncio.to_thread(route_tokens, voice, uid) == both:
                        await again.until_unit(again.last_unit + 1)
                assert await turned_away(url, old) == REFUSED


def route_tokens(voice: Voice, uid: str) -> list[str]:
    """sha256 of the tokens that the gateway takes."""
    with ledger_of(voice.cluster, voice.namespace) as redis:
        found: Any = redis.hmget(route_key(uid), "token_sha256", "token_sha256_next")
        return [hash_.decode() for hash_ in found if hash_]


def token_secret(token: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "mine"},
        "stringData": {"token": token},
    }


async def test_a_session_speaks_with_a_voice_that_it_brings(voice: Voice, tmp_path: Path) -> None:
    kube, namespace = voice.cluster, voice.namespace
    voice.await_free(2)
    config = read_config(default_checkpoint()).token2wav
    file = save_voice(tmp_path, seeded_voice("calm", 100, 7, config)).read_bytes()
    secret: Json = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "calm", "labels": {LABEL_VOICE: "true"}},
        "data": {"calm.safetensors": base64.b64encode(file).decode()},
    }
    kube.create(secret, namespace)
    with applied(voice, named("calm", voice={"secretRef": {"name": "calm"}})):
        kube.wait("dxs/calm", "condition=Ready", namespace)
        async with calling(voice, "calm") as caller:
            spoke = await caller.until_mid_sentence(after_unit=1)
            pod = await asyncio.to_thread(voice.pod_of, "calm")
            kill = ("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")
            await asyncio.to_thread(kube.kubectl, *kill, namespace=namespace)
            await moved(caller, spoke)
            await caller.until_mid_sentence(after_unit=caller.last_unit)
            assert caller.talk.replies
    kube.kubectl("delete", "secret", "calm", namespace=namespace)
