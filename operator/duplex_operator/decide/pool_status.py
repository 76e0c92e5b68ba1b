"""What a pool's status says. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from duplex_api.metadata import Condition, ConditionStatus
from duplex_api.pool import PoolStatus
from duplex_operator.decide.pods import Mark, PodState, PodView
from duplex_operator.decide.scaling import Wanted
from duplex_operator.objects import timestamp

_PRESENT = (
    PodState.STARTING,
    PodState.READY,
    PodState.WAITING,
    PodState.BROKEN,
    PodState.LOST,
)
_MOST_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the pool cannot become what it should. reason: one word."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """waits: why containers that should run do not, one word each, most frequent first. old: pods
    of another template. without_ledger: pods that only the ledger keeps from being ready."""

    generation: int
    selector: str
    wanted: Wanted
    views: Sequence[PodView]
    queued: int
    old: int
    without_ledger: int
    waits: tuple[str, ...]
    trouble: Trouble | None


def pool_status(facts: PoolFacts, before: PoolStatus, now_ms: int) -> PoolStatus:
    """The status as it has to be. A condition keeps its time while its answer is the same."""
    present = [view for view in facts.views if view.state in _PRESENT]
    ready = [view for view in present if view.state is PodState.READY]
    serving = [view for view in ready if view.mark is Mark.NONE]
    known = {condition.type: condition for condition in before.conditions or ()}

    def condition(kind: str, answer: tuple[bool, str, str]) -> Condition:
        true, reason, message = answer
        status = ConditionStatus.TRUE if true else ConditionStatus.FALSE
        last = known.get(kind)
        same = last is not None and last.status is status
        return Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message[:_MOST_MESSAGE],
            last_transition_time=(
                last.last_transition_time if same and last is not None else timestamp(now_ms)
            ),
            observed_generation=facts.generation,
        )

    return PoolStatus(
        observed_generation=facts.generation,
        replicas=len(present),
        ready_replicas=len(ready),
        selector=facts.selector,
        slots=sum(view.slots for view in serving),
        free_slots=sum(max(0, view.slots - view.sessions) for view in serving),
        queued=facts.queued,
        conditions=(
            condition("Ready", _ready(facts, serving)),
            condition("Progressing", _progressing(facts, present, serving)),
            condition("Degraded", _degraded(facts, present)),
        ),
    )


def _ready(facts: PoolFacts, serving: list[PodView]) -> tuple[bool, str, str]:
    if serving:
        return True, "PodsReady", f"{_pods(len(serving))} ready for sessions"
    if not facts.wanted.pods:
        return True, "NoneWanted", f"no pod is wanted: {facts.wanted.message}"
    return False, "NoReadyPods", "no pod takes sessions yet"


def _progressing(
    facts: PoolFacts, present: list[PodView], serving: list[PodView]
) -> tuple[bool, str, str]:
    if facts.trouble is not None:
        return False, facts.trouble.reason, facts.trouble.message
    leaving = sum(view.mark is not Mark.NONE for view in present)
    if facts.old:
        count = _pods(facts.old)
        return True, "RollingOut", f"{count} of an earlier template still there"
    if len(present) - leaving < facts.wanted.pods:
        return True, "Growing", f"{len(present) - leaving} of {_pods(facts.wanted.pods)} there"
    if leaving or len(present) > facts.wanted.pods:
        return True, "Shrinking", f"{_pods(leaving)} to go once no session is left"
    if len(serving) < facts.wanted.pods:
        return True, "Starting", f"{len(serving)} of {_pods(facts.wanted.pods)} ready"
    return False, "AsWanted", facts.wanted.message


def _degraded(facts: PoolFacts, present: list[PodView]) -> tuple[bool, str, str]:
    if facts.trouble is not None:
        return True, facts.trouble.reason, facts.trouble.message
    broken = sum(view.state in (PodState.BROKEN, PodState.ENDED) for view in facts.views)
    if broken:
        return True, "PodsBroken", f"{_pods(broken)} broken; replaced with growing pauses"
    lost = sum(view.state is PodState.LOST for view in present)
    if lost:
        return True, "NodesLost", f"{_pods(lost)} on nodes that do not answer"
    if facts.without_ledger:
        message = f"{_pods(facts.without_ledger)} without the ledger; sessions wait for it there"
        return True, "LedgerAway", message
    if facts.waits:
        return True, "ContainersWait", f"sidecar containers wait: {', '.join(facts.waits)}"
    unplaced = sum(view.unplaced and view.state is PodState.STARTING for view in present)
    if unplaced:
        return True, "NoRoom", f"no node has room for {_pods(unplaced)}"
    return False, "AsWanted", "nothing is wrong"


def _pods(number: int) -> str:
    return f"{number} pod" + ("" if number == 1 else "s")
