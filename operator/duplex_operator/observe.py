"""Gathers what a decision about one session needs. Reads memory; asks the ledger only where no
sidecar can tell."""

from dataclasses import dataclass, field, replace
from typing import Any

from duplex_api.resolve import retention_ms
from duplex_api.routes import RouteRecord
from duplex_api.session import Placement, SessionPhase
from duplex_operator.context import Context
from duplex_operator.decide.acceptance import RefusalReason, judge
from duplex_operator.decide.facts import (
    LedgerPhase,
    LedgerWord,
    Limits,
    Memory,
    PodHealth,
    PodView,
    SessionFacts,
    Token,
)
from duplex_operator.decide.placement import Assignment
from duplex_operator.decide.pods import Mark
from duplex_operator.decide.status import RUNNING_PHASES
from duplex_operator.feed import FeedPhase, FeedSession
from duplex_operator.fleet import PodFeed, has_ended
from duplex_operator.objects import PodObject, PodPhase, SessionObject
from duplex_operator.routes import LeaseView, LedgerAwayError

TOKEN_GRUDGE_MS = 5_000
REFRESH_READ_MS = 600_000
POD_GRUDGE_MS = 60_000
UNKNOWN_LEASE_MS = 1_000
"""What is taken to be left of a suspect pod's lease while the ledger does not answer: its owner may
be using it."""
_LEDGER_PHASES = {"": LedgerPhase.NONE, "parked": LedgerPhase.PARKED, "ended": LedgerPhase.ENDED}


@dataclass(slots=True)
class Known:
    """What is remembered of one session between looks. route: as last written or read. replaced:
    sha256 of the token that `token` replaces and that lets clients in still; empty for none. It is
    `token` itself while that has been changed back and its sidecar does not know it yet."""

    memory: Memory = field(default_factory=Memory)
    token: Token | None = None
    replaced: str = ""
    replaced_at_ms: int = 0
    route: RouteRecord | None = None
    route_at_ms: int = 0
    token_lost: bool = False
    """Its Secret has gone or changed: what the route record says of it is old."""


class Observer:
    def __init__(self, context: Context) -> None:
        self._context = context
        settings = context.settings
        self._limits = Limits(
            erase_bound_ms=round(settings.erase_bound_s * 1000),
            counters_period_ms=round(settings.counters_period_s * 1000),
        )

    async def facts(self, session: SessionObject, known: Known) -> SessionFacts:
        """Never raises for a ledger that is away: that is a fact, too."""
        context, uid = self._context, session.meta.uid
        placement = session.status.placement
        _forgive(known, context.now_ms())
        facts = SessionFacts(
            session=session,
            verdict=known.memory.refused_spec
            or judge(session, context.store.pools.get(session.pool_key)),
            now_ms=context.now_ms(),
            endpoint=context.settings.gateway_endpoint,
            memory=known.memory,
            limits=self._limits,
            said=None if placement is None else self._said(uid, placement),
            source=self._source(session),
            wait=context.board.answer_of(uid),
            promise=self._good_promise(uid),
            token=known.token,
        )
        changes: dict[str, Any] = {}
        try:
            if known.token is None and not known.token_lost:
                changes["token"] = await self._token_of_route(session, known)
                changes["memory"] = known.memory
            if placement is not None:
                changes["pod"] = view = await self._pod(session, placement)
                facts = replace(facts, **changes)
                if _is_missing(facts, view):
                    changes["ledger"] = await self._ledger_word(uid, placement)
        except LedgerAwayError:
            changes["ledger_away"] = True
            if placement is not None and "pod" not in changes:
                changes["pod"] = self._pod_without_ledger(placement)
        return replace(facts, **changes)

    def _said(self, uid: str, placement: Placement) -> FeedSession | None:
        """The pod's word on the session under its present fence: how it went with an earlier one
        is history."""
        said = self._context.fleet.session(placement.pod_uid, uid)
        return said if said is not None and said.fence in (0, placement.fence) else None

    def _source(self, session: SessionObject) -> FeedSession | None:
        """The word of the pod where it was before, if that pod runs it still."""
        placement, last = session.status.placement, session.status.last_placement
        if placement is None or last is None or placement.pod_uid == last.pod_uid:
            return None
        feed = self._context.fleet.pod(last.pod_uid)
        said = self._context.fleet.session(last.pod_uid, session.meta.uid)
        if said is None or feed is None or not feed.connected or feed.suspect:
            return None
        runs = said.phase in (FeedPhase.READY, FeedPhase.ACTIVE) and said.fence == last.fence
        return said if runs else None

    def _good_promise(self, uid: str) -> Assignment | None:
        """A promise of a pod that has stopped taking sessions since is taken back."""
        board = self._context.board
        promise = board.promised(uid)
        if promise is None:
            return None
        feed = self._context.fleet.pod(promise.pod_uid)
        if feed is None or not feed.takes_sessions:
            board.take_back(uid)
            return None
        return promise

    async def _token_of_route(self, session: SessionObject, known: Known) -> Token | None:
        """After a restart of the operator: the hash is in the route record, no Secret is read."""
        place = session.status.token_secret
        if place is None:
            return None
        record = await self._context.routes.read(session.meta.uid)
        if record is not None:
            known.route = record
            # How old it is is not known: it is written again soon, though not at once.
            half_ms = route_keep_ms(session) // 2
            known.route_at_ms = self._context.now_ms() - half_ms + REFRESH_READ_MS
            known.token = Token(place, record.token_sha256_next or record.token_sha256)
            known.replaced = record.token_sha256 if record.token_sha256_next else ""
            known.replaced_at_ms = self._context.now_ms()
            if known.replaced:
                # The one before may have ended before it told the sidecar; saying it again is free.
                known.memory = replace(known.memory, token_untold=True)
        return known.token

    def _pod_without_ledger(self, placement: Placement) -> PodView:
        pod = self._context.store.pod_by_uid(placement.pod_uid)
        feed = self._context.fleet.pod(placement.pod_uid)
        judged = _judge_object(placement, pod, feed)
        if judged is None and feed is not None and feed.suspect:
            return replace(_unheard(placement), lease_left_ms=UNKNOWN_LEASE_MS)
        return judged or _unheard(placement)

    async def _pod(self, session: SessionObject, placement: Placement) -> PodView:
        pod = self._context.store.pod_by_uid(placement.pod_uid)
        feed = self._context.fleet.pod(placement.pod_uid)
        if pod is not None and pod.pool != session.pool_key:
            # Not by us: a status may be written by others, too.
            sentence = f"pod {placement.pod} is not of pool {session.pool_key}"
            return PodView(placement.pod_uid, placement.pod, PodHealth.DEAD, "ForeignPod", sentence)
        judged = _judge_object(placement, pod, feed)
        if judged is not None:
            return judged
        if feed is not None and feed.suspect:
            lease = await self._context.routes.lease(session.meta.uid)
            if lease.held:
                return replace(_unheard(placement), lease_left_ms=lease.left_ms)
            sentence = f"pod {placement.pod} is silent and its lease has run out"
            return PodView(placement.pod_uid, placement.pod, PodHealth.DEAD, "PodSilent", sentence)
        return _unheard(placement)

    async def _ledger_word(self, uid: str, placement: Placement) -> LedgerWord:
        return _word(await self._context.routes.lease(uid), placement)


def route_keep_ms(session: SessionObject) -> int:
    """How long a route record outlives its last writing: twice the ledger's retention, at least
    an hour, so that it never goes before the ledger does."""
    return max(2 * retention_ms(session.spec.lifecycle), 3_600_000)


def _forgive(known: Known, now_ms: int) -> None:
    """What was refused is tried again after a while: a Secret may be there by now, or another
    release on the pods."""
    refused = known.memory.refused_spec
    if refused is not None:
        by_pod = refused.reason is RefusalReason.REFUSED_BY_POD
        if now_ms - known.memory.refused_at_ms >= (POD_GRUDGE_MS if by_pod else TOKEN_GRUDGE_MS):
            known.memory = replace(known.memory, refused_spec=None)


def _is_missing(facts: SessionFacts, pod: PodView) -> bool:
    """Whether only the ledger knows how it went with the session."""
    refusal = facts.memory.refusal
    if refusal is not None and refusal.code == "stale_fence":
        return True
    ran = facts.session.status.phase in RUNNING_PHASES | {SessionPhase.MOVING}
    absent = pod.health is PodHealth.LIVE and facts.said is None
    return ran and (absent or pod.health is PodHealth.DEAD)


def _word(lease: LeaseView, placement: Placement) -> LedgerWord:
    """Parked under an older fence than the placement's is what it was before it was placed."""
    phase = _LEDGER_PHASES.get(lease.phase, LedgerPhase.OPEN)
    if phase is LedgerPhase.PARKED and lease.fence < placement.fence:
        phase = LedgerPhase.OPEN
    return LedgerWord(phase, lease.fence, lease.reason)


def _judge_object(
    placement: Placement, pod: PodObject | None, feed: PodFeed | None
) -> PodView | None:
    """What the pod's object and its feed say without the ledger; None: nothing certain."""
    uid, name = placement.pod_uid, placement.pod
    if pod is None:
        return PodView(uid, name, PodHealth.DEAD, "PodGone", f"pod {name} is gone", proven=True)
    if pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        sentence = f"pod {name} has ended ({pod.phase})"
        return PodView(uid, name, PodHealth.DEAD, "PodEnded", sentence, proven=True)
    if feed is not None and feed.connected and not feed.suspect:
        health = PodHealth.LIVE if feed.listed else PodHealth.UNHEARD
        leaving = pod.mark == Mark.DRAINING or feed.draining or feed.told_to_drain
        return PodView(uid, name, health, leaving=leaving)
    if has_ended(pod, feed):
        sentence = f"the sidecar of pod {name} has ended ({pod.sidecar_terminated})"
        return PodView(uid, name, PodHealth.DEAD, "SidecarEnded", sentence)
    return None


def _unheard(placement: Placement) -> PodView:
    return PodView(placement.pod_uid, placement.pod, PodHealth.UNHEARD)
