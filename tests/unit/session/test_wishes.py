"""What others want of a session: which wish counts, and that its task is woken for each."""

import pytest

from duplex_api.resolve import ResolvedLifecycle
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.session.ending import ERASED, SHUT_DOWN, Ending, parked
from duplex_sidecar.session.parking import ParkReason, Standing
from duplex_sidecar.session.wishes import Wishes

pytestmark = pytest.mark.unit
LIFE = ResolvedLifecycle(
    max_duration_ms=100_000,
    idle_timeout_ms=50_000,
    disconnect_grace_ms=20_000,
    park_after_ms=30_000,
    ttl_after_finished_ms=60_000,
    retention_ms=3_600_000,
)


def standing(now_s: float, *, turn_open: bool = False) -> Standing:
    return Standing(
        now_s=now_s,
        opened_s=0.0,
        last_input_s=0.0,
        attached_s=0.0,
        detached_s=None,
        turn_open=turn_open,
        between_units=True,
    )


def wishes() -> tuple[Wishes, list[str]]:
    """Also a list that grows each time that the session's task is woken."""
    woken: list[str] = []
    return Wishes(lambda: 10.0, lambda: woken.append("woken")), woken


def test_nobody_wishes_anything() -> None:
    made, woken = wishes()
    assert (made.ending, made.told_to_go.is_set(), woken) == (None, False, [])
    assert made.verdict(LIFE, standing(10.0)) is None


def test_an_ending_is_not_softened_by_who_only_wants_it_gone() -> None:
    made, woken = wishes()
    made.let_go()
    assert made.ending is SHUT_DOWN
    made.end(ERASED)
    made.let_go()
    assert (made.ending, made.told_to_go.is_set(), len(woken)) == (ERASED, True, 3)


def test_a_park_waits_for_the_end_of_a_turn_and_is_never_put_off() -> None:
    made, woken = wishes()
    made.park(ParkReason.DRAIN, 5.0)
    made.park(ParkReason.DRAIN, 9.0)
    assert len(woken) == 2
    assert made.verdict(LIFE, standing(14.0, turn_open=True)) is None
    assert made.verdict(LIFE, standing(15.0, turn_open=True)) == parked(ParkReason.DRAIN)
    assert made.verdict(LIFE, standing(14.0)) == parked(ParkReason.DRAIN)


def test_a_wish_that_is_withdrawn_leaves_the_others() -> None:
    made, _ = wishes()
    made.park(ParkReason.REQUESTED, 0.0)
    made.park(ParkReason.DRAIN, 5.0)
    made.withdraw(ParkReason.REQUESTED)
    made.withdraw(ParkReason.REQUESTED)
    assert made.verdict(LIFE, standing(11.0)) == parked(ParkReason.DRAIN)
    made.withdraw(ParkReason.DRAIN)
    assert made.verdict(LIFE, standing(11.0)) is None


def test_its_own_terms_end_it_for_good() -> None:
    made, _ = wishes()
    made.park(ParkReason.REQUESTED, 0.0)
    ended = made.verdict(LIFE, standing(51.0))
    sentence = "no input within idleTimeout"
    assert ended == Ending(ErrorCode.SESSION_EXPIRED, sentence, for_good=True)
