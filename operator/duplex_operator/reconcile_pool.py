"""One pool: observe, decide, apply. Called by the dirty set, never twice at a time for one pool.

Decisions are in `decide/`; this file only carries them out, in an order that loses no session: a
mark before a deletion, the label that the budget selects by as soon as there is a session, the
status last.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from duplex_api.constants import API_VERSION, POOL_KIND
from duplex_api.metadata import Condition
from duplex_api.pool import PoolStatus
from duplex_api.resolve_pool import ResolvedPool, resolve_pool
from duplex_operator.apply import (
    PDBS,
    PODS,
    POOLS,
    ConflictError,
    EventType,
    MissingError,
    RefusedError,
    Regarding,
)
from duplex_operator.context import Context
from duplex_operator.decide.pods import (
    Action,
    CreatePods,
    DeletePod,
    Mark,
    MarkPod,
    PodDecision,
    PodView,
    PoolPlan,
    decide_pods,
)
from duplex_operator.decide.pool_status import PoolFacts, Trouble, pool_status
from duplex_operator.decide.scaling import Demand, wanted_pods
from duplex_operator.names import (
    ANNOTATION_IDLE_SINCE,
    ANNOTATION_MARK,
    ANNOTATION_MARKED_AT,
    LABEL_OCCUPIED,
)
from duplex_operator.objects import (
    ObjectKey,
    PodObject,
    PoolObject,
    RawObject,
    read_pod,
    read_pool,
    timestamp,
)
from duplex_operator.pool_credentials import PoolCredentials, SecretTakenError
from duplex_operator.pool_view import own_pods, queued_for, sessions_of, view_pods
from duplex_operator.resources.budgets import budget_name, occupied_budget
from duplex_operator.resources.pod_template import TemplateError
from duplex_operator.resources.pods import (
    PodBlueprint,
    PoolIdentity,
    drain_bound_s,
    pod_blueprint,
    pod_name,
    pool_selector,
)
from duplex_operator.sidecar_client import (
    SidecarClient,
    SidecarRefusalError,
    SidecarUnreachableError,
)

log = logging.getLogger(__name__)

PACE_S = 0.25
"""Between two looks at one pool."""
COUNTS_PERIOD_S = 2.0
"""A status of which only numbers changed is written this often at most."""
SOON_S = 0.5
RETRY_S = 2.0
REFUSED_RETRY_S = 30.0
ENDED_BY_CHECKPOINT = "checkpoint_changed"
_WARNINGS = frozenset(
    (
        *(
            "Broken",
            "BudgetRefused",
            "DrainBoundPassed",
            "NodeLost",
            "NoImage",
            "PodRefused",
            "SecretRefused",
        ),
        *("SecretTaken", "TemplateRefused"),
    )
)


@dataclass(slots=True)
class _Memory:
    """What is kept of a pool between looks; all of it can be lost. deleted: pods whose deletion
    was asked for. refused: why the API server takes no pod of this template, and until when that is
    believed. told: the trouble that there was an Event of."""

    deleted: set[str] = field(default_factory=set)
    refused: Trouble | None = None
    refused_hash: str = ""
    refused_until_ms: int = 0
    budget_of: str = ""
    status_ms: int = 0
    told: Trouble | None = None
    looked_s: float = float("-inf")


@dataclass(slots=True)
class _Look:
    """One look at one pool, while it lasts."""

    pool: PoolObject
    identity: PoolIdentity
    spec: ResolvedPool
    memory: _Memory
    now_ms: int
    trouble: Trouble | None = None
    held: bool = False
    """No pod is made: what it would need is not there."""
    again_s: float | None = None

    def again(self, after_s: float) -> None:
        self.again_s = after_s if self.again_s is None else min(self.again_s, after_s)


class PoolReconciler:
    """One for all pools; `reconcile` is the dirty set's."""

    def __init__(self, context: Context, *, pace_s: float = PACE_S) -> None:
        self._context = context
        self._pace_s = pace_s
        self._credentials = PoolCredentials(context)
        self._memories: dict[ObjectKey, _Memory] = {}

    async def reconcile(self, key: ObjectKey) -> float | None:
        """After how many seconds to look again. Raises ApiError, NotLeadingError."""
        pool = self._context.store.pools.get(key)
        if pool is None or pool.meta.deleting:
            # Pods, Secret and budget are its own: they go with it.
            self._memories.pop(key, None)
            self._credentials.forget(key)
            return None
        rest_s = self._rest_s(key)
        if rest_s > 0:
            return rest_s
        look = self._begin(pool)
        await self._keep_credentials(look)
        await self._keep_budget(look)
        blueprint = self._blueprint(look)
        views = self._views(look)
        plan = self._plan(look, blueprint, views)
        decision = decide_pods(plan, views, look.now_ms)
        for action in decision.actions:
            await self._apply(look, action, blueprint)
        await self._label_pods(look, views)
        await self._empty_pods(look)
        await self._write_status(look, plan, decision, views)
        if decision.look_again_ms is not None:
            look.again(max(0.0, (decision.look_again_ms - look.now_ms) / 1000))
        return look.again_s

    def _rest_s(self, key: ObjectKey) -> float:
        """A pool of thousands of sessions has news all the time; none of it is that urgent."""
        memory = self._memories.setdefault(key, _Memory())
        now_s = self._context.monotonic_s()
        rest_s = memory.looked_s + self._pace_s - now_s
        if rest_s <= 0:
            memory.looked_s = now_s
        return rest_s

    # Observe

    def _begin(self, pool: PoolObject) -> _Look:
        key = pool.meta.key
        memory = self._memories[key]
        memory.deleted &= {pod.meta.uid for pod in self._context.store.pods_of(key)}
        return _Look(
            pool=pool,
            identity=PoolIdentity(key.namespace, key.name, pool.meta.uid),
            spec=resolve_pool(pool.spec),
            memory=memory,
            now_ms=self._context.now_ms(),
        )

    def _views(self, look: _Look) -> list[PodView]:
        pods = own_pods(self._context, look.pool)
        return view_pods(self._context, look.spec, pods, look.memory.deleted)

    def _blueprint(self, look: _Look) -> PodBlueprint | None:
        """None: no pod can be made of what the pool says; why is in `look.trouble`."""
        image = self._context.settings.sidecar_image
        if look.spec.image is None and not image:
            look.trouble = Trouble("NoImage", "neither the pool nor the release names an image")
            return None
        try:
            return pod_blueprint(look.identity, look.spec, image)
        except TemplateError as error:
            look.trouble = Trouble("TemplateRefused", str(error))
            return None

    def _plan(self, look: _Look, blueprint: PodBlueprint | None, views: list[PodView]) -> PoolPlan:
        moving = [view for view in views if view.mark is not Mark.FINISHING]
        demand = Demand(
            taken=sum(view.sessions for view in moving),
            queued=queued_for(self._context, look.pool),
        )
        if blueprint is None:
            # What runs goes on as it is: every pod counts as current.
            for index, view in enumerate(views):
                views[index] = replace(view, template_hash="", checkpoint_hash="")
        return PoolPlan(
            wanted=wanted_pods(look.spec, demand),
            template_hash=blueprint.template_hash if blueprint else "",
            checkpoint_hash=blueprint.checkpoint_hash if blueprint else "",
            checkpoint_change=look.spec.checkpoint_change,
            max_surge=look.spec.max_surge,
            drain_bound_ms=drain_bound_s(look.spec) * 1000,
        )

    # Apply

    async def _apply(self, look: _Look, action: Action, blueprint: PodBlueprint | None) -> None:
        """An action whose object has changed meanwhile is decided anew, soon."""
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

    def _still_refused(self, look: _Look, blueprint: PodBlueprint) -> bool:
        memory = look.memory
        same = memory.refused_hash == blueprint.template_hash
        if memory.refused is None or not same or look.now_ms >= memory.refused_until_ms:
            return False
        look.trouble = look.trouble or memory.refused
        look.again((memory.refused_until_ms - look.now_ms) / 1000)
        return True

    async def _create(self, look: _Look, action: CreatePods, blueprint: PodBlueprint) -> None:
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
            await self._tell(look, "PodCreated", f"pod {name}: {action.message}", "Create")

    async def _create_one(
        self, look: _Look, blueprint: PodBlueprint, name: str, attempt: int
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

    async def _mark(self, look: _Look, action: MarkPod) -> None:
        pod = self._pod(action.pod.uid)
        if pod is None:
            return
        marked = {
            ANNOTATION_MARK: str(action.mark),
            ANNOTATION_MARKED_AT: timestamp(look.now_ms),
        }
        await self._patch_pod(pod, {"annotations": marked}, version=pod.meta.version)
        note = f"pod {action.pod.name} is {action.mark}: {action.message}"
        await self._tell(look, action.reason, note, "Drain")

    async def _delete(self, look: _Look, action: DeletePod) -> None:
        pod = self._pod(action.pod.uid)
        if pod is None:
            return
        # The version: one that became ready since, and may have got a session, is looked at again.
        await self._context.api.delete(
            PODS, pod.meta.key, uid=pod.meta.uid, version=pod.meta.version
        )
        look.memory.deleted.add(pod.meta.uid)
        note = f"pod {action.pod.name} is deleted: {action.message}"
        await self._tell(look, action.reason, note, "Delete")

    async def _label_pods(self, look: _Look, views: Sequence[PodView]) -> None:
        """`occupied`, which the budget selects by."""
        for view in views:
            pod = self._pod(view.uid)
            gone = pod is None or pod.meta.deleting or view.uid in look.memory.deleted
            occupied = view.sessions > 0
            if pod is None or gone or pod.occupied is occupied:
                continue
            changed = {"labels": {LABEL_OCCUPIED: str(occupied).lower()}}
            if not occupied:
                changed["annotations"] = {ANNOTATION_IDLE_SINCE: timestamp(look.now_ms)}
            try:
                await self._patch_pod(pod, changed, version=None)
            except MissingError:
                continue

    async def _empty_pods(self, look: _Look) -> None:
        """Tells the sidecars of marked pods, again until they have confirmed."""
        marked = [
            pod
            for pod in own_pods(self._context, look.pool)
            if pod.mark in (Mark.DRAINING, Mark.ENDING) and not pod.meta.deleting and pod.ip
        ]
        told = await asyncio.gather(*(self._empty_pod(look, pod) for pod in marked))
        if not all(told):
            look.again(RETRY_S)

    async def _empty_pod(self, look: _Look, pod: PodObject) -> bool:
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

    async def _keep_credentials(self, look: _Look) -> None:
        try:
            changes = await self._credentials.keep(look.pool)
        except (SecretTakenError, RefusedError) as error:
            taken = isinstance(error, SecretTakenError)
            look.trouble = Trouble("SecretTaken" if taken else "SecretRefused", str(error))
            look.held = True
            look.again(REFUSED_RETRY_S)
            return
        for change in changes:
            await self._tell(look, change, "the pool's admin Secret was written", "KeepSecret")
        look.again(self._credentials.look_again_s(look.pool.meta.key))

    async def _keep_budget(self, look: _Look) -> None:
        """Once for each pool object and process; a budget that is there is made the same again."""
        if look.memory.budget_of == look.identity.uid:
            return
        budget = occupied_budget(look.identity)
        key = ObjectKey(look.identity.namespace, budget_name(look.identity.name))
        try:
            await self._context.api.create(PDBS, key.namespace, budget)
        except ConflictError:
            patch = {
                "metadata": {
                    name: budget["metadata"][name] for name in ("labels", "ownerReferences")
                },
                "spec": budget["spec"],
            }
            await self._context.api.patch(PDBS, key, patch, version=None)
        except RefusedError as error:
            look.trouble = look.trouble or Trouble("BudgetRefused", str(error))
            look.again(REFUSED_RETRY_S)
            return
        look.memory.budget_of = look.identity.uid

    async def _write_status(
        self, look: _Look, plan: PoolPlan, decision: PodDecision, views: Sequence[PodView]
    ) -> None:
        """From what is there after the actions."""
        pods = own_pods(self._context, look.pool)
        if decision.actions:
            views = view_pods(self._context, look.spec, pods, look.memory.deleted)
        status = pool_status(
            PoolFacts(
                generation=look.pool.meta.generation,
                selector=pool_selector(look.identity.name),
                wanted=plan.wanted,
                views=views,
                queued=queued_for(self._context, look.pool),
                old=decision.old,
                waits=_waits(pods),
                trouble=look.trouble,
            ),
            look.pool.status,
            look.now_ms,
        )
        if look.trouble is not None and look.trouble != look.memory.told:
            await self._tell(look, look.trouble.reason, look.trouble.message, "Create")
        look.memory.told = look.trouble
        if status == look.pool.status:
            return
        wait_s = COUNTS_PERIOD_S - (look.now_ms - look.memory.status_ms) / 1000
        if wait_s > 0 and _says_the_same(status, look.pool.status):
            look.again(wait_s)
            return
        body = {"status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}
        try:
            written = await self._context.api.patch(
                POOLS, look.pool.meta.key, body, version=None, subresource="status"
            )
        except MissingError:
            return
        look.memory.status_ms = look.now_ms
        pool = read_pool(written)
        if pool is not None:
            self._context.store.pools.put(pool)

    # Ways in and out

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

    async def _tell(self, look: _Look, reason: str, note: str, action: str) -> None:
        await self._context.api.event(
            Regarding(API_VERSION, POOL_KIND, look.pool.meta.key, look.pool.meta.uid),
            reason=reason,
            note=note,
            action=action,
            event_type=EventType.WARNING if reason in _WARNINGS else EventType.NORMAL,
        )


async def _end(client: SidecarClient, session: str) -> bool:
    """Each by itself: one that cannot be ended must not stop those behind it."""
    try:
        return await client.end(session, ENDED_BY_CHECKPOINT)
    except SidecarRefusalError as error:
        log.info("%s cannot be ended: %s", session, error)
        return False


def _waits(pods: Sequence[PodObject]) -> tuple[str, ...]:
    """Why containers wait, beside what every start goes through."""
    usual = ("", "ContainerCreating", "PodInitializing")
    counted = Counter(pod.sidecar_waits for pod in pods if pod.sidecar_waits not in usual)
    return tuple(f"{reason} ({count})" for reason, count in counted.most_common(4))


def _says_the_same(status: PoolStatus, before: PoolStatus) -> bool:
    """Whether nothing but counts differs."""

    def words(found: PoolStatus) -> tuple[object, ...]:
        conditions: tuple[Condition, ...] = found.conditions or ()
        return (
            found.observed_generation,
            found.replicas,
            found.ready_replicas,
            tuple((one.type, one.status, one.reason) for one in conditions),
        )

    return words(status) == words(before)
