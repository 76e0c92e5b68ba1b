"""A pool's pods as `decide.pods` sees them: from what is in memory, without I/O."""

from collections.abc import Collection, Sequence

from duplex_api.resolve_pool import ResolvedPool
from duplex_operator.context import Context
from duplex_operator.decide.drain import Leave, LeaveReason, leaving
from duplex_operator.decide.pods import Mark, PodState, PodView
from duplex_operator.feed import FeedPhase
from duplex_operator.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_CHECKPOINT_HASH,
    ANNOTATION_IDLE_SINCE,
    ANNOTATION_MARKED_AT,
)
from duplex_operator.objects import ObjectKey, PodObject, PodPhase, PoolObject, timestamp_ms

BROKEN_AFTER_RESTARTS = 3
STUCK_MARGIN_MS = 60_000
"""Beyond the start-up time: a sidecar that runs and does not become ready, while others are."""
_CRASH_LOOP = "CrashLoopBackOff"
_MARKS = {str(mark): mark for mark in Mark}
_LIVE = (FeedPhase.READY, FeedPhase.ACTIVE)


def own_pods(context: Context, pool: PoolObject) -> tuple[PodObject, ...]:
    """Pods that this very pool object controls: not those of an earlier one of its name."""
    pods = context.store.pods_of(pool.meta.key)
    return tuple(pod for pod in pods if pod.owner_uid == pool.meta.uid)


def view_pods(
    context: Context, spec: ResolvedPool, pods: Sequence[PodObject], deleted: Collection[str]
) -> list[PodView]:
    """deleted: uids of pods whose deletion was asked for and is not seen yet."""
    stuck_before_ms = stuck_before(pods, spec.startup_timeout_ms, context.now_ms())
    return [_view_pod(context, spec, pod, deleted, stuck_before_ms) for pod in pods]


def stuck_before(pods: Sequence[PodObject], startup_timeout_ms: int, now_ms: int) -> int:
    """A pod that has not been ready since then is stuck; 0: none is. With the ledger away none is
    ready, and new ones would not be either; when it is back they do not become so all at once."""
    settled_ms = now_ms - STUCK_MARGIN_MS
    others_ready = any(pod.ready and pod.readiness_changed_ms <= settled_ms for pod in pods)
    return now_ms - startup_timeout_ms - STUCK_MARGIN_MS if others_ready else 0


def _view_pod(
    context: Context,
    spec: ResolvedPool,
    pod: PodObject,
    deleted: Collection[str],
    stuck_before_ms: int,
) -> PodView:
    annotations = pod.meta.annotations
    node = context.store.nodes.get(ObjectKey("", pod.node)) if pod.node else None
    leave = leaving(pod, node)
    feed = context.fleet.pod(pod.meta.uid)
    created_ms = pod.meta.created_ms
    attempt = annotations.get(ANNOTATION_ATTEMPT, "")
    is_up = feed is not None and (feed.is_up or feed.is_unheard)
    state = _state(pod, leave, stuck_before_ms, is_up=is_up)
    return PodView(
        name=pod.meta.key.name,
        uid=pod.meta.uid,
        state=PodState.DELETING if pod.meta.uid in deleted else state,
        template_hash=pod.template_hash,
        checkpoint_hash=annotations.get(ANNOTATION_CHECKPOINT_HASH, ""),
        slots=feed.slots if feed is not None and feed.slots else spec.slots,
        sessions=len(sessions_of(context, pod.meta.uid)),
        created_ms=created_ms,
        changed_ms=pod.readiness_changed_ms or created_ms,
        idle_since_ms=timestamp_ms(annotations.get(ANNOTATION_IDLE_SINCE, "")) or created_ms,
        mark=_MARKS.get(pod.mark, Mark.NONE),
        marked_ms=timestamp_ms(annotations.get(ANNOTATION_MARKED_AT, "")),
        closed=feed is not None and feed.listed and feed.draining,
        leave=leave,
        attempt=int(attempt) if attempt.isdecimal() else 0,
        unplaced=pod.unplaced,
    )


def sessions_of(context: Context, pod_uid: str) -> frozenset[str]:
    """Uids of sessions that are placed there, promised a slot there, or run there. What a feed
    said before it broke off for good counts no more: the placement does."""
    feed = context.fleet.pod(pod_uid)
    heard = feed is not None and (feed.connected or feed.is_unheard)
    said = context.fleet.sessions_on(pod_uid) if heard else {}
    return frozenset(
        (
            *context.store.placed_uids(pod_uid),
            *(uid for uid, session in said.items() if session.phase in _LIVE),
            *context.board.promised_on(pod_uid),
        )
    )


def is_occupied(context: Context, pod_uid: str) -> bool:
    """Whether nobody may evict it. What a pod has that has not been heard yet is not known: it
    stays what it was."""
    feed, pod = context.fleet.pod(pod_uid), context.store.pod_by_uid(pod_uid)
    unknown = feed is not None and feed.is_unheard and pod is not None and pod.occupied is True
    return unknown or bool(sessions_of(context, pod_uid))


def without_ledger(context: Context, pods: Sequence[PodObject]) -> int:
    """How many of them nothing but the ledger keeps from being ready, by their feeds."""
    feeds = (context.fleet.pod(pod.meta.uid) for pod in pods)
    return sum(feed is not None and feed.is_up and feed.ledger_away for feed in feeds)


def talkers_on(context: Context, pod_uid: str) -> int:
    """Sessions that run there and have a client, by its feed; of those that are gone from
    Kubernetes nobody takes care any more."""
    said = context.fleet.sessions_on(pod_uid).items()
    return sum(
        one.attached and one.phase in _LIVE and context.store.session_by_uid(uid) is not None
        for uid, one in said
    )


def queued_for(context: Context, pool: PoolObject) -> int:
    """Sessions that wait for a slot of the pool. One that has just got its slot may still stand in
    the queue for a moment; counted twice it would have a pod made for it."""
    store, board = context.store, context.board
    waiting = 0
    for uid in board.waiting_for(pool.meta.key):
        session = store.session_by_uid(uid)
        placed = session is not None and session.status.placement is not None
        waiting += not placed and board.promised(uid) is None
    return waiting


def _state(pod: PodObject, leave: Leave | None, stuck_before_ms: int, *, is_up: bool) -> PodState:
    """is_up: by its feed, which is ahead of the kubelet, or nothing else is known yet."""
    if pod.meta.deleting:
        return PodState.DELETING
    if pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
        return PodState.ENDED
    if leave is not None and leave.reason is LeaveReason.NODE_LOST:
        return PodState.LOST
    if pod.ready:
        return PodState.READY
    loops = pod.sidecar_waits == _CRASH_LOOP and pod.sidecar_restarts >= BROKEN_AFTER_RESTARTS
    runs = pod.phase is PodPhase.RUNNING and not pod.sidecar_waits
    stuck = runs and 0 < pod.readiness_changed_ms <= stuck_before_ms
    if loops or stuck:
        return PodState.BROKEN
    return PodState.WAITING if is_up else PodState.STARTING
