"""The pool reconciler on a real API server, one look at a time; no watch, no leader.

Nothing runs pods there: the rig makes them ready and gives each a fake admin port.
"""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import kopf
import yaml
from fakes.fake_admin import FakeAdmin
from support.api_servers import ApiServer

from duplex_api.constants import API_VERSION, POOL_KIND, SESSION_KIND
from duplex_operator.claims import Claims
from duplex_operator.context import Context, wall_clock_ms
from duplex_operator.fleet import Fleet
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.resources import NODES, PODS, POOLS, SESSIONS
from duplex_operator.names import POD_SELECTOR
from duplex_operator.objects import (
    ObjectKey,
    PodObject,
    read_node,
    read_pod,
    read_pool,
    read_session,
    timestamp,
)
from duplex_operator.occupancy import Occupancy
from duplex_operator.placements import PlacementBoard
from duplex_operator.reconcile_pool import PoolReconciler
from duplex_operator.resources.pool_secrets import PoolSecret, read_pool_secret
from duplex_operator.routes import Routes
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

Json = dict[str, Any]

POOL: Json = {"checkpoint": {"path": "/models/tiny"}, "slots": 4}
NO_LEDGER = "redis://127.0.0.1:1/0"
"""No part of a pool's reconciliation asks the ledger."""
WAIT_S = 20.0
POLL_S = 0.05


def connection(server: ApiServer) -> kopf.ConnectionInfo:
    config = yaml.safe_load(server.kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    return kopf.ConnectionInfo(
        server=cluster["server"],
        ca_path=cluster.get("certificate-authority"),
        ca_data=cluster.get("certificate-authority-data"),
        certificate_path=user.get("client-certificate"),
        certificate_data=user.get("client-certificate-data"),
        private_key_path=user.get("client-key"),
        private_key_data=user.get("client-key-data"),
        token=user.get("token"),
    )


@dataclass
class PoolRig:
    """One pool named `demo` in a namespace. late_ms: how far its clock is ahead of ours."""

    server: ApiServer
    namespace: str
    api: KubernetesApi
    stack: AsyncExitStack
    late_ms: int = 0
    admins: dict[str, FakeAdmin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_operator()

    def start_operator(self, release: str = "duplex", ledger: str = NO_LEDGER) -> None:
        """As after a restart: nothing is remembered. release: the namespace of one."""
        store = Store()
        dirty = DirtySet()
        board = PlacementBoard()
        fleet = Fleet(store, dirty)
        settings = OperatorSettings(ledger, release, "rig", sidecar_image="duplex/sidecar:1")
        self.context = Context(
            settings=settings,
            store=store,
            dirty=dirty,
            api=self.api,
            fleet=fleet,
            board=board,
            routes=Routes(NO_LEDGER),
            occupancy=Occupancy(store, self.api),
            claims=Claims(store, settings.watches),
            now_ms=lambda: wall_clock_ms() + self.late_ms,
        )
        self.reconciler = PoolReconciler(self.context, pace_s=0.0)
        self.stack.push_async_callback(fleet.close)
        self.stack.push_async_callback(self.context.routes.close)

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.namespace, "demo")

    # The user

    async def apply_pool(self, **spec: Any) -> None:
        document = {
            "apiVersion": API_VERSION,
            "kind": POOL_KIND,
            "metadata": {"name": "demo"},
            "spec": POOL | spec,
        }
        await asyncio.to_thread(self.server.apply, document, self.namespace)

    async def kubectl(self, *arguments: str) -> str:
        return await asyncio.to_thread(self.server.kubectl, *arguments, namespace=self.namespace)

    async def place(self, name: str, pod: PodObject) -> str:
        """A session with a placement there. Returns its uid."""
        body = {
            "apiVersion": API_VERSION,
            "kind": SESSION_KIND,
            "metadata": {"name": name},
            "spec": {"poolRef": {"name": "demo"}},
        }
        made = await self.api.create(SESSIONS, self.namespace, body)
        placement = {"pod": pod.meta.key.name, "podUID": pod.meta.uid, "fence": 1}
        await self._session_status(name, {"placement": placement})
        return str(made["metadata"]["uid"])

    async def unplace(self, name: str) -> None:
        await self._session_status(name, {"placement": None})

    async def _session_status(self, name: str, status: Json) -> None:
        key = ObjectKey(self.namespace, name)
        await self.api.patch(SESSIONS, key, {"status": status}, version=None, subresource="status")

    # The cluster

    async def make_ready(self, pod: PodObject, *, sessions: tuple[str, ...] = ()) -> FakeAdmin:
        """Its sidecar answers, and its feed is heard."""
        secret = await self.secret()
        admin = FakeAdmin(pod.meta.uid, {secret.token}, sessions=dict.fromkeys(sessions, "ready"))
        address = (
            f"127.{secrets.randbelow(200) + 1}.{secrets.randbelow(250)}.{len(self.admins) + 1}"
        )
        serving = admin.serving(address, secret.certificate_pem, secret.key_pem)
        await self.stack.enter_async_context(serving)
        self.admins[pod.meta.uid] = admin
        running = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        await self.pod_status(pod, running)
        await self.until(lambda: self._heard(pod.meta.uid), "the feed")
        return admin

    async def all_ready(self) -> None:
        for pod in self.pods():
            if not pod.ready and not pod.meta.deleting:
                await self.make_ready(pod)

    def _heard(self, pod_uid: str) -> bool:
        feed = self.context.fleet.pod(pod_uid)
        return feed is not None and feed.connected

    async def pod_status(self, pod: PodObject, status: Json, *, ready: bool = True) -> None:
        now = timestamp(self.context.now_ms())
        answer = "True" if ready else "False"
        conditions = [{"type": "Ready", "status": answer, "lastTransitionTime": now}]
        body = {"status": {"conditions": conditions} | status}
        await self.api.patch(PODS, pod.meta.key, body, version=None, subresource="status")
        await self.refresh()

    async def add_node(self, name: str) -> None:
        await self.api.create(
            NODES, "", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        )
        self.stack.callback(self.server.kubectl, "delete", "node", name)

    async def bind(self, pod: PodObject, node: str) -> None:
        """As a scheduler does."""
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod.meta.key.name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await asyncio.to_thread(self.server.create, body, self.namespace)
        self.stack.callback(self.server.finish_pod, pod.meta.key.name, self.namespace)

    # The operator

    async def refresh(self) -> None:
        """What a relist does."""
        store, namespace = self.context.store, self.namespace
        for resource, shelf, read, selector in (
            (POOLS, store.pools, read_pool, ""),
            (SESSIONS, store.sessions, read_session, ""),
            (NODES, store.nodes, read_node, ""),
            (PODS, store.pods, read_pod, POD_SELECTOR),
        ):
            listing = await self.api.list(resource, namespace, selector=selector)
            found = [one for one in map(read, listing.items) if one is not None]  # type: ignore[arg-type]
            shelf.replace_all(found, listing.version)  # type: ignore[attr-defined]

    async def look(self, times: int = 1) -> float | None:
        after_s = None
        for _ in range(times):
            await self.refresh()
            after_s = await self.reconciler.reconcile(self.key)
        await self.refresh()
        return after_s

    async def look_until(self, true: Callable[[], bool], what: str) -> None:
        """Looks again and again, as the dirty set would."""
        for _ in range(round(WAIT_S / POLL_S)):
            if true():
                return
            await self.look()
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"{what} did not come")

    async def until(self, true: Callable[[], bool], what: str) -> None:
        for _ in range(round(WAIT_S / POLL_S)):
            if true():
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"{what} did not come")

    def pods(self) -> list[PodObject]:
        return [pod for pod in self.context.store.pods_of(self.key) if not pod.meta.deleting]

    def names(self) -> set[str]:
        return {pod.meta.key.name for pod in self.pods()}

    async def pool(self) -> Json:
        return await asyncio.to_thread(self.server.get, "dxp", "demo", self.namespace)

    async def conditions(self) -> dict[str, tuple[str, str]]:
        status = (await self.pool())["status"]
        return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}

    async def secret(self) -> PoolSecret:
        raw = await asyncio.to_thread(self.server.get, "secret", "demo-admin", self.namespace)
        secret = read_pool_secret(raw)
        assert secret is not None
        return secret

    async def event_reasons(self) -> list[str]:
        events = await asyncio.to_thread(self.server.items, "events.events.k8s.io", self.namespace)
        return [event["reason"] for event in events]


@asynccontextmanager
async def pool_rig(server: ApiServer, namespace: str) -> AsyncIterator[PoolRig]:
    api = KubernetesApi(ApiConnection(connection(server)))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(api.connection.close)
        yield PoolRig(server, namespace, api, stack)


def decoded(data: dict[str, str], key: str) -> str:
    return base64.b64decode(data[key]).decode()
