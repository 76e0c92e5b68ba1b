"""The next step of a session's life. Pure: a chain of small rules, the first that speaks decides.

Applying the step and deciding again gives the next one, until there is nothing to do. A step that
was applied but not seen to be (the operator died in between) is decided again and changes nothing
the second time.
"""

from collections.abc import Callable
from dataclasses import replace

from duplex_api.leases import LEASE_MARGIN_MS
from duplex_api.metadata import ConditionStatus
from duplex_api.resolve import retention_ms
from duplex_api.session import DesiredState, Placement, SessionPhase
from duplex_operator.decide.acceptance import Accepted, RefusalReason, Refused
from duplex_operator.decide.actions import (
    Action,
    AskForSlot,
    AssignToken,
    Delete,
    End,
    EnsureFinalizer,
    Erase,
    HandOver,
    Nothing,
    Open,
    Park,
    Place,
    RemoveFinalizer,
    WriteStatus,
)
from duplex_operator.decide.facts import LedgerPhase, PodHealth, PodView, SessionFacts
from duplex_operator.decide.status import (
    CONNECTED,
    ENDED,
    LEDGER_REWOUND,
    PLACED,
    READY,
    REWOUND_SENTENCE,
    RUNNING_PHASES,
    build_status,
    camel_reason,
    condition_of,
    is_leaving,
    only_counters,
    since_ms,
    status_patch,
)
from duplex_operator.feed import FeedPhase
from duplex_operator.names import SESSION_FINALIZER

REQUESTED = "Requested"
"""Why a session is parked that its owner wants parked."""
_FINAL_REFUSALS = {
    "no_slot": "NoSlot",
    "stale_fence": "StaleFence",
    "draining": "PodDraining",
    "manifest_conflict": "ManifestConflict",
}
VOICE_REFUSAL = "voice_unusable"
"""Code of the one refusal that is not a pod's."""
ERASURE_REFUSED = "ErasureRefused"
"""Why a session goes whose ledger stays; also told when it is refused for the first time."""
LEDGER_LOST = "ledger_lost"
"""Code of the refusal to begin anew what was told to go on."""
_RETENTION_PASSED: tuple[str, str] = (
    "RetentionPassed",
    "its ledger was not used for its retention",
)
_IDLE_TIMEOUT: tuple[str, str] = ("IdleTimeout", "it had no input for its idleTimeout")
_QUEUEING = (WriteStatus, Nothing)
UNHEARD_LOOK_S = 0.5
LEASE_LOOK_MS = 10
"""Behind the instant at which a lease has so much or so little left: no look comes too early."""
REFUSED_LOOK_S = 5.0

Rule = Callable[[SessionFacts], Action | None]


def decide(facts: SessionFacts) -> Action:
    """What to do now."""
    for rule in RULES:
        action = rule(facts)
        if action is not None:
            return action
    return Nothing()


def suspect_look_s(pod: PodView | None) -> float | None:
    """A session of a suspect pod is looked at when its owner stops using its lease, and when that
    has run out, whatever else is to do; None for one whose pod is not suspect."""
    if pod is None or pod.lease_left_ms is None:
        return None
    used_ms = pod.lease_left_ms - LEASE_MARGIN_MS
    until_ms = used_ms if used_ms > 0 else pod.lease_left_ms
    return min((until_ms + LEASE_LOOK_MS) / 1000, UNHEARD_LOOK_S)


def when_deleted(facts: SessionFacts) -> Action | None:
    """End it, erase it, let it go; bounded, so that a lost ledger never holds a namespace."""
    meta = facts.session.meta
    if not meta.deleting:
        return None
    if SESSION_FINALIZER not in meta.finalizers:
        return Nothing()
    left_ms = meta.deleted_ms + facts.limits.erase_bound_ms - facts.now_ms
    overdue = left_ms <= 0
    runs_on = _runs_on(facts)
    if runs_on and not overdue:
        return End(runs_on, "Deleted")
    if not facts.memory.erased and not overdue:
        pause_ms = min(facts.memory.erase_again_ms - facts.now_ms, left_ms)
        return Nothing(pause_ms / 1000) if pause_ms > 0 else Erase()
    if facts.memory.erased:
        sentence = "ended; its ledger and route record are erased"
        return RemoveFinalizer("Erased", sentence, warning=False)
    if why := facts.memory.erase_refused:
        sentence = f"its ledger is not erased, which is tried again ever more rarely: {why}"
        return RemoveFinalizer(ERASURE_REFUSED, sentence, warning=True)
    sentence = "its ledger cannot be reached; it is erased when it can, or when it expires"
    return RemoveFinalizer("ErasurePending", sentence, warning=True)


def when_ended(facts: SessionFacts) -> Action | None:
    """Keep the object for its ttl."""
    status = facts.session.status
    if status.phase is not SessionPhase.ENDED:
        return None
    ended_ms = since_ms(status, ENDED) or facts.session.meta.created_ms
    left_ms = ended_ms + facts.lifecycle_ms("ttl_after_finished") - facts.now_ms
    if left_ms <= 0:
        return Delete("TTLPassed", "it ended longer ago than its ttlAfterFinished")
    return Nothing(left_ms / 1000)


def when_new(facts: SessionFacts) -> Action | None:
    if SESSION_FINALIZER in facts.session.meta.finalizers:
        return None
    return EnsureFinalizer()


def when_over(facts: SessionFacts) -> Action | None:
    """Closed by its owner, or ended where it ran."""
    if facts.said is not None and facts.said.phase is FeedPhase.ENDED:
        reason = camel_reason(facts.said.reason, "Ended")
        return _finish(facts, reason, f"it ended on its pod: {facts.said.reason or 'ended'}")
    if facts.ledger is not None and facts.ledger.phase is LedgerPhase.ENDED:
        word = facts.ledger.reason
        return _finish(facts, camel_reason(word, "Ended"), f"its ledger is closed: {word}")
    refusal = facts.memory.refusal
    if refusal is not None and refusal.code == "session_ended":
        return _finish(facts, "Ended", refusal.message)
    if refusal is not None and refusal.code == LEDGER_LOST:
        sentence = "it had been talked to, and the ledger knows nothing of it any more"
        return _finish(facts, "LedgerLost", sentence, warning=True)
    if facts.desired is not DesiredState.CLOSED:
        return None
    if runs_on := _runs_on(facts):
        return End(runs_on, "Closed")
    return _finish(facts, "Closed", "its owner closed it")


def when_placed(facts: SessionFacts) -> Action | None:
    """It has a slot: see that it runs there."""
    placement, pod = facts.placement, facts.pod
    if placement is None or pod is None:
        return None
    dead = pod.health is PodHealth.DEAD
    parked = facts.ledger is not None and facts.ledger.phase is LedgerPhase.PARKED
    if facts.ledger is not None and parked and not (dead and _has_client(facts)):
        return _parked_by_its_pod(facts, facts.ledger.reason)
    if dead:
        return _lost(facts, pod.reason, pod.sentence)
    if ahead := _ahead_of_death(facts, pod):
        return ahead
    if facts.said is not None and facts.said.phase is FeedPhase.PARKED:
        return _parked_by_its_pod(facts, facts.said.reason)
    refusal = facts.memory.refusal
    if refusal is not None and refusal.fence == placement.fence:
        return _refused(facts, refusal.code, refusal.message)
    if facts.desired is DesiredState.PARKED and facts.said is not None:
        # It may have to wait, for the ledger say, and that is to be seen.
        parking, seen = _park(facts, placement.pod_uid), _reflect(facts, placement)
        return parking if isinstance(parking, Park) or isinstance(seen, Nothing) else seen
    if facts.said is not None:
        changed = _changed_token(facts, placement)
        return changed or _leave(facts, placement) or _reflect(facts, placement)
    if pod.health is PodHealth.UNHEARD:
        return Nothing(UNHEARD_LOOK_S)
    return _fetch(facts, placement) or _absent(facts, placement)


def when_unplaced(facts: SessionFacts) -> Action | None:
    """It has no slot: should it have one?"""
    status = facts.session.status
    if facts.desired is DesiredState.PARKED:
        return _stay_parked(facts, REQUESTED, "its owner wants it parked")
    if status.phase is SessionPhase.PARKED and not _wakes(facts):
        return _stay_parked(facts, status.reason or "Parked", status.message or "it is parked")
    if isinstance(facts.verdict, Refused):
        return _write(
            facts, SessionPhase.PENDING, facts.verdict.reason, facts.verdict.sentence, event=True
        ) or Nothing(REFUSED_LOOK_S)
    if facts.token is None:
        if facts.ledger_away:
            sentence = "the ledger cannot be reached"
            pending = _write(facts, SessionPhase.PENDING, "LedgerUnavailable", sentence)
            return pending or Nothing(1.0)
        return AssignToken()
    return _seek_slot(facts)


RULES: tuple[Rule, ...] = (
    when_deleted,
    when_ended,
    when_new,
    when_over,
    when_placed,
    when_unplaced,
)


def _runs_on(facts: SessionFacts) -> str:
    """The pod whose sidecar may still run it and has to be told of the end; empty for none."""
    last = facts.session.status.last_placement
    if facts.placement is None or facts.memory.ended:
        return ""
    if facts.source is not None and last is not None:
        return last.pod_uid
    if facts.said is not None and facts.said.phase is FeedPhase.ENDED:
        return ""
    dead = facts.pod is None or facts.pod.health is PodHealth.DEAD
    return "" if dead else facts.placement.pod_uid


def _finish(
    facts: SessionFacts, reason: str, sentence: str, *, warning: bool = False
) -> WriteStatus:
    status = build_status(facts, SessionPhase.ENDED, reason, sentence, placement=None)
    return WriteStatus(status, reason, sentence, event=True, warning=warning)


def _write(
    facts: SessionFacts,
    phase: SessionPhase,
    reason: str,
    sentence: str,
    *,
    event: bool = False,
    position: int | None = None,
    queued: bool = False,
) -> Action | None:
    """The status of a session without a slot, if it says something new."""
    before = facts.session.status
    status = build_status(facts, phase, reason, sentence, placement=None, queue_position=position)
    if not status_patch(before, status):
        return None
    changed = (before.phase, before.reason) != (phase, reason)
    return WriteStatus(status, reason, sentence, event=event and changed, queued=queued)


def _lost(facts: SessionFacts, reason: str, sentence: str) -> Action:
    """It cannot run where it was placed: another slot at once, else back into the queue."""
    able = isinstance(facts.verdict, Accepted) and facts.token is not None
    if facts.desired is DesiredState.PARKED or (able and facts.wait is not None):
        return _requeue(facts, reason, sentence)
    if facts.token is None and not facts.ledger_away and isinstance(facts.verdict, Accepted):
        return AssignToken()
    if not able:
        return _requeue(facts, reason, sentence)
    return _place(facts) or AskForSlot()


def _ahead_of_death(facts: SessionFacts, pod: PodView) -> Action | None:
    """Its pod is suspect, and nobody uses its lease any more unless it is renewed: another slot,
    if there is one, whose pod waits for the lease's end. An owner that does renew it goes on, and
    hands it over once it is heard of again; without another slot nothing has changed for it."""
    used = pod.lease_left_ms is None or pod.lease_left_ms > LEASE_MARGIN_MS
    able = isinstance(facts.verdict, Accepted) and facts.token is not None
    if used or not able or facts.desired is not DesiredState.RUNNING:
        return None
    if placed := _place(facts):
        return placed
    return AskForSlot() if facts.wait is None else Nothing(queued=True)


def _requeue(facts: SessionFacts, reason: str, sentence: str) -> Action:
    phase = SessionPhase.MOVING if _ran(facts) else SessionPhase.QUEUED
    status = build_status(facts, phase, reason, sentence, placement=None)
    return WriteStatus(status, reason, sentence, event=True, warning=True, queued=True)


def _refused(facts: SessionFacts, code: str, message: str) -> Action:
    """The pod's final answer."""
    if code == VOICE_REFUSAL:
        return _lost(facts, RefusalReason.VOICE_UNUSABLE, message)
    return _lost(facts, _FINAL_REFUSALS.get(code, "RefusedByPod"), f"the pod refused: {message}")


def _parked_by_its_pod(facts: SessionFacts, word: str) -> Action:
    """word: why, as the sidecar or the ledger has it."""
    if is_leaving(word) and _has_client(facts) and facts.desired is DesiredState.RUNNING:
        return _lost(facts, camel_reason(word, "Drained"), "its pod is leaving")
    return _parked(facts, camel_reason(word, "Parked"))


def _has_client(facts: SessionFacts) -> bool:
    """Whether somebody was talking when it was last heard of."""
    connected = condition_of(facts.session.status, CONNECTED)
    attached = facts.said is not None and facts.said.attached
    return attached or (connected is not None and connected.status is ConditionStatus.TRUE)


def _parked(facts: SessionFacts, reason: str) -> Action:
    if facts.desired is DesiredState.PARKED:
        reason = REQUESTED
    sentence = "it lives in the ledger alone and comes back when its client does"
    status = build_status(facts, SessionPhase.PARKED, reason, sentence, placement=None)
    return WriteStatus(status, reason, sentence, event=True)


def _park(facts: SessionFacts, pod_uid: str) -> Action:
    waited_ms = facts.now_ms - facts.memory.asked_park_ms
    if waited_ms < facts.limits.repark_after_ms:
        return Nothing((facts.limits.repark_after_ms - waited_ms) / 1000)
    return Park(pod_uid)


def _leave(facts: SessionFacts, placement: Placement) -> Action | None:
    """Its pod is being emptied: whoever talks there gets a slot elsewhere, if there is one, before
    the pod parks what it has left."""
    leaving = facts.pod is not None and facts.pod.leaving
    talks = facts.said is not None and facts.said.attached
    able = isinstance(facts.verdict, Accepted) and facts.token is not None
    if not (leaving and talks and able):
        return None
    placed = _place(facts)
    if placed is not None:
        return placed
    if facts.wait is None:
        return AskForSlot()
    reflected = _reflect(facts, placement)
    return replace(reflected, queued=True) if isinstance(reflected, _QUEUEING) else reflected


def _fetch(facts: SessionFacts, placement: Placement) -> Action | None:
    """It has a slot here and runs still where it was before: it is handed over, or else parked
    there and taken up here."""
    source, last = facts.source, facts.session.status.last_placement
    if source is None or last is None:
        return None
    if placement.fence == facts.memory.opened_fence:
        return None  # it was handed over: the feeds are a moment behind
    unmoved = placement.fence == facts.memory.unmoved_fence
    if unmoved or not source.attached or facts.token is None:
        return _park(facts, last.pod_uid)
    return HandOver(placement.pod_uid, last.pod_uid, placement.fence)


def _changed_token(facts: SessionFacts, placement: Placement) -> Action | None:
    """Its sidecar still lets the old token in: opening it again tells the new one."""
    live = facts.pod is not None and facts.pod.health is PodHealth.LIVE
    due = facts.memory.token_untold and facts.now_ms >= facts.memory.told_from_ms
    if due and facts.token is not None and live:
        return Open(placement.pod_uid, placement.fence, "", goes_on=has_history(facts))
    return None


def _absent(facts: SessionFacts, placement: Placement) -> Action:
    """The pod is well and does not know the session (under this fence)."""
    if facts.session.status.phase in RUNNING_PHASES:
        return _lost(facts, "ReplicaRestarted", f"pod {placement.pod} runs it no more")
    if isinstance(facts.verdict, Refused):
        # Its pool takes it no more, or never did and the placement is none of ours.
        return _requeue(facts, facts.verdict.reason, facts.verdict.sentence)
    if facts.memory.opened_fence == placement.fence:
        waited_ms = facts.now_ms - facts.memory.opened_ms
        if waited_ms < facts.limits.reopen_after_ms:
            return Nothing((facts.limits.reopen_after_ms - waited_ms) / 1000)
    if facts.token is None:
        return Nothing(1.0) if facts.ledger_away else AssignToken()
    last = facts.session.status.last_placement
    elsewhere = last is not None and last.pod_uid != placement.pod_uid
    dead = last.pod_uid if last is not None and elsewhere else ""
    return Open(placement.pod_uid, placement.fence, dead, goes_on=has_history(facts))


def _reflect(facts: SessionFacts, placement: Placement) -> Action:
    """It runs: say so, at once what somebody waits for, once a minute what only counts."""
    said, before = facts.said, facts.session.status
    assert said is not None
    if facts.token is None and not facts.ledger_away:
        return AssignToken()
    active = said.phase is FeedPhase.ACTIVE
    phase = SessionPhase.ACTIVE if active else SessionPhase.READY
    sentence = f"it runs on pod {placement.pod}"
    reason = "ClientAttached" if said.attached else "NoClient"
    status = build_status(facts, phase, reason, sentence, placement=placement)
    patch = status_patch(before, status)
    if not patch:
        return Nothing()
    due_ms = facts.memory.flushed_ms + facts.limits.counters_period_ms - facts.now_ms
    if only_counters(patch) and due_ms > 0:
        return Nothing(due_ms / 1000)
    if said.ledger_rewound and condition_of(before, LEDGER_REWOUND) is None:
        return WriteStatus(status, LEDGER_REWOUND, REWOUND_SENTENCE, event=True, warning=True)
    ready = condition_of(before, READY)
    first = ready is None or ready.status is not ConditionStatus.TRUE
    return WriteStatus(status, "Ready", sentence, event=first)


def _ran(facts: SessionFacts) -> bool:
    phase = facts.session.status.phase
    return phase in RUNNING_PHASES or phase is SessionPhase.MOVING


def _wakes(facts: SessionFacts) -> bool:
    """Whether a parked session wants a slot again: its client waits, or its owner says so."""
    return facts.memory.woken or facts.session.status.reason == REQUESTED


def has_history(facts: SessionFacts) -> bool:
    """Whether anything was said in it, as far as its status knows. Such a session is never begun
    anew; one that lost nothing but its opening is."""
    return bool(facts.session.status.units)


def _stay_parked(facts: SessionFacts, reason: str, sentence: str) -> Action:
    """Nobody writes to its ledger now: beyond its retention there is nothing to come back to."""
    parked_ms = since_ms(facts.session.status, PLACED) or facts.now_ms
    kept_ms = retention_ms(facts.session.spec.lifecycle)
    bounds: list[tuple[int, str, str]] = [(kept_ms, *_RETENTION_PASSED)]
    if facts.desired is not DesiredState.PARKED:
        bounds.append((facts.lifecycle_ms("idle_timeout"), *_IDLE_TIMEOUT))
    bound_ms, over, why = min(bounds)
    left_ms = parked_ms + bound_ms - facts.now_ms
    if facts.session.status.phase is SessionPhase.PARKED and left_ms <= 0:
        return _finish(facts, over, why)
    written = _write(facts, SessionPhase.PARKED, reason, sentence, event=True)
    return written or Nothing(max(left_ms, 1) / 1000)


def _seek_slot(facts: SessionFacts) -> Action:
    placed = _place(facts)
    if placed is not None:
        return placed
    wait = facts.wait
    if wait is None:
        return AskForSlot()
    before, memory, limits = facts.session.status, facts.memory, facts.limits
    quiet_ms = memory.waits_since_ms + limits.quiet_wait_ms - facts.now_ms
    told = before.phase is SessionPhase.QUEUED and before.reason == wait.reason
    if not told and quiet_ms > 0:
        return Nothing(quiet_ms / 1000, queued=True)
    due_ms = memory.positioned_ms + limits.position_period_ms - facts.now_ms
    if told and due_ms > 0:
        return Nothing(due_ms / 1000, queued=True)
    written = _write(
        facts,
        SessionPhase.QUEUED,
        wait.reason,
        wait.sentence,
        event=True,
        position=wait.position,
        queued=True,
    )
    return written or Nothing(limits.position_period_ms / 1000, queued=True)


def _place(facts: SessionFacts) -> Action | None:
    """The promise made good: a new placement with a larger fence."""
    promise = facts.promise
    if promise is None:
        return None
    placement = Placement(pod=promise.pod, pod_uid=promise.pod_uid, fence=facts.last_fence + 1)
    phase = SessionPhase.MOVING if _ran(facts) else SessionPhase.QUEUED
    sentence = f"placed on pod {promise.pod} with fence {placement.fence}"
    status = build_status(facts, phase, "Placed", sentence, placement=placement)
    return Place(status, sentence)
