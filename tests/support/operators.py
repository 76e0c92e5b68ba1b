"""An operator in the test's own loop against a real API server, and pods whose sidecars are
stand-ins."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kopf
from redis.asyncio import Redis
from support.stand_in_sidecar import StandInSidecar

from duplex_api.constants import API_VERSION, POOL_KIND, SESSION_KIND
from duplex_api.routes import WAKE_FIELD, WAKE_STREAM
from duplex_operator.connect import connection
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import MissingError
from duplex_operator.kube.resources import EVENTS, PODS, POOLS, SESSIONS
from duplex_operator.names import (
    ADMIN_PORT,
    ANNOTATION_MARK,
    COMPONENT_SIDECAR,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_POOL,
    SIDECAR_CONTAINER,
)
from duplex_operator.objects import ObjectKey
from duplex_operator.reign import Reign
from duplex_operator.settings import OperatorSettings
from duplex_operator.sidecar_client import AdminCredentials

Json = dict[str, Any]

ADMIN_TOKEN = "the-admin-token-of-the-test-pool"
WAIT_S = 90.0
"""For what takes a second or two where nobody else wants the machine."""
_ADDRESSES = itertools.count(1)
_NET = f"127.{random.Random(os.getpid()).randrange(16, 250)}"
# A test's pods have addresses of their own: all sidecars listen on the same port.


def login(kubeconfig: Path) -> kopf.ConnectionInfo:
    """As `connection`, for this file."""
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(kubeconfig)
    try:
        return connection()
    finally:
        if before is None:
            del os.environ["KUBECONFIG"]
        else:
            os.environ["KUBECONFIG"] = before


@dataclass(slots=True)
class Place:
    """One namespace with one pool, its pods, and a user's hands."""

    user: KubernetesApi
    kubeconfig: Path
    redis_url: str
    namespace: str
    pool: str = "pool"
    pods: dict[str, StandInSidecar] = field(default_factory=dict)

    @property
    def pool_key(self) -> ObjectKey:
        return ObjectKey(self.namespace, self.pool)

    async def make_pool(self, slots: int = 2, **spec: Any) -> None:
        body = {
            "apiVersion": API_VERSION,
            "kind": POOL_KIND,
            "metadata": {"name": self.pool},
            "spec": {"checkpoint": {"path": "/model"}, "slots": slots, **spec},
        }
        await self.user.create(POOLS, self.namespace, body)

    async def make_pod(
        self,
        name: str,
        *,
        slots: int = 2,
        node: str = "",
        kind: type[StandInSidecar] = StandInSidecar,
    ) -> StandInSidecar:
        """A pod object that claims to run, and its sidecar, which does."""
        number = next(_ADDRESSES)
        host = f"{_NET}.{number // 250}.{number % 250 + 1}"
        labels = {
            LABEL_MANAGED_BY: FIELD_MANAGER,
            LABEL_COMPONENT: COMPONENT_SIDECAR,
            LABEL_POOL: self.pool,
        }
        security = {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        spec: Json = {
            "containers": [
                {"name": SIDECAR_CONTAINER, "image": "none", "securityContext": security}
            ]
        } | ({"nodeName": node} if node else {})
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
        }
        made = await self.user.create(PODS, self.namespace, body)
        uid = str(made["metadata"]["uid"])
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        sidecar = kind(self.redis_url, uid, ADMIN_TOKEN, host, slots=slots)
        await sidecar.start(ADMIN_PORT)
        key = ObjectKey(self.namespace, name)
        await self.user.patch(PODS, key, {"status": status}, version=None, subresource="status")
        self.pods[name] = sidecar
        return sidecar

    async def mark_pods(self, *, draining: str, staying: str) -> None:
        """As the operator of a pool that empties one of them."""
        for name, mark in ((draining, "draining"), (staying, None)):
            body = {"metadata": {"annotations": {ANNOTATION_MARK: mark}}}
            await self.user.patch(PODS, ObjectKey(self.namespace, name), body, version=None)

    async def kill_pod(self, name: str) -> None:
        """Process and object go at the same time."""
        sidecar = self.pods.pop(name)
        await sidecar.die()
        await self.user.delete(
            PODS, ObjectKey(self.namespace, name), uid=sidecar.pod_uid, grace_s=0
        )

    async def kill_sidecar(self, name: str, reason: str) -> StandInSidecar:
        """The process alone goes; the pod's object says so and lives on."""
        sidecar = self.pods.pop(name)
        await sidecar.die()
        ended = {"terminated": {"reason": reason, "exitCode": 137}}
        container = {
            "name": SIDECAR_CONTAINER,
            "image": "none",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": ended,
        }
        await self.user.patch(
            PODS,
            ObjectKey(self.namespace, name),
            {"status": {"containerStatuses": [container]}},
            version=None,
            subresource="status",
        )
        return sidecar

    async def make_session(self, name: str, **spec: Any) -> str:
        """Returns its uid."""
        body = {
            "apiVersion": API_VERSION,
            "kind": SESSION_KIND,
            "metadata": {"name": name},
            "spec": {"poolRef": {"name": self.pool}, **spec},
        }
        made = await self.user.create(SESSIONS, self.namespace, body)
        return str(made["metadata"]["uid"])

    async def change_session(self, name: str, **spec: Any) -> None:
        await self.user.patch(
            SESSIONS, ObjectKey(self.namespace, name), {"spec": spec}, version=None
        )

    async def wake_session(self, redis: Redis, name: str, uid: str) -> None:
        """Until it is not parked any more: asked for again and again, as a gateway does, since one
        call may come to nothing."""

        async def woken() -> bool:
            await redis.xadd(WAKE_STREAM, {WAKE_FIELD: uid})
            return (await self.status(name)).get("phase") != "Parked"

        await until(woken, f"{name} woken", poll_s=1.0)

    async def delete_session(self, name: str) -> None:
        session = await self.session(name)
        assert session is not None
        uid = str(session["metadata"]["uid"])
        await self.user.delete(SESSIONS, ObjectKey(self.namespace, name), uid=uid)

    async def session(self, name: str) -> Json | None:
        try:
            return dict(await self.user.get(SESSIONS, ObjectKey(self.namespace, name)))
        except MissingError:
            return None

    async def status(self, name: str) -> Json:
        session = await self.session(name)
        return {} if session is None else session.get("status", {})

    async def phase(self, name: str, *phases: str, timeout_s: float = WAIT_S) -> Json:
        """Waits until the session's phase is one of these; returns its status."""

        async def look() -> Json | None:
            status = await self.status(name)
            return status if status.get("phase") in phases else None

        return await until(look, f"{name} {' or '.join(phases)}", timeout_s)

    async def gone(self, name: str, timeout_s: float = WAIT_S) -> None:
        async def look() -> bool:
            return await self.session(name) is None

        await until(look, f"{name} gone", timeout_s)

    async def events(self, name: str) -> list[Json]:
        """Events about one session, oldest first."""
        found = (await self.user.list(EVENTS, self.namespace)).items
        about = [dict(event) for event in found if event["regarding"]["name"] == name]
        return sorted(about, key=lambda event: event["eventTime"])

    def owner_of(self, uid: str) -> list[str]:
        """The pods whose sidecars run this session."""
        return [name for name, sidecar in self.pods.items() if uid in sidecar.sessions]

    async def close(self) -> None:
        for sidecar in self.pods.values():
            await sidecar.die()
        await self.user.connection.close()


@asynccontextmanager
async def placed(
    kubeconfig: Path, redis_url: str, namespace: str, pool: str = "pool"
) -> AsyncGenerator[Place]:
    place = Place(
        KubernetesApi(ApiConnection(login(kubeconfig))), kubeconfig, redis_url, namespace, pool
    )
    try:
        yield place
    finally:
        await place.close()


class RunningOperator:
    """A reign without an election, pools looked after by nobody: `place` makes the pods."""

    def __init__(self, place: Place, api: KubernetesApi, **settings: Any) -> None:
        base = OperatorSettings(
            redis_url=place.redis_url,
            namespace=place.namespace,
            identity="test",
            watch_namespaces=(place.namespace,),
            gateway_endpoint="wss://duplex.example/v1/realtime",
        )
        self.api = api
        self.reign = Reign(replace(base, **settings), api)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        fleet = self.reign.context.fleet

        async def pools(key: ObjectKey) -> float | None:
            fleet.set_credentials(key, AdminCredentials(ADMIN_TOKEN, ""))
            return None

        self._task = asyncio.create_task(self.reign.run(pools))

    async def watching(self) -> None:
        """Returns when the watches stand."""

        async def stand() -> bool:
            return self.reign.watch.stands

        await until(stand, "the watches")

    async def hears(self, *pods: StandInSidecar) -> None:
        """Returns when it would place sessions on each of them: one that asks before waits, and
        is told so after a second."""
        fleet = self.reign.context.fleet

        async def takes_sessions() -> bool:
            feeds = [fleet.pod(pod.pod_uid) for pod in pods]
            return all(feed is not None and feed.takes_sessions for feed in feeds)

        await until(takes_sessions, "the feeds of the pods")

    async def stop(self) -> None:
        """As a killed process: nothing is finished, nothing is given back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.api.connection.close()

    def failure(self) -> BaseException | None:
        done = self._task is not None and self._task.done() and not self._task.cancelled()
        return self._task.exception() if done and self._task is not None else None


class Reaper:
    """Stops an operator dead at its n-th step outward, before or after the step took effect.

    Steps are the writes to Kubernetes, the calls to sidecars and the writes of route records, in
    the order in which they are made. Everything after it hangs until the operator is stopped."""

    def __init__(self, at_step: int, *, after: bool, passing: Set[str] = frozenset()) -> None:
        """passing: steps that do not count."""
        self._at_step = at_step
        self._after = after
        self._passing = passing
        self.steps: list[str] = []
        self.dead = asyncio.Event()

    def watch(self, operator: RunningOperator, patch: Callable[[object, str, Any], None]) -> None:
        """patch: pytest's `monkeypatch.setattr`."""
        for name in ("create", "patch", "delete"):
            patch(operator.api, name, self._mortal(name, getattr(operator.api, name)))
        routes = operator.reign.context.routes
        for name in ("write", "drop"):
            patch(routes, name, self._mortal(f"route-{name}", getattr(routes, name)))
        fleet = operator.reign.context.fleet
        for name in ("client", "any_client"):
            patch(fleet, name, self._mortal_clients(getattr(fleet, name)))

    def _mortal_clients(self, find: Callable[..., object]) -> Callable[..., object]:
        def client(*pod_uid: str) -> object:
            found = find(*pod_uid)
            return None if found is None else _MortalClient(found, self._mortal)

        return client

    def _mortal(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def step(*arguments: Any, **named: Any) -> Any:
            if name in self._passing:
                return await call(*arguments, **named)
            self.steps.append(name)
            last = len(self.steps) >= self._at_step
            if last and not self._after:
                await self._die()
            answer = await call(*arguments, **named)
            if last:
                await self._die()
            return answer

        return step

    async def _die(self) -> None:
        self.dead.set()
        await asyncio.Event().wait()


class _MortalClient:
    def __init__(self, client: object, mortal: Callable[[str, Any], Any]) -> None:
        self._client = client
        self._mortal = mortal

    def __getattr__(self, name: str) -> Any:
        return self._mortal(f"sidecar-{name}", getattr(self._client, name))


@asynccontextmanager
async def operating(place: Place, **settings: Any) -> AsyncGenerator[RunningOperator]:
    operator = RunningOperator(
        place, KubernetesApi(ApiConnection(login(place.kubeconfig))), **settings
    )
    await operator.start()
    try:
        yield operator
        assert operator.failure() is None
    finally:
        await operator.stop()


async def until(
    look: Callable[[], Awaitable[Any]], what: str, timeout_s: float = WAIT_S, poll_s: float = 0.05
) -> Any:
    """The first truthy answer. Raises TimeoutError that says what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        await asyncio.sleep(poll_s)
