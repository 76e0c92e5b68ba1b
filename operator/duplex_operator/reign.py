"""One time of leading, from the first list to the end: every part is made anew and wired here."""

import asyncio
import logging
from collections.abc import Mapping

from duplex_operator.api_watch import ApiWatch, Watched
from duplex_operator.claims import Claims
from duplex_operator.context import Context
from duplex_operator.fleet import Fleet
from duplex_operator.intake import Intake
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ApiError
from duplex_operator.objects import Kind
from duplex_operator.occupancy import Occupancy
from duplex_operator.placements import PlacementBoard
from duplex_operator.placer import Placer
from duplex_operator.reconcile_pool import PoolReconciler
from duplex_operator.reconcile_session import SessionReconciler
from duplex_operator.routes import Routes
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Store
from duplex_operator.sweep import sweep_ledgers, watch_tokens
from duplex_operator.watch import DirtySet, Reconcile

log = logging.getLogger(__name__)

FIRST_LIST_RETRY_S = 2.0


class Reign:
    """Make it, then `run`."""

    def __init__(self, settings: OperatorSettings, api: KubernetesApi) -> None:
        store, dirty, board = Store(), DirtySet(), PlacementBoard()
        fleet = Fleet(
            store,
            dirty,
            suspect_after_s=settings.suspect_after_s,
            counters_period_s=settings.counters_period_s,
        )
        self.context = Context(
            settings=settings,
            store=store,
            dirty=dirty,
            api=api,
            fleet=fleet,
            board=board,
            routes=Routes(settings.redis_url),
            occupancy=Occupancy(store, api),
            claims=Claims(store, settings.watches),
        )
        self.placer = Placer(store, fleet, board, dirty)
        self.sessions = SessionReconciler(self.context, self.placer.poke)
        self.intake = Intake(settings, store, dirty, api)
        self.watch = ApiWatch(api, self.intake.take, self.intake.list_one)
        self.synchronised = False

    async def run(self, pools: Reconcile | None = None) -> None:
        """Until cancelled. Lists everything first: nothing is decided on half a picture. pools:
        what looks at a pool, the product's own where None."""
        context = self.context
        reconcilers: dict[Kind, Reconcile] = {
            Kind.SESSION: self.sessions,
            Kind.POOL: pools or PoolReconciler(context).reconcile,
        }
        try:
            versions = await self._first_list()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.watch.run(versions))
                group.create_task(context.fleet.run())
                group.create_task(self.placer.run())
                group.create_task(
                    context.dirty.run(reconcilers, context.settings.reconciles_at_once)
                )
                group.create_task(context.routes.wakes(self.sessions.wake))
                group.create_task(self._relist())
                group.create_task(sweep_ledgers(context))
                group.create_task(watch_tokens(context, self.sessions))
        finally:
            self.synchronised = False
            await context.fleet.close()
            await context.routes.close()

    @property
    def ready(self) -> bool:
        """Everything was listed, and what changes is told."""
        return self.synchronised and self.watch.stands

    def gauges(self) -> Mapping[str, float]:
        """Numbers for /metrics."""
        context = self.context
        dirty, store = context.dirty, context.store
        queued = sum(context.board.queued(pool) for pool in context.board.pools())
        numbers: dict[str, float] = {
            "duplex_operator_sessions": len(store.sessions),
            "duplex_operator_pods": len(store.pods),
            "duplex_operator_queued_sessions": queued,
            "duplex_operator_dirty_objects": len(dirty),
            "duplex_operator_oldest_dirty_seconds": dirty.oldest_s(),
            "duplex_operator_reconciles_total": dirty.served,
            "duplex_operator_failed_reconciles_total": dirty.failed,
            "duplex_operator_dropped_marks_total": dirty.overflowed,
            "duplex_operator_relists_total": self.intake.relists,
            "duplex_operator_watch_events_total": self.intake.events,
            "duplex_operator_ledger_calls_total": context.routes.calls,
            "duplex_operator_failed_ledger_calls_total": context.routes.failures,
        }
        for pod in context.fleet.pods():
            labels = f'{{namespace="{pod.pod.namespace}",pod="{pod.pod.name}"}}'
            numbers[f"duplex_operator_pod_feed_up{labels}"] = float(
                pod.connected and not pod.suspect
            )
        return numbers

    async def _first_list(self) -> dict[Watched, str]:
        while True:
            try:
                versions = await self.intake.relist()
                break
            except ApiError as error:
                log.warning("the first list: %s; again in %.0f s", error, FIRST_LIST_RETRY_S)
                await asyncio.sleep(FIRST_LIST_RETRY_S)
        self.intake.mark_everything()
        self.synchronised = True
        return versions

    async def _relist(self) -> None:
        while True:
            try:
                await self.intake.run()
            except ApiError as error:
                log.warning("a relist: %s; again later", error)
                await asyncio.sleep(FIRST_LIST_RETRY_S)


def request_gauges(requests: Mapping[str, int]) -> Mapping[str, float]:
    """requests: how many of each "verb resource" went to the API server, leading or not."""
    numbers: dict[str, float] = {}
    for what, count in requests.items():
        verb, _, resource = what.partition(" ")
        labels = f'{{verb="{verb}",resource="{resource}"}}'
        numbers[f"duplex_operator_api_requests_total{labels}"] = count
    return numbers
