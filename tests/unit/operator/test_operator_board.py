"""Promises reserve slots; whoever leaves holds none up."""

import pytest

from duplex_operator.decide.placement import Assignment, Wait, Waiting, WaitReason
from duplex_operator.objects import ObjectKey
from duplex_operator.placements import PlacementBoard

pytestmark = pytest.mark.unit

POOL = ObjectKey("default", "x")
SLOT = Assignment("pod-uid", "pod-a")


def test_a_promise_counts_until_it_is_kept() -> None:
    board = PlacementBoard()
    assert board.ask(POOL, Waiting("a", 0, 1))
    assert not board.ask(POOL, Waiting("a", 0, 1))
    assert board.queued(POOL) == 1
    board.promise("a", SLOT)
    assert board.queued(POOL) == 0
    assert board.promised_on("pod-uid") == {"a"}
    board.leave("a")
    assert board.promised_on("pod-uid") == frozenset()
    assert board.pools() == ()


def test_an_answer_is_news_when_its_reason_is() -> None:
    board = PlacementBoard()
    board.ask(POOL, Waiting("a", 0, 1))
    assert board.answer("a", Wait(WaitReason.NO_PODS, "none", 1))
    assert not board.answer("a", Wait(WaitReason.NO_PODS, "none", 2))
    assert board.answer("a", Wait(WaitReason.NO_FREE_SLOTS, "full", 2))
    board.promise("a", SLOT)
    assert board.answer_of("a") is None


def test_another_pool_is_another_queue() -> None:
    board = PlacementBoard()
    other = ObjectKey("default", "y")
    board.ask(POOL, Waiting("a", 0, 1))
    board.ask(other, Waiting("a", 0, 1))
    assert board.waiting_for(POOL) == {}
    assert set(board.waiting_for(other)) == {"a"}


def test_a_pod_that_refused_is_left_alone_for_a_while() -> None:
    board = PlacementBoard()
    board.refuse("pod-uid", until_s=10.0)
    assert board.refused("pod-uid", 9.9)
    assert not board.refused("pod-uid", 10.0)
    assert not board.refused("other", 0.0)
