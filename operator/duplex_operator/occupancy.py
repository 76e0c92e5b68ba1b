"""The label that a pool's budget selects by: a pod is marked occupied before its sidecar hears of a
session, so that no eviction ever finds a session on a pod that counts as empty.
"""

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ConflictError, MissingError
from duplex_operator.kube.resources import PODS
from duplex_operator.names import ANNOTATION_IDLE_SINCE, LABEL_OCCUPIED
from duplex_operator.objects import PodObject, read_pod, timestamp
from duplex_operator.store import Store


class Occupancy:
    """Of every pod. One change at a time of each: the sessions of a pod open side by side, and the
    first of them marks it for all."""

    def __init__(self, store: Store, api: KubernetesApi) -> None:
        self._store = store
        self._api = api
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def occupy(self, pod_uid: str) -> None:
        """Returns when the API server has it as occupied, or it is gone. Raises ApiError."""
        await self.settle(pod_uid, lambda: True, 0)

    async def settle(self, pod_uid: str, is_occupied: Callable[[], bool], now_ms: int) -> None:
        """is_occupied: asked in the pod's turn, since it may have got a session while this waited.
        now_ms: since when it is idle, if it is. Raises ApiError."""
        turn = self._turns.setdefault(pod_uid, asyncio.Lock())
        async with turn:
            pod = self._store.pod_by_uid(pod_uid)
            if pod is None or pod.meta.deleting:
                return
            occupied = is_occupied()
            if pod.occupied is not occupied:
                await self._write(pod, occupied, now_ms)

    async def _write(self, pod: PodObject, occupied: bool, now_ms: int) -> None:
        metadata = {"labels": {LABEL_OCCUPIED: str(occupied).lower()}}
        if not occupied:
            metadata["annotations"] = {ANNOTATION_IDLE_SINCE: timestamp(now_ms)}
        # The uid: another pod may have got its name.
        body = {"metadata": metadata | {"uid": pod.meta.uid}}
        try:
            found = read_pod(await self._api.patch(PODS, pod.meta.key, body, version=None))
        except (MissingError, ConflictError):
            return  # it is gone
        if found is not None:
            self._store.pods.put(found)
