"""Who waits for a slot, and who was promised one: the board between the session reconciler (which
asks) and the placer (which answers for a whole pool at once, so that nobody is passed over)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from duplex_operator.decide.placement import Assignment, Wait, Waiting
from duplex_operator.objects import ObjectKey


@dataclass(slots=True)
class PlacementBoard:
    """waiting, promised: by session uid. A promise reserves a slot until it is kept or broken."""

    _waiting: dict[ObjectKey, dict[str, Waiting]] = field(default_factory=dict)
    _pool_of: dict[str, ObjectKey] = field(default_factory=dict)
    _promised: dict[str, Assignment] = field(default_factory=dict)
    _promised_on: dict[str, set[str]] = field(default_factory=dict)
    _answers: dict[str, Wait] = field(default_factory=dict)
    _refused_until: dict[str, float] = field(default_factory=dict)

    def ask(self, pool: ObjectKey, waiting: Waiting) -> bool:
        """The session wants a slot of the pool. True: it was not waiting there yet."""
        uid = waiting.uid
        known = self._pool_of.get(uid)
        if known is not None and known != pool:
            self.leave(uid)
        queue = self._waiting.setdefault(pool, {})
        news = queue.get(uid) != waiting
        queue[uid] = waiting
        self._pool_of[uid] = pool
        return news

    def prioritise(self, uid: str, priority: int) -> ObjectKey | None:
        """Its priority has changed: the pool whose queue has, None where it waits in none."""
        pool = self._pool_of.get(uid)
        waiting = None if pool is None else self._waiting[pool][uid]
        if pool is None or waiting is None or waiting.priority == priority:
            return None
        self._waiting[pool][uid] = replace(waiting, priority=priority)
        return pool

    def leave(self, uid: str) -> None:
        """It does not wait any more, and holds no promise."""
        pool = self._pool_of.pop(uid, None)
        if pool is not None:
            queue = self._waiting.get(pool, {})
            queue.pop(uid, None)
            if not queue:
                self._waiting.pop(pool, None)
        self._answers.pop(uid, None)
        self.take_back(uid)

    def promise(self, uid: str, assignment: Assignment) -> None:
        self.take_back(uid)
        self._answers.pop(uid, None)
        self._promised[uid] = assignment
        self._promised_on.setdefault(assignment.pod_uid, set()).add(uid)

    def take_back(self, uid: str) -> None:
        """The promise was kept (the placement is written) or came to nothing."""
        assignment = self._promised.pop(uid, None)
        if assignment is not None:
            uids = self._promised_on[assignment.pod_uid]
            uids.discard(uid)
            if not uids:
                del self._promised_on[assignment.pod_uid]

    def answer(self, uid: str, wait: Wait) -> bool:
        """Why the session waits. True: the reason or the sentence changed."""
        before = self._answers.get(uid)
        self._answers[uid] = wait
        return before is None or before.reason != wait.reason

    def promised(self, uid: str) -> Assignment | None:
        return self._promised.get(uid)

    def promised_on(self, pod_uid: str) -> frozenset[str]:
        """Uids of sessions with a promise there, which takes a slot like a placement."""
        return frozenset(self._promised_on.get(pod_uid, ()))

    def answer_of(self, uid: str) -> Wait | None:
        return self._answers.get(uid)

    def waiting_for(self, pool: ObjectKey) -> Mapping[str, Waiting]:
        return self._waiting.get(pool, {})

    def queued(self, pool: ObjectKey) -> int:
        """Sessions that wait for a slot of the pool and have no promise (for scaling)."""
        return sum(uid not in self._promised for uid in self.waiting_for(pool))

    def pools(self) -> tuple[ObjectKey, ...]:
        return tuple(self._waiting)

    def refuse(self, pod_uid: str, until_s: float) -> None:
        """The pod said it has no room: nothing is promised there until then."""
        self._refused_until[pod_uid] = until_s

    def refused(self, pod_uid: str, now_s: float) -> bool:
        until = self._refused_until.get(pod_uid)
        if until is not None and until <= now_s:
            del self._refused_until[pod_uid]
            return False
        return until is not None
