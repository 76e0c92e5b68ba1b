"""What is done to a pool's pods: made, marked, labelled, told to drain, deleted.

Each action names the object that it was decided on. One whose object has changed meanwhile is
decided anew, soon.
"""

import asyncio
import logging
from collections.abc import Sequence

from duplex_operator.context import Context
from duplex_operator.decide.emptying import may_park
from duplex_operator.decide.pods import Action, CreatePods, DeletePod, Mark, MarkPod, PodView
from duplex_operator.decide.pool_status import Trouble
from duplex_operator.kube.errors import ConflictError, MissingError, RefusedError
from duplex_operator.kube.resources import PODS
from duplex_operator.names import (
    ANNOTATION_MARK,
    ANNOTATION_MARKED_AT,
)
from duplex_operator.objects import (
    ObjectKey,
    PodObject,
    RawObject,
    read_pod,
    timestamp,
    timestamp_ms,
)
from duplex_operator.pool_look import PoolLook
from duplex_operator.pool_report import PoolReport
from duplex_operator.pool_view import is_occupied, own_pods, sessions_of, talkers_on
from duplex_operator.resources.pods import PodBlueprint, pod_name
from duplex_operator.sidecar_client import (
    SidecarClient,
    SidecarRefusalError,
    SidecarUnreachableError,
    retry_level,
)

log = logging.getLogger(__name__)

SOON_S = 0.5
RETRY_S = 2.0
REFUSED_RETRY_S = 30.0
ENDED_BY_CHECKPOINT = "checkpoint_changed"


class PodActions:
    def __init__(self, context: Context, report: PoolReport) -> None:
        self._context = context
        self._report = report

    async def carry_out(
        self, look: PoolLook, action: Action, blueprint: PodBlueprint | None
    ) -> None:
        try:
            match action:
                case CreatePods():
                    if blueprint is not None and not look.held:
                        await self._create(look, action, blueprint)
                case MarkPod():
                    await self._mark(look, action)
                case DeletePod():
                    await self._delete(look, action)
        except ConflictError:
            look.again(SOON_S)

    def _still_refused(self, look: PoolLook, blueprint: PodBlueprint) -> bool:
        memory = look.memory
        same = memory.refused_hash == blueprint.template_hash
        if memory.refused is None or not same or look.now_ms >= memory.refused_until_ms:
            return False
        look.trouble = look.trouble or memory.refused
        look.again((memory.refused_until_ms - look.now_ms) / 1000)
        return True

    async def _create(self, look: PoolLook, action: CreatePods, blueprint: PodBlueprint) -> None:
        if self._still_refused(look, blueprint):
            return
        taken = {pod.meta.key.name for pod in self._context.store.pods_of(look.pool.meta.key)}
        number = 0
        for _ in range(action.count):
            while (name := pod_name(look.identity, blueprint.template_hash, number)) in taken:
                number += 1
            taken.add(name)
            if not await self._create_one(look, blueprint, name, action.attempt):
                return
            await self._report.tell(look, "PodCreated", f"pod {name}: {action.message}", "Create")

    async def _create_one(
        self, look: PoolLook, blueprint: PodBlueprint, name: str, attempt: int
    ) -> bool:
        """False: the API server takes no such pod now."""
        memory, namespace = look.memory, look.identity.namespace
        manifest = blueprint.named(name, attempt)
        try:
            self._take(await self._context.api.create(PODS, namespace, manifest))
        except RefusedError as error:
            memory.refused = look.trouble = Trouble("PodRefused", error.message)
            memory.refused_hash = blueprint.template_hash
            memory.refused_until_ms = look.now_ms + round(REFUSED_RETRY_S * 1000)
            look.again(REFUSED_RETRY_S)
            return False
        except MissingError:
            return False  # the namespace is going
        except ConflictError:
            # It is there, and the watch has not told yet.
            self._take(await self._context.api.get(PODS, ObjectKey(namespace, name)))
            raise
        memory.refused = None
        return True

    async def _mark(self, look: PoolLook, action: MarkPod) -> None:
        pod = self._pod(action.pod.uid)
        if pod is None:
            return
        marked = {
            ANNOTATION_MARK: str(action.mark),
            ANNOTATION_MARKED_AT: timestamp(look.now_ms),
        }
        await self._patch_pod(pod, {"annotations": marked}, version=pod.meta.version)
        note = f"pod {action.pod.name} is {action.mark}: {action.message}"
        await self._report.tell(look, action.reason, note, "Drain")

    async def _delete(self, look: PoolLook, action: DeletePod) -> None:
        pod = self._pod(action.pod.uid)
        if pod is None:
            return
        # The version: one that became ready since, and may have got a session, is looked at again.
        await self._context.api.delete(
            PODS, pod.meta.key, uid=pod.meta.uid, version=pod.meta.version
        )
        look.memory.deleted.add(pod.meta.uid)
        note = f"pod {action.pod.name} is deleted: {action.message}"
        await self._report.tell(look, action.reason, note, "Delete")

    async def label_pods(self, look: PoolLook, views: Sequence[PodView]) -> None:
        """`occupied`, which the budget selects by: set here for what was found running, and taken
        off where the last session has left."""
        for uid in (view.uid for view in views if view.uid not in look.memory.deleted):
            await self._context.occupancy.settle(
                uid, lambda uid=uid: is_occupied(self._context, uid), look.now_ms
            )

    async def empty_pods(self, look: PoolLook) -> None:
        """Tells the sidecars of marked pods, again until they have confirmed; before that, those
        who talk there get the time to be handed over."""
        marked = [
            pod
            for pod in own_pods(self._context, look.pool)
            if pod.mark in (Mark.DRAINING, Mark.ENDING) and not pod.meta.deleting and pod.ip
        ]
        due = [pod for pod in marked if self._may_park(look, pod)]
        if len(due) < len(marked):
            look.again(SOON_S)
        told = await asyncio.gather(*(self._empty_pod(look, pod) for pod in due))
        if not all(told):
            look.again(RETRY_S)

    def _may_park(self, look: PoolLook, pod: PodObject) -> bool:
        if pod.mark != Mark.DRAINING:
            return True
        marked_ms = timestamp_ms(pod.meta.annotations.get(ANNOTATION_MARKED_AT, "")) or 0
        return may_park(talkers_on(self._context, pod.meta.uid), marked_ms, look.now_ms)

    async def _empty_pod(self, look: PoolLook, pod: PodObject) -> bool:
        """True: its sidecar has confirmed, and has been told of every session to end."""
        fleet, uid = self._context.fleet, pod.meta.uid
        feed = fleet.pod(uid)
        try:
            if feed is None or not feed.draining:
                await fleet.drain(uid, look.spec.drain_grace_ms / 1000)
            client = fleet.client(uid)
            if pod.mark == Mark.ENDING and client is not None:
                sessions = sorted(sessions_of(self._context, uid))
                ended = [await _end(client, session) for session in sessions]
                if not all(ended):
                    return False
        except (SidecarUnreachableError, SidecarRefusalError) as error:
            log.info("pod %s cannot be told to drain: %s", pod.meta.key, error)
            return False
        return feed is not None and feed.draining

    def _pod(self, uid: str) -> PodObject | None:
        return self._context.store.pod_by_uid(uid)

    def _take(self, raw: RawObject) -> None:
        """The answer to a write, so that the next look need not wait for the watch."""
        pod = read_pod(raw)
        if pod is not None:
            self._context.store.pods.put(pod)

    async def _patch_pod(
        self, pod: PodObject, metadata: dict[str, dict[str, str]], *, version: str | None
    ) -> None:
        api = self._context.api
        self._take(await api.patch(PODS, pod.meta.key, {"metadata": metadata}, version=version))


async def _end(client: SidecarClient, session: str) -> bool:
    """Each by itself: one that cannot be ended must not stop those behind it."""
    try:
        return await client.end(session, ENDED_BY_CHECKPOINT)
    except SidecarRefusalError as error:
        log.log(retry_level(error), "%s cannot be ended: %s", session, error)
        return False
