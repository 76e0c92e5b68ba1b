"""Who gets which slot. Pure: the queue and the pods of one pool in, promises and reasons out.

First come, first served within a priority; a pod never gets more than its free slots; a session
goes back to the pod that last held it where that has room, else to the fullest pod (which keeps
whole pods empty for scaling down). Nobody who may be placed is passed over for somebody behind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class WaitReason(StrEnum):
    """Condition reasons of a session that waits for a slot."""

    NO_PODS = "NoPods"
    NO_READY_PODS = "NoReadyPods"
    NO_FREE_SLOTS = "NoFreeSlots"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A session that wants a slot. arrived_ms: when its object was made. last_pod: uid of the pod
    that last held it, or empty."""

    uid: str
    priority: int
    arrived_ms: int
    last_pod: str = ""

    @property
    def rank(self) -> tuple[int, int, str]:
        """Sorts the queue: first is served first."""
        return (-self.priority, self.arrived_ms, self.uid)


@dataclass(frozen=True, slots=True)
class PodSlots:
    """used: placed and promised sessions. takes: ready, connected, neither draining nor suspect."""

    uid: str
    name: str
    slots: int
    used: int
    takes: bool

    @property
    def free(self) -> int:
        return max(0, self.slots - self.used) if self.takes else 0


@dataclass(frozen=True, slots=True)
class Assignment:
    pod_uid: str
    pod: str


@dataclass(frozen=True, slots=True)
class Wait:
    """position: 1 is served next."""

    reason: WaitReason
    sentence: str
    position: int


@dataclass(frozen=True, slots=True)
class Placements:
    """By session uid. Every session of the queue is in exactly one of the two."""

    assigned: dict[str, Assignment]
    waits: dict[str, Wait]


def place(pool: str, queue: Iterable[Waiting], pods: Sequence[PodSlots]) -> Placements:
    """Serves the whole queue of one pool. pool: its name, for the sentences."""
    room = {pod.uid: pod for pod in pods}
    ranked = sorted(queue, key=lambda waiting: waiting.rank)
    assigned: dict[str, Assignment] = {}
    left: list[Waiting] = []
    for index, waiting in enumerate(ranked):
        if not any(pod.free for pod in room.values()):
            left.extend(ranked[index:])
            break
        chosen = _choose(waiting, room.values())
        room[chosen.uid] = replace(chosen, used=chosen.used + 1)
        assigned[waiting.uid] = Assignment(chosen.uid, chosen.name)
    reason, sentence = _why(pool, pods)
    waits = {
        waiting.uid: Wait(reason, sentence, position)
        for position, waiting in enumerate(left, start=1)
    }
    return Placements(assigned, waits)


def _choose(waiting: Waiting, pods: Iterable[PodSlots]) -> PodSlots:
    """One of them has room."""
    fitting = [pod for pod in pods if pod.free]
    return min(fitting, key=lambda pod: (pod.uid != waiting.last_pod, pod.free, pod.uid))


def _why(pool: str, pods: Sequence[PodSlots]) -> tuple[WaitReason, str]:
    """Why whoever is left over waits."""
    if not pods:
        return WaitReason.NO_PODS, f"pool {pool} has no pods"
    taking = [pod for pod in pods if pod.takes]
    if not taking:
        count = _count(len(pods), "pod")
        return WaitReason.NO_READY_PODS, f"none of the {count} of pool {pool} takes sessions now"
    slots = sum(pod.slots for pod in taking)
    verb = "is" if len(taking) == 1 else "are"
    return (
        WaitReason.NO_FREE_SLOTS,
        f"{_count(len(taking), 'pod')} of pool {pool} {verb} full ({slots} of {slots} slots)",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
