"""What the operator says of a pool: its Events, and its status after the actions of a look."""

from collections import Counter
from collections.abc import Sequence

from duplex_api.constants import POOL_KIND
from duplex_api.metadata import Condition
from duplex_api.pool import PoolStatus
from duplex_operator.context import Context
from duplex_operator.decide.pods import PodDecision, PodView, PoolPlan
from duplex_operator.decide.pool_status import PoolFacts, pool_status
from duplex_operator.kube.errors import MissingError
from duplex_operator.kube.events import tell_event
from duplex_operator.kube.resources import POOLS
from duplex_operator.objects import PodObject, read_pool
from duplex_operator.pool_look import PoolLook
from duplex_operator.pool_view import own_pods, queued_for, view_pods, without_ledger
from duplex_operator.resources.pods import pool_selector

COUNTS_PERIOD_S = 2.0
"""A status of which only numbers changed is written this often at most."""
_WARNINGS = frozenset(
    (
        "Broken",
        "BudgetRefused",
        "DrainBoundPassed",
        "NodeLost",
        "NoImage",
        "PodRefused",
        "SecretRefused",
        "SecretTaken",
        "ServedByOther",
        "TemplateRefused",
    )
)


class PoolReport:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def tell(self, look: PoolLook, reason: str, note: str, action: str) -> None:
        await tell_event(
            self._context.api,
            POOL_KIND,
            look.pool.meta,
            reason=reason,
            note=note,
            action=action,
            warning=reason in _WARNINGS,
        )

    async def write_status(
        self, look: PoolLook, plan: PoolPlan, decision: PodDecision, views: Sequence[PodView]
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
                without_ledger=without_ledger(self._context, pods),
                waits=_waits(pods),
                trouble=look.trouble,
            ),
            look.pool.status,
            look.now_ms,
        )
        if look.trouble is not None and look.trouble != look.memory.told:
            await self.tell(look, look.trouble.reason, look.trouble.message, "Create")
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
