"""The whole operator: its pool gets pods, sessions are placed on them, and leave those that go.

A real API server and a real ledger server. This test is scheduler and kubelet: it makes each new
pod ready, with a stand-in sidecar behind the certificate and the token of the pool's Secret.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from fakes.fake_admin import served_with
from redis.asyncio import Redis
from support.api_servers import ApiServer
from support.kube import KubeError
from support.operators import login, until
from support.stand_in_sidecar import StandInSidecar

from duplex_api.constants import API_VERSION, POOL_KIND, SESSION_KIND
from duplex_api.routes import WAKE_FIELD, WAKE_STREAM
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import MissingError
from duplex_operator.kube.resources import PODS, POOLS, SECRETS, SESSIONS
from duplex_operator.names import ADMIN_PORT, LABEL_OCCUPIED
from duplex_operator.objects import ObjectKey
from duplex_operator.reign import Reign
from duplex_operator.resources.pool_secrets import PoolSecret, read_pool_secret
from duplex_operator.settings import OperatorSettings
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Json = dict[str, Any]
WAIT_S = 120.0
NODES = ("move-a", "move-b")
_ADDRESSES = itertools.count(1)


class World:
    """A namespace with an operator, and a kubelet for its pods."""

    def __init__(self, server: ApiServer, namespace: str, redis_url: str) -> None:
        self.server = server
        self.namespace = namespace
        self.redis_url = redis_url
        self.user = KubernetesApi(ApiConnection(login(server.kubeconfig)))
        self.api = KubernetesApi(ApiConnection(login(server.kubeconfig)))
        self.sidecars: dict[str, StandInSidecar] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        settings = OperatorSettings(
            redis_url=self.redis_url,
            namespace=self.namespace,
            identity="test",
            sidecar_image="duplex/sidecar:1",
        )
        reign = Reign(settings, self.api)
        work = (reign.run(), self._kubelet(), self._clients())
        self._tasks = [asyncio.create_task(one) for one in work]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sidecar in self.sidecars.values():
            await sidecar.die()
        for name in await self.pod_names():
            await asyncio.to_thread(self.server.finish_pod, name, self.namespace)
        await self.user.connection.close()
        await self.api.connection.close()

    async def _kubelet(self) -> None:
        while True:
            for pod in (await self.user.list(PODS, self.namespace)).items:
                meta = pod["metadata"]
                if meta.get("deletionTimestamp"):
                    sidecar = self.sidecars.get(meta["uid"])
                    if sidecar is not None:
                        await sidecar.die()
                    await asyncio.to_thread(self.server.finish_pod, meta["name"], self.namespace)
                elif meta["uid"] not in self.sidecars:
                    await self._run(meta["name"], meta["uid"])
            await asyncio.sleep(0.1)

    async def _clients(self) -> None:
        """Of all sessions: attached wherever theirs is, waiting at the gateway if it is nowhere."""
        async with Redis.from_url(self.redis_url, protocol=2) as redis:
            while True:
                running: set[str] = set()
                for sidecar in self.sidecars.values():
                    for uid, session in list(sidecar.sessions.items()):
                        running.add(uid)
                        if not session.attached:
                            sidecar.attach(uid)
                for session in (await self.user.list(SESSIONS, self.namespace)).items:
                    uid = session["metadata"]["uid"]
                    if uid not in running:
                        await redis.xadd(WAKE_STREAM, {WAKE_FIELD: uid})
                await asyncio.sleep(0.2)

    async def _run(self, name: str, uid: str) -> None:
        node = NODES[len(self.sidecars) % len(NODES)]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            await asyncio.to_thread(self.server.create, binding, self.namespace)
        except KubeError:
            return  # deleted before it ran
        secret = await self.secret()
        number = next(_ADDRESSES)
        host = f"127.{os.getpid() % 100 + 100}.{number // 250 + 7}.{number % 250 + 1}"
        sidecar = StandInSidecar(self.redis_url, uid, secret.token, host)
        await sidecar.start(ADMIN_PORT, served_with(secret.certificate_pem, secret.key_pem))
        self.sidecars[uid] = sidecar
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        key = ObjectKey(self.namespace, name)
        with suppress(MissingError):
            await self.user.patch(PODS, key, {"status": status}, version=None, subresource="status")

    async def secret(self) -> PoolSecret:
        raw = await self.user.get(SECRETS, ObjectKey(self.namespace, "demo-admin"))
        secret = read_pool_secret(raw)
        assert secret is not None
        return secret

    async def apply(self, kind: str, name: str, spec: Json) -> None:
        document = {
            "apiVersion": API_VERSION,
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        await asyncio.to_thread(self.server.apply, document, self.namespace)

    async def pool(self) -> Json:
        return dict(await self.user.get(POOLS, ObjectKey(self.namespace, "demo")))

    async def pods(self) -> dict[str, Json]:
        """By uid; those that are being deleted are left out."""
        found = (await self.user.list(PODS, self.namespace)).items
        alive = [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]
        return {pod["metadata"]["uid"]: dict(pod) for pod in alive}

    async def pod_names(self) -> list[str]:
        return [p["metadata"]["name"] for p in (await self.user.list(PODS, self.namespace)).items]

    async def session(self, name: str) -> Json:
        return dict(await self.user.get(SESSIONS, ObjectKey(self.namespace, name)))

    async def placed(self, name: str, *, not_on: str = "") -> str:
        """The uid of the pod where the session and its client are."""

        async def look() -> str:
            status = (await self.session(name)).get("status", {})
            uid = str(status.get("placement", {}).get("podUID", ""))
            return uid if status.get("phase") == "Active" and uid != not_on else ""

        return str(await self.until(look, f"the placement of {name}"))

    async def ready_pods(self, count: int) -> None:
        """So many that the operator has heard of."""

        async def look() -> bool:
            return (await self.pool()).get("status", {}).get("readyReplicas") == count

        await self.until(look, f"{count} ready pods")

    async def until(self, look: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Fails at once, with its reason, when operator, kubelet or clients have failed."""

        async def watched() -> Any:
            for task in self._tasks:
                if task.done():
                    task.result()
            return await look()

        return await until(watched, what, WAIT_S)


@pytest.fixture
async def world(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> AsyncIterator[World]:
    for node in NODES:
        document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
        await asyncio.to_thread(api_server.create, document)
    made = World(api_server, api_namespace, valkey.url)
    await made.start()
    try:
        yield made
    finally:
        try:
            await made.stop()
        finally:
            await asyncio.to_thread(api_server.kubectl, "delete", "node", *NODES)


POOL: Json = {"checkpoint": {"path": "/models/tiny"}, "slots": 2, "drain": {"grace": "5s"}}
SESSION: Json = {"poolRef": {"name": "demo"}}


async def test_a_session_leaves_a_cordoned_node_and_its_pod_goes(world: World) -> None:
    await world.apply(POOL_KIND, "demo", POOL | {"replicas": 2})
    await world.ready_pods(2)
    await world.apply(SESSION_KIND, "talk", SESSION)
    first = await world.placed("talk")
    uid = (await world.session("talk"))["metadata"]["uid"]

    async def occupied() -> bool:
        pods = await world.pods()
        return pods[first]["metadata"]["labels"][LABEL_OCCUPIED] == "true"

    await world.until(occupied, "the label")
    node = (await world.pods())[first]["spec"]["nodeName"]
    await asyncio.to_thread(world.server.kubectl, "cordon", node)
    second = await world.placed("talk", not_on=first)
    assert uid in world.sidecars[second].sessions

    async def gone() -> bool:
        return first not in await world.pods()

    await world.until(gone, "the end of the first pod")
    source, target = world.sidecars[first].calls, world.sidecars[second].calls
    assert source.count("POST sessions/*/hand-over", uid) == 1
    asked = [verb for verb, about in target.made if about == uid]
    assert asked == ["POST sessions/*/prepare"], "made ready once, and never opened"
    assert source.made.index(("POST drain", "")) > source.made.index(
        ("POST sessions/*/hand-over", uid)
    )
    assert source.count("POST sessions/*/park") == 0
    assert uid not in world.sidecars[first].sessions


async def test_what_cannot_be_handed_over_parks_and_goes_on(world: World) -> None:
    await world.apply(POOL_KIND, "demo", POOL | {"replicas": 2})
    await world.ready_pods(2)
    await world.apply(SESSION_KIND, "talk", SESSION)
    first = await world.placed("talk")
    uid = (await world.session("talk"))["metadata"]["uid"]
    for sidecar in world.sidecars.values():
        sidecar.refuse["POST sessions/*/prepare"] = (503, "not_ready")
    node = (await world.pods())[first]["spec"]["nodeName"]
    await asyncio.to_thread(world.server.kubectl, "cordon", node)
    second = await world.placed("talk", not_on=first)
    calls = [verb for verb, about in world.sidecars[second].calls.made if about == uid]
    assert calls[0] == "POST sessions/*/prepare"
    assert set(calls[1:]) == {"PUT sessions/*"}
    assert world.sidecars[first].calls.count("POST sessions/*/hand-over") == 0
    assert uid in world.sidecars[second].sessions


async def test_a_new_template_moves_sessions_pod_by_pod(world: World) -> None:
    await world.apply(POOL_KIND, "demo", POOL | {"replicas": 2, "slots": 2})
    for name in ("one", "two", "three"):
        await world.apply(SESSION_KIND, name, SESSION)
    for name in ("one", "two", "three"):
        await world.placed(name)
    before = set(await world.pods())
    await world.apply(POOL_KIND, "demo", POOL | {"replicas": 2, "image": "duplex/sidecar:2"})

    async def rolled() -> bool:
        pods = await world.pods()
        return len(pods) == 2 and not before & set(pods)

    await world.until(rolled, "the new pods")
    for name in ("one", "two", "three"):
        pod = await world.placed(name)
        uid = (await world.session(name))["metadata"]["uid"]
        assert uid in world.sidecars[pod].sessions


async def test_a_pool_grows_from_nothing_for_its_queue(world: World) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 2}
    await world.apply(POOL_KIND, "demo", POOL | {"slots": 1, "scaling": scaling})
    await world.apply(SESSION_KIND, "talk", SESSION)
    pod = await world.placed("talk")
    await world.ready_pods(1)
    assert (await world.pool())["status"]["replicas"] == 1
    assert (await world.pool())["spec"]["replicas"] == 1
    assert world.sidecars[pod].calls.count("PUT sessions/*") == 1
