"""The next step of a session's life."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_api.metadata import ConditionStatus
from duplex_api.routes import RouteRecord
from duplex_api.session import (
    DesiredState,
    Placement,
    SessionPhase,
    SessionSpec,
    SessionStatus,
    TokenSecret,
)
from duplex_api.window import DEFAULT_WINDOW
from duplex_gateway.decide import LeaseView
from duplex_gateway.decide import Wait as Wait_
from duplex_gateway.decide import WaitReason as GatewayReason
from duplex_gateway.decide import decide as of_gateway
from duplex_operator.decide import erasing
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
from duplex_operator.decide.facts import (
    LedgerPhase,
    LedgerWord,
    Memory,
    PodHealth,
    PodView,
    Refusal,
    SessionFacts,
    Token,
)
from duplex_operator.decide.lifecycle import decide
from duplex_operator.decide.placement import Assignment, Wait, WaitReason
from duplex_operator.decide.status import (
    LEDGER_DURABLE,
    build_status,
    condition_of,
    is_news,
    only_counters,
    phase_for_clients,
    status_patch,
)
from duplex_operator.feed import AudioReport, FeedPhase, FeedSession, LastRebuildReport
from duplex_operator.names import SESSION_FINALIZER
from duplex_operator.objects import Meta, ObjectKey, SessionObject

pytestmark = pytest.mark.unit

NOW_MS = 1_900_000_000_000
TOKEN = Token(TokenSecret(name="talk-token", key="token"), "a" * 64)
ACCEPTED = Accepted(DEFAULT_WINDOW.as_policy())
LIVE = PodView("uid-a", "pod-a", PodHealth.LIVE)
DEAD = PodView("uid-a", "pod-a", PodHealth.DEAD, "PodGone", "pod pod-a is gone", proven=True)
SLOT_A = Assignment("uid-a", "pod-a")
SLOT_B = Assignment("uid-b", "pod-b")
ON_A = Placement(pod="pod-a", pod_uid="uid-a", fence=3)
FULL = Wait(WaitReason.NO_FREE_SLOTS, "1 pod of pool default/x is full (1 of 1 slots)", 2)


def session(
    *,
    status: SessionStatus | None = None,
    finalizers: tuple[str, ...] = (SESSION_FINALIZER,),
    deleted_ms: int = 0,
    **spec: Any,
) -> SessionObject:
    meta = Meta(
        key=ObjectKey("default", "talk"),
        uid="uid-of-talk",
        version="1",
        generation=1,
        created_ms=NOW_MS - 60_000,
        deleted_ms=deleted_ms,
        finalizers=finalizers,
        labels={},
        annotations={},
    )
    full = SessionSpec.model_validate({"poolRef": {"name": "x"}, **spec})
    return SessionObject(meta, full, status or SessionStatus())


def facts(found: SessionObject | None = None, **changes: Any) -> SessionFacts:
    base = SessionFacts(
        session=found or session(),
        verdict=ACCEPTED,
        now_ms=NOW_MS,
        endpoint="wss://example",
        memory=Memory(),
        token=TOKEN,
    )
    return replace(base, **changes)


def placed(phase: SessionPhase = SessionPhase.QUEUED, **changes: Any) -> SessionFacts:
    """A session with a slot on pod-a, with the status the operator itself would have written."""
    start = facts(session(**changes.pop("spec", {})))
    status = build_status(start, phase, "Placed", "placed", placement=ON_A)
    return replace(start, session=replace(start.session, status=status), pod=LIVE, **changes)


def said(phase: FeedPhase = FeedPhase.READY, **changes: Any) -> FeedSession:
    return FeedSession(session="uid-of-talk", phase=phase, **{"fence": 3, **changes})


def test_a_new_session_goes_step_by_step() -> None:
    assert decide(facts(session(finalizers=()))) == EnsureFinalizer()
    assert decide(facts(token=None)) == AssignToken()
    assert decide(facts()) == AskForSlot()
    place = decide(facts(promise=SLOT_A))
    assert isinstance(place, Place)
    assert place.status.placement == Placement(pod="pod-a", pod_uid="uid-a", fence=1)
    assert place.status.window == DEFAULT_WINDOW.as_policy()
    assert place.status.token_secret == TOKEN.secret


def test_a_placed_session_is_opened_once_and_reflected() -> None:
    assert decide(placed()) == Open("uid-a", 3, "")
    opened = Memory(opened_fence=3, opened_ms=NOW_MS - 1_000)
    assert decide(placed(memory=opened)) == Nothing(4.0)
    stale = Memory(opened_fence=3, opened_ms=NOW_MS - 6_000)
    assert isinstance(decide(placed(memory=stale)), Open)
    action = decide(placed(said=said()))
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.event) == (SessionPhase.READY, True)
    untold = Memory(token_untold=True)
    assert decide(placed(SessionPhase.READY, said=said(), memory=untold)) == Open("uid-a", 3, "")


def test_the_fence_only_grows() -> None:
    lost = placed(SessionPhase.READY, promise=SLOT_B)
    lost = replace(lost, pod=DEAD)
    place = decide(lost)
    assert isinstance(place, Place)
    assert place.status.placement is not None
    assert place.status.placement.fence == 4
    assert place.status.last_placement == ON_A
    assert place.status.phase is SessionPhase.MOVING
    ahead = LedgerWord(LedgerPhase.OPEN, 1_000_007, "")
    place = decide(replace(lost, ledger=ahead))
    assert isinstance(place, Place)
    assert place.status.placement is not None
    assert place.status.placement.fence == 1_000_008


def test_a_lost_session_asks_first_and_is_written_down_only_if_it_waits() -> None:
    lost = replace(placed(SessionPhase.ACTIVE), pod=DEAD)
    assert decide(lost) == AskForSlot()
    action = decide(replace(lost, wait=FULL))
    assert isinstance(action, WriteStatus)
    assert action.status.placement is None
    assert (action.reason, action.warning, action.queued) == ("PodGone", True, True)


@pytest.mark.parametrize("code", ["no_slot", "stale_fence", "draining", "manifest_conflict"])
def test_a_refusal_is_final_for_that_placement(code: str) -> None:
    refused = placed(memory=Memory(refusal=Refusal(3, code, "no")))
    assert decide(refused) == AskForSlot()
    assert isinstance(decide(replace(refused, promise=SLOT_B)), Place)
    of_before = placed(memory=Memory(refusal=Refusal(2, code, "no")))
    assert isinstance(decide(of_before), Open)


def test_a_pod_that_is_not_heard_is_waited_for() -> None:
    unheard = PodView("uid-a", "pod-a", PodHealth.UNHEARD)
    assert decide(replace(placed(), pod=unheard)) == Nothing(0.5)


def test_counters_are_no_news() -> None:
    before = said(FeedPhase.ACTIVE, attached=True, units=4)
    rebuilt = LastRebuildReport(cause="slide", cost_ms=80.0)
    for moved in ({"units": 5}, {"rebuilds": 1, "last_rebuild": rebuilt}, {"changed_ms": 7}):
        assert not is_news(before, msgspec.structs.replace(before, **moved))
    slow = LastRebuildReport(cause="slide", cost_ms=1_200.0)
    for told in (
        {"phase": FeedPhase.READY},
        {"fence": 4},
        {"attached": False},
        {"keeping_pace": False},
        {"ledger_durable": False},
        {"last_rebuild": slow},
    ):
        assert is_news(before, msgspec.structs.replace(before, **told)), told


def test_what_its_pool_does_not_take_is_not_opened() -> None:
    refused = Refused(RefusalReason.NAMESPACE_NOT_ALLOWED, "not yours")
    action = decide(placed(verdict=refused))
    assert isinstance(action, WriteStatus)
    assert action.status.placement is None
    assert isinstance(decide(placed(verdict=refused, said=said())), WriteStatus)


def test_a_session_that_its_replica_lost_is_placed_again() -> None:
    lost = placed(SessionPhase.READY)
    assert decide(lost) == AskForSlot()
    parked = replace(lost, ledger=LedgerWord(LedgerPhase.PARKED, 3, "client_away"))
    action = decide(parked)
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.reason) == (SessionPhase.PARKED, "ClientAway")
    ended = replace(lost, ledger=LedgerWord(LedgerPhase.ENDED, 3, "max_duration"))
    action = decide(ended)
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.reason) == (SessionPhase.ENDED, "MaxDuration")


def test_whoever_talks_on_a_leaving_pod_is_placed_again_others_park() -> None:
    alone = placed(SessionPhase.READY, said=said(FeedPhase.PARKED, reason="drain"))
    action = decide(alone)
    assert isinstance(action, WriteStatus)
    assert action.status.phase is SessionPhase.PARKED
    talking = placed(
        SessionPhase.ACTIVE, said=said(FeedPhase.PARKED, reason="drain", attached=True)
    )
    assert decide(talking) == AskForSlot()


LEAVING = replace(LIVE, leaving=True)


def test_whoever_talks_on_a_leaving_pod_gets_a_slot_elsewhere_before_it_parks() -> None:
    talking = placed(SessionPhase.ACTIVE, said=said(FeedPhase.ACTIVE, attached=True))
    assert not isinstance(decide(talking), AskForSlot | Place)
    leaving = replace(talking, pod=LEAVING)
    assert decide(leaving) == AskForSlot()
    place = decide(replace(leaving, promise=SLOT_B))
    assert isinstance(place, Place)
    status = place.status
    assert status.placement == Placement(pod="pod-b", pod_uid="uid-b", fence=4)
    assert (status.phase, status.last_placement) == (SessionPhase.MOVING, ON_A)


def test_there_is_no_slot_elsewhere_so_it_talks_on_and_waits() -> None:
    talks = said(FeedPhase.ACTIVE, attached=True)
    waiting = placed(SessionPhase.ACTIVE, said=talks, wait=FULL)
    action = decide(replace(waiting, pod=LEAVING))
    assert isinstance(action, WriteStatus)
    assert action.queued
    told = replace(waiting, pod=LEAVING, session=session(status=action.status))
    assert decide(told) == Nothing(queued=True)


def test_who_does_not_talk_or_is_to_park_is_left_to_the_drain() -> None:
    alone = placed(SessionPhase.ACTIVE, said=said(FeedPhase.ACTIVE))
    assert isinstance(decide(replace(alone, pod=LEAVING)), WriteStatus)
    talks = said(FeedPhase.ACTIVE, attached=True)
    wish = placed(SessionPhase.ACTIVE, said=talks, spec={"desiredState": "Parked"})
    assert decide(replace(wish, pod=LEAVING)) == Park("uid-a")


def between(**changes: Any) -> SessionFacts:
    """It has a slot on pod-b and runs still on pod-a."""
    talks = said(FeedPhase.ACTIVE, attached=True)
    before = placed(SessionPhase.ACTIVE, said=talks, promise=SLOT_B)
    place = decide(replace(before, pod=LEAVING))
    assert isinstance(place, Place)
    spec = changes.pop("spec", {})
    there = PodView("uid-b", "pod-b", PodHealth.LIVE)
    start = facts(session(status=place.status, **spec), pod=there, source=talks)
    return replace(start, **changes)


def test_a_session_between_two_pods_is_handed_over_once() -> None:
    assert decide(between()) == HandOver("uid-b", "uid-a", 4)
    # Another operator, which remembers nothing, says the same; what is done already is an answer.
    assert decide(between(memory=Memory())) == HandOver("uid-b", "uid-a", 4)
    moved = Memory(opened_fence=4, opened_ms=NOW_MS - 1_000)
    assert decide(between(memory=moved)) == Nothing(4.0)
    arrived = between(said=said(FeedPhase.ACTIVE, fence=4, attached=True), source=None)
    action = decide(arrived)
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.status.placement) == (
        SessionPhase.ACTIVE,
        Placement(pod="pod-b", pod_uid="uid-b", fence=4),
    )


def test_what_cannot_be_handed_over_parks_and_is_taken_up() -> None:
    came_to_nothing = Memory(unmoved_fence=4)
    assert decide(between(memory=came_to_nothing)) == Park("uid-a")
    assert decide(between(source=said(FeedPhase.ACTIVE))) == Park("uid-a")
    of_before = Memory(unmoved_fence=3)
    assert decide(between(memory=of_before)) == HandOver("uid-b", "uid-a", 4)
    assert decide(between(memory=came_to_nothing, source=None)) == Open("uid-b", 4, "uid-a")


def test_a_target_that_dies_leaves_the_session_where_it_is() -> None:
    dead = PodView("uid-b", "pod-b", PodHealth.DEAD, "PodGone", "gone", proven=True)
    assert decide(between(pod=dead)) == AskForSlot()
    place = decide(between(pod=dead, promise=Assignment("uid-c", "pod-c")))
    assert isinstance(place, Place)
    assert place.status.placement == Placement(pod="pod-c", pod_uid="uid-c", fence=5)
    unheard = PodView("uid-b", "pod-b", PodHealth.UNHEARD)
    assert decide(between(pod=unheard)) == Nothing(0.5)


def test_a_session_between_two_pods_is_ended_where_it_runs() -> None:
    assert decide(between(spec={"desiredState": "Closed"})) == End("uid-a", "Closed")
    here = between()
    meta = replace(here.session.meta, deleted_ms=NOW_MS - 1_000)
    gone = replace(here, session=replace(here.session, meta=meta))
    assert decide(gone) == End("uid-a", "Deleted")
    assert decide(replace(gone, source=None)) == End("uid-b", "Deleted")


def test_the_ledgers_word_on_a_leaving_pod_counts_like_the_pods() -> None:
    base = placed(SessionPhase.ACTIVE, said=said(attached=True))
    status = build_status(base, SessionPhase.ACTIVE, "x", "x", placement=ON_A)
    parked = LedgerWord(LedgerPhase.PARKED, 3, "drain")
    silent = replace(base, session=session(status=status), said=None, ledger=parked)
    assert decide(silent) == AskForSlot()


@pytest.mark.parametrize(
    ("reason", "told"),
    [("drain", SessionPhase.MOVING), ("client_away", SessionPhase.PARKED)],
)
def test_whoever_still_waits_on_a_drained_pod_is_woken_without_a_word(
    reason: str, told: SessionPhase
) -> None:
    """The gateway wakes a moving session for a client that says nothing, a parked one not."""
    action = decide(placed(SessionPhase.READY, said=said(FeedPhase.PARKED, reason=reason)))
    assert isinstance(action, WriteStatus)
    assert action.status.phase is SessionPhase.PARKED
    phase = phase_for_clients(action.status)
    assert phase is told
    route = RouteRecord(token_sha256="a" * 64, phase=phase, pool="a/b", session="c/d")
    answer = of_gateway(route, LeaseView(3, 0, "", "parked", reason))
    assert isinstance(answer, Wait_)
    assert answer.wake
    assert (answer.reason is GatewayReason.PARKED) is (told is SessionPhase.PARKED)
    parked = facts(session(status=action.status))
    assert isinstance(decide(parked), Nothing), "nobody waits: no slot is taken"
    assert decide(replace(parked, memory=Memory(woken=True))) == AskForSlot()


def test_parked_until_somebody_wants_it() -> None:
    start = placed(SessionPhase.READY, said=said(FeedPhase.PARKED, reason="client_away"))
    action = decide(start)
    assert isinstance(action, WriteStatus)
    parked = facts(session(status=action.status))
    assert decide(parked) == Nothing(1800.0)
    assert decide(replace(parked, memory=Memory(woken=True))) == AskForSlot()
    late = replace(parked, now_ms=NOW_MS + 1_800_000)
    action = decide(late)
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.reason) == (SessionPhase.ENDED, "IdleTimeout")


@pytest.mark.parametrize(
    ("lifecycle", "desired", "bound_s", "reason"),
    [
        ({"idleTimeout": "10m", "retention": "2h"}, "Running", 600.0, "IdleTimeout"),
        ({"idleTimeout": "2h", "retention": "10m"}, "Running", 600.0, "RetentionPassed"),
        ({"retention": "10m"}, "Running", 600.0, "RetentionPassed"),
        ({"idleTimeout": "1h", "retention": "1h"}, "Running", 3600.0, "IdleTimeout"),
        ({"idleTimeout": "10m", "retention": "2h"}, "Parked", 7200.0, "RetentionPassed"),
        ({"retention": "2s"}, "Running", 10.0, "RetentionPassed"),
        ({"retention": "2s"}, "Parked", 10.0, "RetentionPassed"),
        ({"idleTimeout": "5s", "retention": "2s"}, "Running", 5.0, "IdleTimeout"),
    ],
)
def test_parked_no_longer_than_its_ledger_is_kept(
    lifecycle: dict[str, str], desired: str, bound_s: float, reason: str
) -> None:
    spec = {"lifecycle": lifecycle, "desiredState": desired}
    start = placed(SessionPhase.READY, said=said(FeedPhase.PARKED, reason="client_away"), spec=spec)
    action = decide(start)
    assert isinstance(action, WriteStatus)
    parked = facts(session(status=action.status, **spec))
    if desired == "Running":
        assert decide(parked) == Nothing(bound_s)
    bound_ms = round(bound_s * 1000)
    early = decide(replace(parked, now_ms=NOW_MS + bound_ms - 1))
    assert not (isinstance(early, WriteStatus) and _is_over(early))
    action = decide(replace(parked, now_ms=NOW_MS + bound_ms))
    assert isinstance(action, WriteStatus)
    assert _is_over(action)
    assert action.reason == action.status.reason == reason
    word = "retention" if reason == "RetentionPassed" else "idleTimeout"
    assert word in action.sentence


def _is_over(action: WriteStatus) -> bool:
    return action.status.phase is SessionPhase.ENDED


def test_what_was_talked_to_is_opened_to_go_on_and_ends_without_its_ledger() -> None:
    fresh = placed()
    opening = decide(fresh)
    assert isinstance(opening, Open)
    assert not opening.goes_on
    status = fresh.session.status.model_copy(update={"units": 0})
    unused = replace(fresh, session=replace(fresh.session, status=status))
    opening = decide(unused)
    assert isinstance(opening, Open)
    assert not opening.goes_on, "there is no history that it could lose"
    status = status.model_copy(update={"units": 7})
    used = replace(fresh, session=replace(fresh.session, status=status))
    assert decide(used) == Open("uid-a", 3, "", goes_on=True)
    memory = Memory(refusal=Refusal(3, "ledger_lost", "gone"))
    action = decide(replace(used, memory=memory))
    assert isinstance(action, WriteStatus)
    assert _is_over(action)
    assert (action.reason, action.event, action.warning) == ("LedgerLost", True, True)
    assert action.status.placement is None
    after = facts(session(status=action.status), memory=memory)
    assert isinstance(decide(after), Nothing), "it is not tried again"


def test_a_session_parks_with_what_it_has_said() -> None:
    """Its units may not have been due as counters yet."""
    parks = said(FeedPhase.PARKED, reason="client_away", units=12)
    action = decide(placed(SessionPhase.ACTIVE, said=parks))
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.status.units) == (SessionPhase.PARKED, 12)


def test_the_owners_wish() -> None:
    wish = {"desiredState": "Parked"}
    assert decide(placed(SessionPhase.READY, said=said(), spec=wish)) == Park("uid-a")
    asked = Memory(asked_park_ms=NOW_MS - 500)
    waits = placed(SessionPhase.READY, said=said(), spec=wish, memory=asked)
    told = decide(waits)
    assert isinstance(told, WriteStatus)
    waits = replace(waits, session=replace(waits.session, status=told.status))
    assert decide(waits) == Nothing(1.5)
    # Why it takes so long is told, and it is asked again all the same.
    away = decide(replace(waits, said=said(ledger_durable=False)))
    assert isinstance(away, WriteStatus)
    durable = condition_of(away.status, LEDGER_DURABLE)
    assert durable is not None
    assert durable.status is ConditionStatus.FALSE
    late = replace(waits, said=said(ledger_durable=False), now_ms=NOW_MS + 1_500)
    assert decide(late) == Park("uid-a")
    action = decide(facts(session(**wish)))
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.reason) == (SessionPhase.PARKED, "Requested")
    running_again = session(status=action.status)
    assert decide(facts(running_again)) == AskForSlot()
    closed = {"desiredState": "Closed"}
    assert decide(placed(SessionPhase.READY, said=said(), spec=closed)) == End("uid-a", "Closed")
    action = decide(facts(session(**closed)))
    assert isinstance(action, WriteStatus)
    assert action.status.phase is SessionPhase.ENDED
    assert condition_of(action.status, "Ended") is not None


def test_an_ended_session_is_deleted_after_its_ttl() -> None:
    action = decide(placed(SessionPhase.READY, said=said(FeedPhase.ENDED, reason="idle")))
    assert isinstance(action, WriteStatus)
    ended = facts(session(status=action.status))
    assert decide(ended) == Nothing(3600.0)
    assert isinstance(decide(replace(ended, now_ms=NOW_MS + 3_600_000)), Delete)


def test_deletion_ends_erases_and_lets_go() -> None:
    running = placed(SessionPhase.READY, said=said())
    meta = replace(running.session.meta, deleted_ms=NOW_MS - 1_000)
    leaving = replace(running, session=replace(running.session, meta=meta))
    assert decide(leaving) == End("uid-a", "Deleted")
    assert decide(replace(leaving, memory=Memory(ended=True))) == Erase()
    assert decide(replace(leaving, pod=DEAD)) == Erase()
    action = decide(replace(leaving, memory=Memory(ended=True, erased=True)))
    assert isinstance(action, RemoveFinalizer)
    assert (action.reason, action.warning) == ("Erased", False)
    action = decide(replace(leaving, now_ms=NOW_MS + 30_000))
    assert isinstance(action, RemoveFinalizer)
    assert (action.reason, action.warning) == ("ErasurePending", True)
    gone = replace(leaving.session, meta=replace(meta, finalizers=("other",)))
    assert decide(replace(leaving, session=gone)) == Nothing()


def test_an_erasure_that_is_refused_is_asked_for_ever_more_rarely_within_its_bound() -> None:
    running = placed(SessionPhase.READY, said=said())
    meta = replace(running.session.meta, deleted_ms=NOW_MS)
    here = replace(running, session=replace(running.session, meta=meta), pod=DEAD)
    memory, asked_ms = Memory(), list[int]()
    why = "ledger_corrupt: key meta has a foreign type"
    while isinstance(action := decide(replace(here, memory=memory)), Erase | Nothing):
        if isinstance(action, Erase):
            asked_ms.append(here.now_ms - NOW_MS)
            memory = erasing.after_refusal(memory, why, here.now_ms)
        else:
            assert action.after_s is not None
            here = replace(here, now_ms=here.now_ms + round(action.after_s * 1000))
    assert asked_ms == [0, 1_000, 3_000, 7_000, 15_000]
    assert isinstance(action, RemoveFinalizer)
    assert (here.now_ms - NOW_MS, action.reason, action.warning) == (30_000, "ErasureRefused", True)
    assert why in action.sentence


def test_what_is_refused_is_told_and_live_sessions_are_left_alone() -> None:
    refused = Refused(RefusalReason.POOL_NOT_FOUND, "there is no pool default/x")
    action = decide(facts(verdict=refused))
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.event) == (SessionPhase.PENDING, True)
    accepted = condition_of(action.status, "Accepted")
    assert accepted is not None
    assert (accepted.status, accepted.reason) == ("False", "PoolNotFound")
    told = facts(session(status=action.status), verdict=refused)
    assert decide(told) == Nothing(5.0)
    live = decide(placed(SessionPhase.READY, said=said(FeedPhase.ACTIVE), verdict=refused))
    assert isinstance(live, WriteStatus)
    assert live.status.placement == ON_A


def test_a_short_wait_is_not_written_down_and_positions_not_often() -> None:
    waits = facts(wait=FULL, memory=Memory(waits_since_ms=NOW_MS - 400))
    assert decide(waits) == Nothing(0.6, queued=True)
    action = decide(replace(waits, memory=Memory(waits_since_ms=NOW_MS - 1_000)))
    assert isinstance(action, WriteStatus)
    assert (action.status.queue_position, action.queued) == (2, True)
    queued = facts(
        session(status=action.status),
        wait=replace(FULL, position=1),
        memory=Memory(waits_since_ms=NOW_MS - 9_000, positioned_ms=NOW_MS - 5_000),
    )
    assert decide(queued) == Nothing(10.0, queued=True)
    later = replace(queued, memory=replace(queued.memory, positioned_ms=NOW_MS - 15_000))
    assert isinstance(decide(later), WriteStatus)


def test_counters_alone_wait_for_their_minute() -> None:
    first = decide(placed(said=said()))
    assert isinstance(first, WriteStatus)
    ready = placed(said=said(units=9, audio=AudioReport(longest_gap_ms=3)))
    ready = replace(ready, session=replace(ready.session, status=first.status))
    flushed = replace(ready, memory=Memory(flushed_ms=NOW_MS - 20_000))
    assert decide(flushed) == Nothing(40.0)
    due = decide(replace(ready, memory=Memory(flushed_ms=NOW_MS - 60_000)))
    assert isinstance(due, WriteStatus)
    assert only_counters(status_patch(first.status, due.status))
    assert due.status.units == 9
    attached = replace(flushed, said=said(FeedPhase.ACTIVE, attached=True, units=9))
    action = decide(attached)
    assert isinstance(action, WriteStatus)
    assert (action.status.phase, action.event) == (SessionPhase.ACTIVE, False)


def test_conditions_tell_pace_and_window() -> None:
    first = decide(placed(said=said()))
    assert isinstance(first, WriteStatus)
    slow = said(
        keeping_pace=False,
        ledger_durable=False,
        audio=AudioReport(underruns=2),
        last_rebuild=LastRebuildReport("slide", 1_400.0, "t" * 40),
    )
    now = placed(said=slow)
    now = replace(now, session=replace(now.session, status=first.status))
    action = decide(now)
    assert isinstance(action, WriteStatus)
    for name, reason in (
        ("KeepingPace", "AudioLate"),
        ("WindowHealthy", "RebuildSlow"),
        ("LedgerDurable", "LedgerUnavailable"),
    ):
        found = condition_of(action.status, name)
        assert found is not None
        assert (found.status, found.reason) == ("False", reason)
    assert action.status.last_rebuild is not None
    assert action.status.last_rebuild.trace_id == "t" * 32


def test_a_ledger_that_lost_its_tail_is_told_once_and_not_forgotten() -> None:
    talks = said(FeedPhase.ACTIVE, attached=True)
    action = decide(placed(SessionPhase.ACTIVE, said=talks))
    assert isinstance(action, WriteStatus)
    assert condition_of(action.status, "LedgerRewound") is None
    before = placed(SessionPhase.ACTIVE, said=talks)
    before = replace(before, session=session(status=action.status))
    lost = msgspec.structs.replace(talks, ledger_rewound=True)
    assert is_news(talks, lost)
    action = decide(replace(before, said=lost))
    assert isinstance(action, WriteStatus)
    assert (action.reason, action.event, action.warning) == ("LedgerRewound", True, True)
    told = condition_of(action.status, "LedgerRewound")
    assert told is not None
    assert (told.status, told.reason) == ("True", "EventsLost")
    known = replace(before, session=session(status=action.status))
    assert decide(replace(known, said=lost)) == Nothing()
    # On another pod nobody knows of it any more.
    again = decide(
        replace(known, said=msgspec.structs.replace(talks, units=9), now_ms=NOW_MS + 90_000)
    )
    parks = decide(replace(known, said=said(FeedPhase.PARKED, reason="client_away")))
    for action in (again, parks):
        assert isinstance(action, WriteStatus)
        assert condition_of(action.status, "LedgerRewound") == told


# --- a whole life, simulated --------------------------------------------------------------------


@dataclass
class World:
    """What the actions act on. Every step may be lost: `forget` is an operator's restart."""

    facts: SessionFacts
    slots: list[Assignment]
    running: dict[str, FeedSession] = field(default_factory=dict)
    gone: bool = False
    finalized: bool = False
    taken: list[int] = field(default_factory=list)

    def look(self) -> SessionFacts:
        placement = self.facts.placement
        if placement is None:
            return replace(self.facts, pod=None, said=None)
        pod = PodView(placement.pod_uid, placement.pod, PodHealth.LIVE)
        return replace(self.facts, pod=pod, said=self.running.get(placement.pod_uid))

    def apply(self, action: Action) -> None:
        before = self.facts
        match action:
            case EnsureFinalizer():
                self._meta(finalizers=(SESSION_FINALIZER,))
            case AssignToken():
                self.facts = replace(before, token=TOKEN)
            case AskForSlot():
                self.facts = replace(before, promise=self.slots[0])
            case Place(status=status):
                self._status(status)
                self.facts = replace(self.facts, promise=None)
                assert status.placement is not None
                self.taken.append(status.placement.fence)
            case Open(pod_uid=pod, fence=fence):
                self.running[pod] = said(fence=fence)
            case Park(pod_uid=pod):
                self.running[pod] = said(FeedPhase.PARKED, fence=self.running[pod].fence)
            case End(pod_uid=pod):
                self.running.pop(pod, None)
                self.facts = replace(before, memory=replace(before.memory, ended=True))
            case WriteStatus(status=status):
                self._status(status)
            case Erase():
                self.facts = replace(before, memory=replace(before.memory, erased=True))
            case RemoveFinalizer():
                self._meta(finalizers=())
                self.gone = True
            case Delete():
                self._meta(deleted_ms=before.now_ms)
            case Nothing():
                pass

    def forget(self) -> None:
        """The operator starts again: the token's hash and all memory are gone."""
        self.facts = replace(self.facts, memory=Memory(), promise=None, wait=None, token=None)

    def _meta(self, **changes: Any) -> None:
        found = self.facts.session
        self.facts = replace(
            self.facts, session=replace(found, meta=replace(found.meta, **changes))
        )

    def _status(self, status: SessionStatus) -> None:
        self.facts = replace(self.facts, session=replace(self.facts.session, status=status))


@given(
    st.lists(st.booleans(), max_size=12),
    st.sampled_from(list(DesiredState)),
    st.booleans(),
)
def test_every_life_comes_to_rest(
    restarts: list[bool], desired: DesiredState, deleted: bool
) -> None:
    start = session(finalizers=(), deleted_ms=0, desiredState=str(desired))
    world = World(facts(start, token=None), [SLOT_A])
    for step, restart in enumerate((*restarts, *[False] * 30)):
        if deleted and step == 6 and not world.gone:
            world.facts = replace(
                world.facts,
                session=replace(
                    world.facts.session,
                    meta=replace(world.facts.session.meta, deleted_ms=NOW_MS),
                ),
            )
        action = decide(world.look())
        world.apply(action)
        if restart:
            world.forget()
    # At rest: deciding again says that there is nothing to do.
    assert isinstance(decide(world.look()), Nothing)
    assert world.taken == sorted(set(world.taken))
    status = world.facts.session.status
    if deleted:
        assert world.gone or SESSION_FINALIZER not in world.facts.session.meta.finalizers
        assert not world.running
        return
    expected = {
        DesiredState.RUNNING: SessionPhase.READY,
        DesiredState.PARKED: SessionPhase.PARKED,
        DesiredState.CLOSED: SessionPhase.ENDED,
    }
    assert status.phase is expected[desired]
    assert bool(world.running) == (desired is DesiredState.RUNNING)
