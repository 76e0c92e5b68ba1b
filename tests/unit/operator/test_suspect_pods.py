"""A pod that has fallen silent: its sessions get another slot once nobody uses their leases."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_api.leases import LEASE_MARGIN_MS
from duplex_api.session import (
    DesiredState,
    Placement,
    SessionPhase,
    SessionSpec,
    SessionStatus,
    TokenSecret,
)
from duplex_api.window import DEFAULT_WINDOW
from duplex_operator.decide.acceptance import Accepted, RefusalReason, Refused
from duplex_operator.decide.actions import (
    Action,
    AskForSlot,
    HandOver,
    Nothing,
    Open,
    Park,
    Place,
    WriteStatus,
)
from duplex_operator.decide.facts import Memory, PodHealth, PodView, SessionFacts, Token
from duplex_operator.decide.lifecycle import UNHEARD_LOOK_S, decide, suspect_look_s
from duplex_operator.decide.placement import Assignment, Wait, WaitReason
from duplex_operator.decide.status import build_status
from duplex_operator.feed import FeedPhase, FeedSession
from duplex_operator.names import SESSION_FINALIZER
from duplex_operator.objects import Meta, ObjectKey, SessionObject
from duplex_operator.observe import UNKNOWN_LEASE_MS

pytestmark = pytest.mark.unit

NOW_MS = 1_900_000_000_000
LEASE_MS = 3_000
SOON_MS = 250
ON_A = Placement(pod="pod-a", pod_uid="uid-a", fence=3)
SLOT_B = Assignment("uid-b", "pod-b")
FULL = Wait(WaitReason.NO_FREE_SLOTS, "1 pod of pool default/x is full (1 of 1 slots)", 1)
SUSPECT = PodView("uid-a", "pod-a", PodHealth.UNHEARD)
UNUSED = replace(SUSPECT, lease_left_ms=LEASE_MARGIN_MS)


def said(fence: int, *, attached: bool = True) -> FeedSession:
    return FeedSession(
        session="uid-of-talk", phase=FeedPhase.ACTIVE, fence=fence, attached=attached, units=7
    )


def talking(*, attached: bool = True, desired: DesiredState | None = None) -> SessionFacts:
    """On pod-a, as its feed told last."""
    meta = Meta(
        key=ObjectKey("default", "talk"),
        uid="uid-of-talk",
        version="1",
        generation=1,
        created_ms=NOW_MS - 60_000,
        deleted_ms=0,
        finalizers=(SESSION_FINALIZER,),
        labels={},
        annotations={},
    )
    spec = SessionSpec.model_validate({"poolRef": {"name": "x"}, "desiredState": desired})
    start = SessionFacts(
        session=SessionObject(meta, spec, SessionStatus()),
        verdict=Accepted(DEFAULT_WINDOW.as_policy()),
        now_ms=NOW_MS,
        endpoint="wss://example",
        memory=Memory(),
        token=Token(TokenSecret(name="talk-token", key="token"), "a" * 64),
        said=said(3, attached=attached),
    )
    status = build_status(start, SessionPhase.ACTIVE, "x", "it talks", placement=ON_A)
    return replace(start, session=replace(start.session, status=status), pod=SUSPECT)


def test_a_session_is_looked_at_when_its_lease_is_not_used_and_when_it_is_over() -> None:
    assert suspect_look_s(None) is None
    assert suspect_look_s(SUSPECT) is None
    for left_ms, look_s in (
        (2_900, UNHEARD_LOOK_S),
        (LEASE_MARGIN_MS + 120, 0.13),
        (LEASE_MARGIN_MS + 1, 0.011),
        (120, 0.13),
    ):
        view = replace(SUSPECT, lease_left_ms=left_ms)
        assert suspect_look_s(view) == pytest.approx(look_s), left_ms


def test_another_slot_is_asked_for_only_when_nobody_uses_the_lease() -> None:
    used = replace(SUSPECT, lease_left_ms=LEASE_MARGIN_MS + 1)
    for view in (SUSPECT, used, replace(SUSPECT, lease_left_ms=UNKNOWN_LEASE_MS)):
        assert not isinstance(decide(replace(talking(), pod=view)), AskForSlot | Place), view
    assert decide(replace(talking(), pod=UNUSED)) == AskForSlot()
    place = decide(replace(talking(), pod=UNUSED, promise=SLOT_B))
    assert isinstance(place, Place)
    assert place.status.placement == Placement(pod="pod-b", pod_uid="uid-b", fence=4)
    assert (place.status.phase, place.status.last_placement) == (SessionPhase.MOVING, ON_A)


def test_without_another_slot_nothing_changes_until_the_lease_is_over() -> None:
    waits = replace(talking(), wait=FULL)
    assert decide(replace(waits, pod=UNUSED)) == Nothing(queued=True)
    silent = PodView("uid-a", "pod-a", PodHealth.DEAD, "PodSilent", "its lease has run out")
    action = decide(replace(waits, pod=silent))
    assert isinstance(action, WriteStatus)
    assert (action.status.placement, action.queued) == (None, True)


def test_who_may_not_have_a_slot_or_wants_none_is_left_until_the_lease_is_over() -> None:
    refused = Refused(RefusalReason.POOL_NOT_FOUND, "there is no pool default/x")
    for held in (
        replace(talking(), verdict=refused),
        replace(talking(), token=None, ledger_away=True),
        talking(desired=DesiredState.PARKED),
    ):
        action = decide(replace(held, pod=UNUSED, promise=SLOT_B))
        assert not isinstance(action, AskForSlot | Place), action


# --- from the silence to its end, simulated -----------------------------------------------------


@dataclass
class World:
    """pod-a falls silent at 0 with so much left of its lease. back_ms: when it is there again, to
    renew what is still its own and be heard; None: it has died. Pod-b has a slot, or not."""

    left_ms: int
    back_ms: int | None
    slot: bool
    facts: SessionFacts
    now_ms: int = 0
    owner: str = "uid-a"
    until_ms: int = 0
    placed_ms: list[int] = field(default_factory=list[int])
    owners: list[str] = field(default_factory=lambda: ["uid-a"])

    def __post_init__(self) -> None:
        self.until_ms = self.left_ms

    @property
    def a_is_back(self) -> bool:
        return self.back_ms is not None and self.now_ms >= self.back_ms

    def go_on(self, to_ms: int) -> None:
        """Whoever lives renews once a second, or when it is back."""
        if self.back_ms is not None and self.now_ms < self.back_ms <= to_ms:
            self.now_ms = self.back_ms
        self._renew()
        self.now_ms = max(self.now_ms, to_ms)
        self._renew()

    def _renew(self) -> None:
        if self.owner == "uid-b" or (self.owner == "uid-a" and self.a_is_back):
            self.until_ms = max(self.until_ms, self.now_ms + LEASE_MS)

    def look(self) -> SessionFacts:
        placement = self.facts.placement
        heard = replace(self.facts, now_ms=NOW_MS + self.now_ms, source=None, said=None)
        if placement is None:
            return replace(heard, pod=None)
        if placement.pod_uid == "uid-b":
            there = PodView("uid-b", "pod-b", PodHealth.LIVE)
            runs_on = self.a_is_back and self.owner == "uid-a"
            return replace(
                heard,
                pod=there,
                said=said(placement.fence) if self.owner == "uid-b" else None,
                source=said(ON_A.fence, attached=self._attached) if runs_on else None,
            )
        return replace(heard, said=self.facts.said, pod=self._pod_a())

    @property
    def _attached(self) -> bool:
        assert self.facts.said is not None
        return self.facts.said.attached

    def _pod_a(self) -> PodView:
        if self.a_is_back:
            return PodView("uid-a", "pod-a", PodHealth.LIVE)
        left_ms = self.until_ms - self.now_ms
        if left_ms > 0:
            return replace(SUSPECT, lease_left_ms=left_ms)
        return PodView("uid-a", "pod-a", PodHealth.DEAD, "PodSilent", "silent")

    def apply(self, action: Action) -> int:
        """Returns when to look again, in ms."""
        match action:
            case AskForSlot():
                answer = {"promise": SLOT_B} if self.slot else {"wait": FULL}
                self.facts = replace(self.facts, **answer)  # type: ignore[arg-type]
            case Place(status=status):
                self._write(status)
                self.placed_ms.append(self.now_ms)
            case WriteStatus(status=status):
                self._write(status)
            case Open():
                return self._take_up()
            case HandOver():
                self.until_ms = self.now_ms
                self._owned_by_b()
            case Park():
                self.until_ms, self.owner = self.now_ms, ""
            case Nothing(after_s=after_s):
                view = self.look().pod
                looks = [s for s in (after_s, suspect_look_s(view)) if s is not None]
                return round(1000 * min(looks, default=1.0))
            case _:
                raise AssertionError(action)
        return 0

    def _take_up(self) -> int:
        """As a sidecar: it waits for the lease's end, unless it sees the owner renew it."""
        end_ms = self.until_ms
        self.go_on(max(end_ms, self.now_ms))
        if self.until_ms > end_ms:
            return SOON_MS
        self._owned_by_b()
        return 0

    def _owned_by_b(self) -> None:
        assert self.until_ms <= self.now_ms
        self.owner = "uid-b"
        self.owners.append("uid-b")
        self.until_ms = self.now_ms + LEASE_MS

    def _write(self, status: SessionStatus) -> None:
        session = replace(self.facts.session, status=status)
        self.facts = replace(self.facts, session=session, promise=None)


@given(
    left_ms=st.integers(1, LEASE_MS),
    back_ms=st.none() | st.integers(1, 2 * LEASE_MS),
    slot=st.booleans(),
    attached=st.booleans(),
)
def test_a_silence_costs_no_session_and_at_most_one_move(
    left_ms: int, back_ms: int | None, slot: bool, attached: bool
) -> None:
    world = World(left_ms, back_ms, slot, talking(attached=attached))
    for _ in range(60):
        again_ms = world.apply(decide(world.look()))
        if again_ms:
            world.go_on(world.now_ms + again_ms)
    assert world.owners in (["uid-a"], ["uid-a", "uid-b"])
    placement, unused_ms = world.facts.placement, max(0, left_ms - LEASE_MARGIN_MS)
    if back_ms is not None and back_ms < unused_ms:
        assert (placement, world.placed_ms, world.owners) == (ON_A, [], ["uid-a"])
    elif back_ms is not None and back_ms < left_ms and not slot:
        assert (placement, world.owners) == (ON_A, ["uid-a"]), "it goes on as if nothing had been"
    elif slot and (back_ms is None or back_ms > left_ms + 2 * SOON_MS):
        assert (placement, world.owners[-1]) == (
            Placement(pod="pod-b", pod_uid="uid-b", fence=4),
            "uid-b",
        )
        assert world.placed_ms[0] <= unused_ms + 20
    elif slot and placement != ON_A:
        assert placement == Placement(pod="pod-b", pod_uid="uid-b", fence=4)
        assert world.owners[-1] == "uid-b"
    assert world.owner == "uid-b" or placement is None or placement.pod_uid == "uid-a"
    assert len(world.placed_ms) <= 1
