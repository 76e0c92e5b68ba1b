"""One pool: observe, decide, apply. Called by the dirty set, never twice at a time for one pool.

Decisions are in `decide/`; they are carried out in an order that loses no session: a mark before a
deletion, the status last. The label that the budget selects by is set before a session is opened,
by whoever opens it (`occupancy`); here it is taken off, and set for what was found running.
"""

import logging
from dataclasses import replace

from duplex_api.resolve_pool import resolve_pool
from duplex_operator.context import Context
from duplex_operator.decide.emptying import HAND_OVER_BOUND_MS
from duplex_operator.decide.pods import Mark, PodView, PoolPlan, decide_pods
from duplex_operator.decide.pool_status import Trouble
from duplex_operator.decide.scaling import Demand, wanted_pods
from duplex_operator.kube.errors import ConflictError, RefusedError
from duplex_operator.kube.resources import PDBS
from duplex_operator.objects import Kind, ObjectKey, PoolObject
from duplex_operator.pool_actions import REFUSED_RETRY_S, PodActions
from duplex_operator.pool_credentials import (
    PoolCredentials,
    SecretTakenError,
    ServedByOtherError,
)
from duplex_operator.pool_look import PoolLook, PoolMemory
from duplex_operator.pool_report import PoolReport
from duplex_operator.pool_view import own_pods, queued_for, sessions_of, view_pods
from duplex_operator.resources.budgets import budget_name, occupied_budget
from duplex_operator.resources.pod_template import TemplateError
from duplex_operator.resources.pods import PodBlueprint, PoolIdentity, drain_bound_s, pod_blueprint

log = logging.getLogger(__name__)

PACE_S = 0.25
"""Between two looks at one pool."""


class PoolReconciler:
    """One for all pools; `reconcile` is the dirty set's."""

    def __init__(self, context: Context, *, pace_s: float = PACE_S) -> None:
        self._context = context
        self._pace_s = pace_s
        context.claims.awaited = True
        self._credentials = PoolCredentials(context)
        self._report = PoolReport(context)
        self._actions = PodActions(context, self._report)
        self._memories: dict[ObjectKey, PoolMemory] = {}

    async def reconcile(self, key: ObjectKey) -> float | None:
        """After how many seconds to look again. Raises ApiError, NotLeadingError."""
        pool = self._context.store.pools.get(key)
        if pool is None or pool.meta.deleting:
            # Pods, Secret and budget are its own: they go with it.
            self._memories.pop(key, None)
            self._credentials.forget(key)
            self._context.claims.forget(key)
            return None
        rest_s = self._rest_s(key)
        if rest_s > 0:
            return rest_s
        look = self._begin(pool)
        if not await self._keep_credentials(look):
            return look.again_s
        await self._keep_budget(look)
        blueprint = self._blueprint(look)
        views = self._views(look)
        plan = self._plan(look, blueprint, views)
        decision = decide_pods(plan, views, look.now_ms)
        for action in decision.actions:
            await self._actions.carry_out(look, action, blueprint)
        await self._actions.label_pods(look, views)
        await self._actions.empty_pods(look)
        await self._report.write_status(look, plan, decision, views)
        if decision.look_again_ms is not None:
            look.again(max(0.0, (decision.look_again_ms - look.now_ms) / 1000))
        return look.again_s

    def _rest_s(self, key: ObjectKey) -> float:
        """A pool of thousands of sessions has news all the time; none of it is that urgent."""
        memory = self._memories.setdefault(key, PoolMemory())
        now_s = self._context.monotonic_s()
        rest_s = memory.looked_s + self._pace_s - now_s
        if rest_s <= 0:
            memory.looked_s = now_s
        return rest_s

    # Observe

    def _begin(self, pool: PoolObject) -> PoolLook:
        key = pool.meta.key
        memory = self._memories[key]
        memory.deleted &= {pod.meta.uid for pod in self._context.store.pods_of(key)}
        return PoolLook(
            pool=pool,
            identity=PoolIdentity(key.namespace, key.name, pool.meta.uid),
            spec=resolve_pool(pool.spec),
            memory=memory,
            now_ms=self._context.now_ms(),
        )

    def _views(self, look: PoolLook) -> list[PodView]:
        pods = own_pods(self._context, look.pool)
        return view_pods(self._context, look.spec, pods, look.memory.deleted)

    def _blueprint(self, look: PoolLook) -> PodBlueprint | None:
        """None: no pod can be made of what the pool says; why is in `look.trouble`."""
        settings = self._context.settings
        image, durability = settings.sidecar_image, settings.ledger_durability
        if look.spec.image is None and not image:
            look.trouble = Trouble("NoImage", "neither the pool nor the release names an image")
            return None
        try:
            return pod_blueprint(look.identity, look.spec, image, durability)
        except TemplateError as error:
            look.trouble = Trouble("TemplateRefused", str(error))
            return None

    def _plan(
        self, look: PoolLook, blueprint: PodBlueprint | None, views: list[PodView]
    ) -> PoolPlan:
        moving = [view for view in views if view.mark is not Mark.FINISHING]
        # One that changes pods holds a slot of both.
        taken = {uid for view in moving for uid in sessions_of(self._context, view.uid)}
        demand = Demand(
            taken=len(taken),
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
            drain_bound_ms=HAND_OVER_BOUND_MS + drain_bound_s(look.spec) * 1000,
        )

    # Keep what the pods need

    async def _keep_credentials(self, look: PoolLook) -> bool:
        """False: another release serves the pool."""
        try:
            changes = await self._credentials.keep(look.pool)
        except ServedByOtherError as error:
            await self._leave_alone(look, error)
            return False
        except (SecretTakenError, RefusedError) as error:
            taken = isinstance(error, SecretTakenError)
            look.trouble = Trouble("SecretTaken" if taken else "SecretRefused", str(error))
            look.held = True
            look.again(REFUSED_RETRY_S)
            self._claim(look, serves=True)
            return True
        self._claim(look, serves=True)
        for change in changes:
            await self._report.tell(
                look, change, "the pool's admin Secret was written", "KeepSecret"
            )
        look.again(self._credentials.look_again_s(look.pool.meta.key))
        return True

    async def _leave_alone(self, look: PoolLook, error: ServedByOtherError) -> None:
        """Not even its status is written: the other one says there how the pool is."""
        self._claim(look, serves=False)
        trouble = Trouble("ServedByOther", str(error))
        if look.memory.told != trouble:
            log.warning("pool %s: %s", look.pool.meta.key, error)
            await self._report.tell(look, trouble.reason, trouble.message, "KeepSecret")
        look.memory.told = trouble
        look.again(self._credentials.look_again_s(look.pool.meta.key))

    def _claim(self, look: PoolLook, *, serves: bool) -> None:
        key = look.pool.meta.key
        if self._context.claims.note(key, serves=serves):
            for session in self._context.store.sessions_of(key):
                self._context.dirty.mark(Kind.SESSION, session.meta.key)

    async def _keep_budget(self, look: PoolLook) -> None:
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
                # Earlier releases said it by that, and both together are refused.
                "spec": budget["spec"] | {"maxUnavailable": None},
            }
            await self._context.api.patch(PDBS, key, patch, version=None)
        except RefusedError as error:
            look.trouble = look.trouble or Trouble("BudgetRefused", str(error))
            look.again(REFUSED_RETRY_S)
            return
        look.memory.budget_of = look.identity.uid
