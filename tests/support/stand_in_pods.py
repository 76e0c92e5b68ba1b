"""A kubelet for pods that are objects only: each gets a stand-in sidecar, behind the certificate
and the token of its pool's Secret, and a status that says it is ready."""

import asyncio
import itertools
import os
from contextlib import suppress
from pathlib import Path

from fakes.fake_admin import served_with
from support.operators import login
from support.stand_in_sidecar import StandInSidecar

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import ApiError, MissingError
from duplex_operator.kube.resources import PODS, SECRETS
from duplex_operator.names import ADMIN_PORT, LABEL_POOL
from duplex_operator.objects import ObjectKey
from duplex_operator.resources.pool_secrets import PoolSecret, read_pool_secret

LOOK_S = 0.25
_NET = f"127.{os.getpid() % 200 + 20}"
_NUMBERS = itertools.count(1)


class StandInPods:
    """Of one namespace; `run` it. slots: of each pod."""

    def __init__(self, kubeconfig: Path, redis_url: str, namespace: str, slots: int) -> None:
        self._api = KubernetesApi(ApiConnection(login(kubeconfig)))
        self._redis_url = redis_url
        self._namespace = namespace
        self._slots = slots
        self.pods: dict[str, StandInSidecar] = {}
        """By name: those whose process runs."""
        self.dead: set[str] = set()
        """Uids of pods whose process has ended."""

    async def run(self) -> None:
        """Starts what is new and ends what is gone, until cancelled. An API server that is away is
        asked again."""
        while True:
            with suppress(ApiError):
                await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        found = {
            str(pod["metadata"]["uid"]): pod["metadata"]
            for pod in (await self._api.list(PODS, self._namespace)).items
        }
        for name, sidecar in list(self.pods.items()):
            if sidecar.pod_uid not in found:
                await self.end(name)
        running = {sidecar.pod_uid for sidecar in self.pods.values()}
        for uid, meta in found.items():
            if uid not in running and uid not in self.dead:
                await self._start(meta["name"], uid, meta["labels"][LABEL_POOL])

    async def _start(self, name: str, uid: str, pool: str) -> None:
        raw = await self._api.get(SECRETS, ObjectKey(self._namespace, f"{pool}-admin"))
        secret: PoolSecret | None = read_pool_secret(raw)
        assert secret is not None
        number = next(_NUMBERS)
        host = f"{_NET}.{number // 250}.{number % 250 + 1}"
        sidecar = StandInSidecar(self._redis_url, uid, secret.token, host, slots=self._slots)
        await sidecar.start(ADMIN_PORT, served_with(secret.certificate_pem, secret.key_pem))
        self.pods[name] = sidecar
        status = {
            "phase": "Running",
            "podIP": host,
            "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        key = ObjectKey(self._namespace, name)
        with suppress(MissingError):
            await self._api.patch(PODS, key, {"status": status}, version=None, subresource="status")

    async def end(self, name: str, *, delete: bool = False) -> None:
        """The process dies; its object stays, unless `delete`."""
        sidecar = self.pods.pop(name)
        self.dead.add(sidecar.pod_uid)
        await sidecar.die()
        if delete:
            key = ObjectKey(self._namespace, name)
            await self._api.delete(PODS, key, uid=sidecar.pod_uid, grace_s=0)

    async def close(self) -> None:
        for sidecar in self.pods.values():
            await sidecar.die()
        await self._api.connection.close()
