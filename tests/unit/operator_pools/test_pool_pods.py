"""Which pods a pool makes, empties and deletes: tables, then any history at all."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_api.pool import CheckpointChange
from duplex_operator.decide.drain import Leave, LeaveReason
from duplex_operator.decide.pods import (
    IDLE_BEFORE_SCALE_DOWN_MS,
    LEDGER_LOOK_MS,
    LONGEST_BACKOFF_MS,
    SURGE_PATIENCE_MS,
    CreatePods,
    DeletePod,
    Mark,
    MarkPod,
    PodDecision,
    PodState,
    PodView,
    PoolPlan,
    backoff_ms,
    decide_pods,
)
from duplex_operator.decide.scaling import Wanted

pytestmark = pytest.mark.unit

NOW_MS = 10_000_000
BOUND_MS = 90_000
CORDONED = Leave(LeaveReason.NODE_CORDONED, "node n1 is cordoned")


def plan(wanted: int = 2, **fields: object) -> PoolPlan:
    only_empty = bool(fields.pop("only_empty", False))
    base = PoolPlan(
        wanted=Wanted(wanted, only_empty, "because"),
        template_hash="new",
        checkpoint_hash="c1",
        checkpoint_change=CheckpointChange.FINISH,
        max_surge=0,
        drain_bound_ms=BOUND_MS,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def pod(name: str, state: PodState = PodState.READY, **fields: object) -> PodView:
    base = PodView(
        name=name,
        uid=f"uid-{name}",
        state=state,
        template_hash="new",
        checkpoint_hash="c1",
        slots=4,
        sessions=0,
        created_ms=0,
        changed_ms=0,
        idle_since_ms=0,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def decide(the_plan: PoolPlan, *pods: PodView, now_ms: int = NOW_MS) -> PodDecision:
    return decide_pods(the_plan, pods, now_ms)


def said(decision: PodDecision) -> list[str]:
    """The actions in short: `+2`, `draining a`, `-b`."""
    words: list[str] = []
    for action in decision.actions:
        match action:
            case CreatePods(count=count):
                words.append(f"+{count}")
            case MarkPod(pod=view, mark=mark):
                words.append(f"{mark} {view.name}")
            case DeletePod(pod=view):
                words.append(f"-{view.name}")
    return words


def test_makes_what_is_missing() -> None:
    assert said(decide(plan(3), pod("a"))) == ["+2"]
    assert said(decide(plan(1), pod("a"))) == []


def test_a_pod_that_is_being_deleted_is_replaced_at_once() -> None:
    assert said(decide(plan(1), pod("a", PodState.DELETING, sessions=3))) == ["+1"]


def test_scale_down_takes_what_is_not_ready_then_the_empty_then_the_least_occupied() -> None:
    pods = (
        pod("full", sessions=4),
        pod("few", sessions=1),
        pod("empty"),
        pod("starting", PodState.STARTING),
    )
    assert said(decide(plan(3), *pods)) == ["-starting"]
    assert said(decide(plan(2), *pods)) == ["-starting", "draining empty"]
    assert said(decide(plan(1), *pods)) == ["-starting", "draining empty", "draining few"]


def test_autoscaling_takes_empty_pods_only_and_not_at_once() -> None:
    emptied = NOW_MS - 1_000
    pods = (pod("full", sessions=4), pod("few", sessions=1), pod("empty", idle_since_ms=emptied))
    the_plan = plan(1, only_empty=True)
    early = decide(the_plan, *pods)
    assert said(early) == []
    due = emptied + IDLE_BEFORE_SCALE_DOWN_MS
    assert early.look_again_ms == due
    assert said(decide(the_plan, *pods, now_ms=due)) == ["draining empty"]


def test_a_ready_pod_is_deleted_when_its_sidecar_has_confirmed_and_is_empty() -> None:
    marked = pod("a", mark=Mark.DRAINING, marked_ms=NOW_MS)
    assert said(decide(plan(0), marked)) == []
    assert said(decide(plan(0), replace(marked, closed=True, sessions=1))) == []
    assert said(decide(plan(0), replace(marked, closed=True))) == ["-a"]
    assert said(decide(plan(0), replace(marked, state=PodState.STARTING))) == ["-a"]


def test_the_bound_of_a_drain_ends_it() -> None:
    marked = pod("a", mark=Mark.DRAINING, marked_ms=NOW_MS, sessions=2)
    waiting = decide(plan(0), marked)
    assert waiting.look_again_ms == NOW_MS + BOUND_MS
    late = decide(plan(0), marked, now_ms=NOW_MS + BOUND_MS)
    assert [action.reason for action in late.actions] == ["DrainBoundPassed"]


def test_a_pod_on_a_cordoned_node_is_drained_and_replaced_at_the_same_time() -> None:
    pods = (pod("a", sessions=1, leave=CORDONED), pod("b"))
    assert said(decide(plan(2), *pods)) == ["draining a", "+1"]
    marked = replace(pods[0], mark=Mark.DRAINING, marked_ms=NOW_MS)
    assert said(decide(plan(2), marked, pods[1])) == ["+1"]
    assert said(decide(plan(2), marked, pods[1], pod("c", PodState.STARTING))) == []


def test_a_lost_pod_gives_its_place_away_and_is_one_too_many_when_it_comes_back() -> None:
    lost = pod("a", PodState.LOST, sessions=2)
    assert said(decide(plan(1), lost)) == ["+1"]
    assert said(decide(plan(1), lost, pod("b", PodState.STARTING))) == []
    assert said(decide(plan(1), pod("a"), pod("b", sessions=1))) == ["draining a"]


def test_broken_pods_are_replaced_with_backoff() -> None:
    first = pod("a", PodState.ENDED, created_ms=NOW_MS, changed_ms=NOW_MS)
    decision = decide(plan(1), first)
    assert said(decision) == ["-a", "+1"]
    (created,) = (a for a in decision.actions if isinstance(a, CreatePods))
    assert created.attempt == 1
    third = replace(first, attempt=2)
    waiting = decide(plan(1), third)
    assert said(waiting) == []
    assert waiting.look_again_ms == NOW_MS + 20_000
    assert said(decide(plan(1), third, now_ms=NOW_MS + 20_000)) == ["-a", "+1"]


def test_backoff_grows_to_its_bound_and_starts_anew_after_good_work() -> None:
    steps = [backoff_ms(attempt) for attempt in range(30)]
    assert steps[:4] == [0, 10_000, 20_000, 40_000]
    assert steps == sorted(steps)
    assert steps[-1] == LONGEST_BACKOFF_MS
    worked = pod("a", PodState.ENDED, attempt=9, created_ms=0, changed_ms=NOW_MS)
    assert said(decide(plan(1), worked)) == ["-a", "+1"]


def test_an_evicted_pod_and_one_of_an_old_template_wait_for_nothing() -> None:
    evicted = Leave(LeaveReason.EVICTED, "the pod is being evicted")
    broken = pod("a", PodState.ENDED, created_ms=NOW_MS, changed_ms=NOW_MS, attempt=9)
    assert said(decide(plan(1), replace(broken, leave=evicted))) == ["-a", "+1"]
    assert said(decide(plan(1), replace(broken, template_hash="old"))) == ["-a", "+1"]


def test_a_broken_pod_with_sessions_is_drained_first() -> None:
    assert said(decide(plan(1), pod("a", PodState.BROKEN, sessions=1))) == ["draining a"]


def test_roll_out_without_surge_goes_one_by_one() -> None:
    old = [pod(name, template_hash="old", sessions=1) for name in "ab"]
    assert said(decide(plan(2), *old)) == ["draining a"]
    draining = replace(old[0], mark=Mark.DRAINING, marked_ms=NOW_MS)
    assert said(decide(plan(2), draining, old[1])) == []
    assert said(decide(plan(2), replace(old[0], state=PodState.DELETING), old[1])) == ["+1"]
    starting = pod("c", PodState.STARTING)
    assert said(decide(plan(2), old[1], starting)) == []
    assert said(decide(plan(2), old[1], pod("c"))) == ["draining b"]


def test_roll_out_with_surge_makes_first() -> None:
    old = [pod(name, template_hash="old", sessions=1) for name in "ab"]
    the_plan = plan(2, max_surge=1)
    assert said(decide(the_plan, *old)) == ["+1"]
    assert said(decide(the_plan, *old, pod("c", PodState.STARTING))) == []
    (word,) = said(decide(the_plan, *old, pod("c")))
    assert word.startswith("draining")


WAITS = PodState.WAITING


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_no_old_pod_goes_while_all_wait_for_the_ledger(wanted: int, surge: int) -> None:
    old = [pod(f"p{n}", WAITS, template_hash="old", sessions=n % 2) for n in range(wanted)]
    the_plan = plan(wanted, max_surge=surge)
    new = [pod("new", WAITS)] * surge
    assert said(decide(the_plan, *old, *new)) == []


def test_pods_of_which_nothing_is_heard_yet_keep_their_conversations() -> None:
    """An operator that has just begun to lead, while the ledger is away."""
    old = [pod(name, PodState.STARTING, template_hash="old", sessions=1) for name in "ab"]
    assert said(decide(plan(2), *old)) == []
    assert said(decide(plan(2), replace(old[0], sessions=0), old[1])) == ["-a", "+1"]
    # The others are enough without it.
    assert said(decide(plan(2), old[0], pod("b"), pod("c"))) == ["draining a"]


def test_a_pod_that_alone_waits_for_the_ledger_is_the_first_to_be_rolled() -> None:
    old = [pod(name, template_hash="old", sessions=1) for name in "ab"]
    cut_off = pod("c", WAITS, template_hash="old", sessions=1)
    assert said(decide(plan(3), *old, cut_off)) == ["draining c"]


def test_an_empty_pod_that_waits_for_the_ledger_is_kept_as_long_as_any() -> None:
    idle_since = NOW_MS - 1_000
    full, empty = pod("full", WAITS, sessions=4), pod("empty", WAITS, idle_since_ms=idle_since)
    the_plan = plan(1, only_empty=True)
    assert said(decide(the_plan, full, empty)) == []
    due = idle_since + IDLE_BEFORE_SCALE_DOWN_MS
    assert said(decide(the_plan, full, empty, now_ms=due)) == ["draining empty"]


def test_a_pod_that_waits_for_the_ledger_may_get_a_session_until_it_says_that_it_does_not() -> None:
    marked = pod("a", WAITS, mark=Mark.DRAINING, marked_ms=NOW_MS)
    assert said(decide(plan(0), marked)) == []
    assert said(decide(plan(0), replace(marked, closed=True))) == ["-a"]


@pytest.mark.parametrize("mark", [Mark.DRAINING, Mark.ENDING])
def test_a_drain_is_not_over_while_nobody_has_the_ledger(mark: Mark) -> None:
    leaving = pod("a", WAITS, sessions=2, mark=mark, marked_ms=NOW_MS, closed=True)
    over_ms = NOW_MS + BOUND_MS
    decision = decide(plan(1), leaving, pod("b", WAITS), now_ms=over_ms)
    assert said(decision) == []
    assert decision.look_again_ms == over_ms + LEDGER_LOOK_MS
    assert said(decide(plan(0), leaving, now_ms=over_ms + 3_600_000)) == []
    # It alone is cut off, or it has the ledger and goes on all the same, or nobody can keep it.
    assert said(decide(plan(1), leaving, pod("b"), now_ms=over_ms)) == ["-a"]
    back = replace(leaving, state=PodState.READY)
    assert said(decide(plan(1), back, pod("b", WAITS), now_ms=over_ms)) == ["-a"]
    going = replace(leaving, leave=CORDONED)
    assert "-a" in said(decide(plan(1), going, pod("b", WAITS), now_ms=over_ms))
    # Parked or ended by itself: what is empty goes, ledger or not.
    empty = replace(leaving, sessions=0)
    assert said(decide(plan(1), empty, pod("b", WAITS), now_ms=over_ms)) == ["-a"]


def test_surge_that_finds_no_room_is_not_waited_for() -> None:
    old = [pod(name, template_hash="old") for name in "ab"]
    nowhere = pod("c", PodState.STARTING, unplaced=True, created_ms=NOW_MS)
    the_plan = plan(2, max_surge=1)
    patient = decide(the_plan, *old, nowhere)
    assert said(patient) == []
    assert patient.look_again_ms == NOW_MS + SURGE_PATIENCE_MS
    late = decide(the_plan, *old, nowhere, now_ms=NOW_MS + SURGE_PATIENCE_MS)
    assert len(said(late)) == 1


def test_a_template_that_does_not_start_takes_no_more_old_pods_down() -> None:
    old = pod("a", template_hash="old", sessions=1)
    broken = pod("b", PodState.BROKEN, created_ms=NOW_MS, changed_ms=NOW_MS, attempt=5)
    assert said(decide(plan(2), old, broken)) == []


@pytest.mark.parametrize(
    ("change", "mark"),
    [(CheckpointChange.FINISH, "finishing"), (CheckpointChange.END, "ending")],
)
def test_a_new_checkpoint_moves_no_conversation(change: CheckpointChange, mark: str) -> None:
    occupied = pod("a", template_hash="old", checkpoint_hash="c0", sessions=1)
    empty = pod("b", template_hash="old", checkpoint_hash="c0")
    assert said(decide(plan(1, checkpoint_change=change), occupied)) == [f"{mark} a"]
    assert said(decide(plan(1, checkpoint_change=change), empty)) == ["draining b"]


def test_a_finishing_pod_has_all_the_time_it_needs_and_then_goes() -> None:
    finishing = pod("a", template_hash="old", mark=Mark.FINISHING, marked_ms=0, sessions=1)
    assert said(decide(plan(1), finishing)) == []
    assert said(decide(plan(1, max_surge=1), finishing)) == ["+1"]
    assert said(decide(plan(0), replace(finishing, sessions=0))) == ["draining a"]
    assert said(decide(plan(0), replace(finishing, leave=CORDONED))) == ["draining a"]


# Any history: pods start or break, sessions come and go, nodes are cordoned, the pool is edited.


@dataclass
class Cluster:
    """A pretended cluster that does what is decided, and looks for what must never be."""

    the_plan: PoolPlan
    pods: dict[str, PodView] = field(default_factory=dict)
    now_ms: int = NOW_MS
    made: int = 0

    def step(self) -> int:
        """Decides once and does it. Returns how many actions there were."""
        before = self._alive()
        decision = decide_pods(self.the_plan, tuple(self.pods.values()), self.now_ms)
        for action in decision.actions:
            match action:
                case CreatePods(count=count, attempt=attempt):
                    assert count > 0
                    for _ in range(count):
                        self._make(attempt)
                case MarkPod(pod=view, mark=mark):
                    assert mark is not Mark.NONE
                    assert mark is not view.mark
                    self.pods[view.name] = replace(view, mark=mark, marked_ms=self.now_ms)
                case DeletePod(pod=view):
                    self._check_delete(view)
                    self.pods[view.name] = replace(view, state=PodState.DELETING)
        if any(isinstance(action, CreatePods) for action in decision.actions):
            bound = self.the_plan.wanted.pods + self.the_plan.max_surge
            assert self._alive() <= max(bound, before)
        return len(decision.actions)

    def _alive(self) -> int:
        """Pods that hold devices of ours: not those that their node takes with it."""
        return sum(
            view.state in (PodState.STARTING, PodState.READY, PodState.WAITING, PodState.BROKEN)
            and view.leave is None
            for view in self.pods.values()
        )

    def _make(self, attempt: int) -> None:
        self.made += 1
        self.pods[f"p{self.made}"] = pod(
            f"p{self.made}",
            PodState.STARTING,
            template_hash=self.the_plan.template_hash,
            checkpoint_hash=self.the_plan.checkpoint_hash,
            created_ms=self.now_ms,
            changed_ms=self.now_ms,
            attempt=attempt,
        )

    def _check_delete(self, view: PodView) -> None:
        assert view.state is not PodState.DELETING
        if view.state is PodState.ENDED:
            return
        if view.sessions:
            assert view.mark in (Mark.DRAINING, Mark.ENDING)
            assert self.now_ms >= view.marked_ms + self.the_plan.drain_bound_ms
        elif view.state in (PodState.READY, PodState.WAITING):
            assert view.mark is not Mark.NONE
            assert view.closed or self.now_ms >= view.marked_ms + self.the_plan.drain_bound_ms

    def settle(self) -> None:
        """The cluster at its best: pods start, sidecars obey, sessions end, time passes."""
        for view in list(self.pods.values()):
            match view.state:
                case PodState.DELETING:
                    del self.pods[view.name]
                case PodState.STARTING | PodState.WAITING:
                    self.pods[view.name] = replace(
                        view, state=PodState.READY, changed_ms=self.now_ms, unplaced=False
                    )
                case PodState.READY if view.mark is not Mark.NONE:
                    self.pods[view.name] = replace(view, closed=True, sessions=0)
                case PodState.LOST:
                    del self.pods[view.name]
                case _:
                    pass
        self.now_ms += LONGEST_BACKOFF_MS


STATES = st.sampled_from(list(PodState))


@st.composite
def any_pods(draw: st.DrawFn) -> list[PodView]:
    count = draw(st.integers(0, 6))
    return [
        pod(
            f"x{number}",
            draw(STATES),
            template_hash=draw(st.sampled_from(["new", "old"])),
            checkpoint_hash=draw(st.sampled_from(["c1", "c0"])),
            sessions=draw(st.integers(0, 3)),
            created_ms=draw(st.integers(0, NOW_MS)),
            changed_ms=draw(st.integers(0, NOW_MS)),
            idle_since_ms=draw(st.integers(0, NOW_MS)),
            mark=draw(st.sampled_from(list(Mark))),
            marked_ms=draw(st.integers(NOW_MS - 2 * BOUND_MS, NOW_MS)),
            closed=draw(st.booleans()),
            leave=draw(st.sampled_from([None, None, CORDONED])),
            attempt=draw(st.integers(0, 5)),
            unplaced=draw(st.booleans()),
        )
        for number in range(count)
    ]


@st.composite
def any_plan(draw: st.DrawFn) -> PoolPlan:
    return plan(
        draw(st.integers(0, 5)),
        max_surge=draw(st.integers(0, 2)),
        only_empty=draw(st.booleans()),
        checkpoint_change=draw(st.sampled_from(list(CheckpointChange))),
    )


@given(the_plan=any_plan(), pods=any_pods(), seconds=st.lists(st.integers(0, 400), max_size=4))
def test_whatever_there_is_nothing_forbidden_is_done(
    the_plan: PoolPlan, pods: list[PodView], seconds: list[int]
) -> None:
    cluster = Cluster(the_plan, {view.name: view for view in pods})
    for pause in seconds:
        cluster.step()
        cluster.now_ms += pause * 1000


@given(the_plan=any_plan(), pods=any_pods())
def test_the_same_view_twice_gives_the_same_decision(
    the_plan: PoolPlan, pods: list[PodView]
) -> None:
    first = decide_pods(the_plan, pods, NOW_MS)
    assert first == decide_pods(the_plan, tuple(pods), NOW_MS)


@given(the_plan=any_plan(), pods=any_pods())
def test_it_comes_to_the_wanted_pods_and_then_rests(
    the_plan: PoolPlan, pods: list[PodView]
) -> None:
    """Once nodes stay and sessions end, at most 40 looks lead to the wanted pods, all current."""
    cluster = Cluster(the_plan, {view.name: replace(view, leave=None) for view in pods})
    for _ in range(40):
        cluster.step()
        cluster.settle()
        for view in cluster.pods.values():
            # An autoscaled pool moves no conversation: here they end by themselves.
            cluster.pods[view.name] = replace(view, sessions=0)
    assert cluster.step() == 0
    left = list(cluster.pods.values())
    assert len(left) == the_plan.wanted.pods
    assert all(view.template_hash == the_plan.template_hash for view in left)


@given(
    the_plan=any_plan(),
    pods=any_pods(),
    sessions=st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
def test_a_roll_out_keeps_as_many_ready_as_it_promises(
    the_plan: PoolPlan, pods: list[PodView], sessions: list[int]
) -> None:
    """Without a surge at most one ready pod is missing for the roll-out's sake."""
    healthy = [
        replace(view, state=PodState.READY, mark=Mark.NONE, leave=None, unplaced=False)
        for view in pods
    ]
    cluster = Cluster(the_plan, {view.name: view for view in healthy})
    for number in sessions:
        before = sum(view.mark is Mark.NONE for view in cluster.pods.values())
        cluster.step()
        after = sum(
            view.state is PodState.READY and view.mark is Mark.NONE
            for view in cluster.pods.values()
        )
        floor = the_plan.wanted.pods - (0 if the_plan.max_surge else 1)
        assert after >= min(before, floor) or after == before
        cluster.settle()
        for name, view in cluster.pods.items():
            cluster.pods[name] = replace(view, sessions=0 if view.closed else number)
