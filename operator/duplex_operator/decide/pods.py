"""Which pods of a pool to make, to empty and to delete. Pure: one look, one list of actions.

A pod that is ready is never deleted at once. First it is marked (on the pod, so that the mark
outlives the operator), then its sidecar takes no new session and lets go of those it has, and only
when it says so and is empty, or when the bound of a drain has passed, it is deleted. So a session
that is placed while we decide is never lost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from duplex_api.pool import CheckpointChange
from duplex_operator.decide.drain import Leave, LeaveReason
from duplex_operator.decide.pauses import doubled_ms
from duplex_operator.decide.scaling import Wanted

IDLE_BEFORE_SCALE_DOWN_MS = 300_000
"""An empty pod that only autoscaling would remove is kept this long."""
SURGE_PATIENCE_MS = 60_000
"""A pod above the wanted number that no node has had room for this long: there is no room."""
LEDGER_LOOK_MS = 5_000
"""Between two looks at a drain that only waits for the ledger, of which there are news anyway."""
FIRST_BACKOFF_MS = 10_000
LONGEST_BACKOFF_MS = 600_000
WORKED_MS = 600_000
"""A pod that has been up this long before it broke starts the backoff anew."""


class PodState(StrEnum):
    STARTING = "Starting"
    READY = "Ready"
    WAITING = "Waiting"
    """Its sidecar is up, though it does not count as ready: the ledger is away, or has just come
    back. What runs there goes on when it does. Or its sidecar has not been heard yet."""
    BROKEN = "Broken"
    """It will not become ready: its containers keep ending, or it runs without becoming so."""
    LOST = "Lost"
    """Its node does not answer. It may come back."""
    ENDED = "Ended"
    DELETING = "Deleting"


_UP = (PodState.READY, PodState.WAITING)
"""There may be sessions, or be placed some at any moment."""


class Mark(StrEnum):
    """What was decided about a pod."""

    NONE = ""
    DRAINING = "draining"
    """Its sessions leave, then it is deleted."""
    FINISHING = "finishing"
    """It takes no new session. Those that it has stay until they end."""
    ENDING = "ending"
    """Its sessions are ended, then it is deleted."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod as this decision sees it. Times are milliseconds since 1970.

    sessions: that hold a slot of it, or are being placed there. closed: its sidecar has confirmed
    that it takes no new session. changed_ms: when it became ready, or ceased to be. idle_since_ms:
    since when it has had no session. attempt: how many pods in a row broke before it. unplaced: no
    node has room for it.
    """

    name: str
    uid: str
    state: PodState
    template_hash: str
    checkpoint_hash: str
    slots: int
    sessions: int
    created_ms: int
    changed_ms: int
    idle_since_ms: int
    mark: Mark = Mark.NONE
    marked_ms: int = 0
    closed: bool = False
    leave: Leave | None = None
    attempt: int = 0
    unplaced: bool = False


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the pool is to become. drain_bound_ms: after it a drain counts as done."""

    wanted: Wanted
    template_hash: str
    checkpoint_hash: str
    checkpoint_change: CheckpointChange
    max_surge: int
    drain_bound_ms: int


@dataclass(frozen=True, slots=True)
class CreatePods:
    """count new pods of the current template."""

    count: int
    attempt: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class MarkPod:
    pod: PodView
    mark: Mark
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    pod: PodView
    reason: str
    message: str


Action = CreatePods | MarkPod | DeletePod


@dataclass(slots=True)
class _Draft:
    """The decision while it is made. any_ready: whether a pod of the pool is, which shows that the
    ledger is there. staying: pods that nobody has decided against."""

    plan: PoolPlan
    now_ms: int
    any_ready: bool
    actions: list[Action] = field(default_factory=list)
    staying: list[PodView] = field(default_factory=list)
    holding: int = 0
    """Pods that we ourselves sent away and that still hold their devices."""
    waiting: int = 0
    """Broken ones whose place stays theirs until their backoff is over."""
    attempt: int = 0
    due_ms: int | None = None

    def look_again(self, at_ms: int) -> None:
        self.due_ms = at_ms if self.due_ms is None else min(self.due_ms, at_ms)

    def remove(
        self, pod: PodView, mark: Mark, reason: str, message: str, *, holds: bool = True
    ) -> None:
        """Empties a pod, or deletes one on which there can be no session. holds: until it is gone
        no other pod can have its place."""
        if pod in self.staying:
            self.staying.remove(pod)
        if pod.state not in _UP and not pod.sessions:
            self.actions.append(DeletePod(pod, reason, message))
            return
        self.holding += holds
        # An empty pod has nothing that could finish.
        mark = mark if pod.sessions else Mark.DRAINING
        self.actions.append(MarkPod(pod, mark, reason, message))


@dataclass(frozen=True, slots=True)
class PodDecision:
    """look_again_ms: when time alone will change the decision; None: never. old: pods of another
    template that are still there."""

    actions: tuple[Action, ...]
    look_again_ms: int | None
    old: int


def decide_pods(plan: PoolPlan, pods: Sequence[PodView], now_ms: int) -> PodDecision:
    """The rules, in order. What one has decided, the next ones take as done."""
    draft = _Draft(plan, now_ms, any(pod.state is PodState.READY for pod in pods))
    present = [pod for pod in pods if pod.state is not PodState.DELETING]
    for pod in present:
        _look_at(draft, pod)
    _shrink(draft)
    _roll(draft)
    _grow(draft)
    old = sum(pod.template_hash != plan.template_hash for pod in present)
    return PodDecision(tuple(draft.actions), draft.due_ms, old)


def _look_at(draft: _Draft, pod: PodView) -> None:
    """What has to be done about one pod whatever the others are; else it stays."""
    if pod.mark is not Mark.NONE:
        _go_on(draft, pod)
    elif pod.state in (PodState.BROKEN, PodState.ENDED):
        _replace(draft, pod)
    elif pod.state is PodState.LOST:
        return  # its place is free; if it comes back, it is one too many
    elif pod.leave is not None:
        # Its place goes with its node, so another one is made at once.
        draft.remove(pod, Mark.DRAINING, pod.leave.reason, pod.leave.message, holds=False)
    else:
        draft.staying.append(pod)


def _go_on(draft: _Draft, pod: PodView) -> None:
    """A pod that was marked before."""
    over_ms = pod.marked_ms + draft.plan.drain_bound_ms
    if pod.state is PodState.ENDED or (not pod.sessions and _needs_no_word(pod)):
        draft.actions.append(DeletePod(pod, "Drained", "no session is left on it"))
        return
    if pod.leave is None:
        draft.holding += 1
    if pod.mark is Mark.FINISHING:
        if pod.leave is not None:
            draft.actions.append(MarkPod(pod, Mark.DRAINING, pod.leave.reason, pod.leave.message))
        elif not pod.sessions:
            draft.actions.append(
                MarkPod(pod, Mark.DRAINING, "Finished", "its last session has ended")
            )
    elif draft.now_ms >= over_ms and _waits_for_ledger(draft, pod):
        draft.look_again(draft.now_ms + LEDGER_LOOK_MS)
    elif draft.now_ms >= over_ms:
        draft.actions.append(
            DeletePod(pod, "DrainBoundPassed", "the bound of its drain has passed")
        )
    else:
        draft.look_again(over_ms)


def _waits_for_ledger(draft: _Draft, pod: PodView) -> bool:
    """With the ledger away for all nobody can take over what it has, and if that comes back shorter
    than it was, only those who still run can mend it. A pod whose node is going goes with it."""
    return pod.state is PodState.WAITING and not draft.any_ready and pod.leave is None


def _needs_no_word(pod: PodView) -> bool:
    """Nothing can be placed on it any more: its sidecar has said so, or cannot be ready."""
    return pod.closed or pod.state not in _UP


def _replace(draft: _Draft, pod: PodView) -> None:
    """Broken and ended pods, more slowly the more of them there were in a row."""
    if pod.leave is not None and pod.leave.reason is not LeaveReason.NODE_CORDONED:
        # Not its own fault.
        draft.actions.append(DeletePod(pod, pod.leave.reason, pod.leave.message))
        return
    if pod.state is PodState.BROKEN and pod.sessions:
        draft.remove(pod, Mark.DRAINING, "Broken", "it does not become ready again")
        return
    if pod.template_hash != draft.plan.template_hash:
        draft.actions.append(DeletePod(pod, "RollOut", "the pool's template has changed"))
        return
    worked = pod.changed_ms - pod.created_ms >= WORKED_MS
    attempt = 0 if worked else pod.attempt
    due_ms = pod.changed_ms + backoff_ms(attempt)
    if draft.now_ms < due_ms:
        draft.look_again(due_ms)
        draft.waiting += 1
        return
    draft.attempt = max(draft.attempt, attempt + 1)
    message = "it has ended" if pod.state is PodState.ENDED else "it does not become ready"
    draft.actions.append(DeletePod(pod, "Broken", message))


def backoff_ms(attempt: int) -> int:
    """How long the pod stays that broke as number `attempt` in a row: 0, 10 s, 20 s, ... 10 min."""
    if attempt == 0:
        return 0
    return doubled_ms(FIRST_BACKOFF_MS, attempt - 1, LONGEST_BACKOFF_MS)


def _shrink(draft: _Draft) -> None:
    """Sends away what is above the wanted number: old ones first, then those that cost least."""
    plan = draft.plan
    surplus = len(draft.staying) - plan.wanted.pods
    if _old(draft):
        surplus = max(surplus - plan.max_surge, len(_current(draft)) - plan.wanted.pods)
    for pod in _cheapest_first(draft.staying, plan.template_hash):
        if surplus <= 0:
            return
        if not _may_shrink(draft, pod):
            continue
        surplus -= 1
        draft.remove(pod, _mark_of(plan, pod), "ScaleDown", plan.wanted.message)


def _may_shrink(draft: _Draft, pod: PodView) -> bool:
    if not draft.plan.wanted.only_empty or pod.template_hash != draft.plan.template_hash:
        return True
    if pod.sessions:
        return False
    if pod.state not in _UP:
        return True
    due_ms = max(pod.idle_since_ms, pod.changed_ms) + IDLE_BEFORE_SCALE_DOWN_MS
    if draft.now_ms < due_ms:
        draft.look_again(due_ms)
        return False
    return True


def _roll(draft: _Draft) -> None:
    """Sends old pods away as far as enough others are ready."""
    plan = draft.plan
    old = _old(draft)
    if not old:
        return
    ready = sum(pod.state is PodState.READY for pod in draft.staying)
    spare = ready - (plan.wanted.pods - (0 if _surge_works(draft) else 1))
    for pod in _cheapest_first(old, plan.template_hash):
        if not _may_roll(pod, ready, spare):
            continue
        spare -= pod.state is PodState.READY
        message = "the pool's template has changed"
        if pod.checkpoint_hash != plan.checkpoint_hash:
            message = f"the pool's checkpoint has changed: {plan.checkpoint_change}"
        draft.remove(pod, _mark_of(plan, pod), "RollOut", message)


def _may_roll(pod: PodView, ready: int, spare: int) -> bool:
    """spare: pods that are ready beyond those that must stay; it is one of them if it is ready."""
    if pod.state is PodState.READY:
        return spare > 0
    if pod.state is PodState.WAITING:
        # With the ledger away for all of them nobody could take over what it has.
        return spare >= 0 and ready > 0
    # A feed may not have said yet that it only waits.
    return spare >= 0 or not pod.sessions


def _surge_works(draft: _Draft) -> bool:
    """Whether pods above the wanted number find room. It is never assumed."""
    if not draft.plan.max_surge:
        return False
    for pod in _current(draft):
        if pod.state is PodState.STARTING and pod.unplaced:
            due_ms = pod.created_ms + SURGE_PATIENCE_MS
            if draft.now_ms >= due_ms:
                return False
            draft.look_again(due_ms)
    return True


def _grow(draft: _Draft) -> None:
    plan = draft.plan
    rolling = bool(_old(draft)) or draft.holding > 0
    room = plan.wanted.pods + (plan.max_surge if rolling else 0)
    missing = plan.wanted.pods - len(_current(draft)) - draft.waiting
    count = min(missing, room - len(draft.staying) - draft.holding - draft.waiting)
    if count > 0:
        draft.actions.append(CreatePods(count, draft.attempt, "Create", plan.wanted.message))


def _mark_of(plan: PoolPlan, pod: PodView) -> Mark:
    """A new checkpoint never gets the conversations of another one."""
    if pod.checkpoint_hash == plan.checkpoint_hash:
        return Mark.DRAINING
    ends = plan.checkpoint_change is CheckpointChange.END
    return Mark.ENDING if ends else Mark.FINISHING


def _cheapest_first(pods: Iterable[PodView], template_hash: str) -> list[PodView]:
    """Old templates, then pods that are not ready, then few sessions, then the youngest."""
    return sorted(
        pods,
        key=lambda pod: (
            pod.template_hash == template_hash,
            pod.sessions > 0,
            pod.state is PodState.READY,
            pod.sessions,
            -pod.created_ms,
            pod.name,
        ),
    )


def _current(draft: _Draft) -> list[PodView]:
    return [pod for pod in draft.staying if pod.template_hash == draft.plan.template_hash]


def _old(draft: _Draft) -> list[PodView]:
    return [pod for pod in draft.staying if pod.template_hash != draft.plan.template_hash]
