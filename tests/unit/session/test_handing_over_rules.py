"""When a session changes hands; what a stream that stands ready still lacks."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    LeaseLost,
    LedgerError,
    NotOffered,
    StaleFence,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session import passing_on
from duplex_sidecar.session.handing_over import HandOver, may_hand_over
from duplex_sidecar.session.parking import Standing
from duplex_sidecar.session.passing_on import PassingOn
from duplex_sidecar.session.refusals import PlacementRefused, Refusal
from duplex_sidecar.session.warming import positions_of, remainder
from duplex_sidecar.stages.envelope import ElementType, Ids, Rows, Tensor, ThinkerPart

pytestmark = pytest.mark.unit


def standing(
    now_s: float = 10.0, *, turn_open: bool = False, away: bool = False, between: bool = True
) -> Standing:
    return Standing(
        now_s=now_s,
        opened_s=0.0,
        last_input_s=now_s,
        attached_s=0.0,
        detached_s=5.0 if away else None,
        turn_open=turn_open,
        between_units=between,
    )


@given(st.floats(0, 20), st.booleans(), st.booleans(), st.booleans())
def test_a_session_changes_hands_between_units_at_a_turns_end_or_in_time(
    by_s: float, turn_open: bool, away: bool, between: bool
) -> None:
    now = standing(turn_open=turn_open, away=away, between=between)
    expected = between and (not turn_open or away or by_s <= 10.0)
    assert may_hand_over(by_s, now) is expected


# --- the owner's wish -----------------------------------------------------------------------------


class FakeDurable:
    def __init__(self, outcome: LedgerError | None = None, *, hangs: bool = False) -> None:
        self.outcome = outcome
        self.hangs = hangs
        self.given: list[tuple[str, int]] = []

    async def hand_over(self, replica: str, fence: int) -> None:
        self.given.append((replica, fence))
        if self.hangs:
            await asyncio.Event().wait()
        if self.outcome is not None:
            raise self.outcome


class FakeKeeper:
    def __init__(self) -> None:
        self.running = True

    def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False


def passing(durable: FakeDurable) -> tuple[PassingOn, FakeKeeper]:
    keeper = FakeKeeper()
    made: Any = PassingOn(durable, keeper, lambda: 0.0, lambda: None)  # type: ignore[arg-type]
    return made, keeper


ORDER = HandOver("b", 2)


async def test_a_wish_is_granted_once_and_moves_the_lease() -> None:
    durable = FakeDurable()
    passing_on, keeper = passing(durable)
    assert not passing_on.grant(standing())
    outcome = passing_on.wish(ORDER, 20.0)
    assert passing_on.wish(ORDER, 30.0) is outcome
    with pytest.raises(PlacementRefused) as error:
        passing_on.wish(HandOver("c", 3), 20.0)
    assert error.value.refusal is Refusal.SESSION_BUSY
    assert not passing_on.grant(standing(19.0, turn_open=True))
    assert passing_on.grant(standing(20.0, turn_open=True))
    assert not passing_on.grant(standing())
    assert not passing_on.withdraw(ORDER)
    await passing_on.run()
    assert outcome.result() is None
    assert (passing_on.granted, keeper.running, durable.given) == (True, False, [("b", 2)])


async def test_a_wish_is_taken_back_by_who_had_it() -> None:
    passing_on, _ = passing(FakeDurable())
    assert not passing_on.withdraw(ORDER)
    outcome = passing_on.wish(ORDER, 0.0)
    assert not passing_on.withdraw(HandOver("c", 2))
    assert passing_on.withdraw(ORDER)
    told = outcome.exception()  # also who else asked for it and still waits
    assert isinstance(told, PlacementRefused)
    assert told.refusal is Refusal.SESSION_BUSY
    assert not passing_on.grant(standing())
    passing_on.wish(HandOver("c", 3), 0.0)
    assert passing_on.grant(standing())


@pytest.mark.parametrize(
    ("refused", "code", "refusal"),
    [
        (NotOffered("s", "no"), ErrorCode.NOT_READY, Refusal.NOT_PREPARED),
        (StaleFence("s", "no"), ErrorCode.LEASE_LOST, Refusal.STALE_FENCE),
        (HeadMismatch("s", Head(1, "0", 1, None)), ErrorCode.NOT_READY, Refusal.SESSION_BUSY),
        (None, ErrorCode.LEDGER_UNAVAILABLE, None),
    ],
    ids=["not-offered", "stale", "head", "no-answer"],
)
async def test_a_refusal_leaves_the_session_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    refused: LedgerError | None,
    code: ErrorCode,
    refusal: Refusal | None,
) -> None:
    monkeypatch.setattr(passing_on, "HAND_OVER_S", 0.01)
    passing_it_on, keeper = passing(FakeDurable(refused, hangs=refused is None))
    outcome = passing_it_on.wish(ORDER, 0.0)
    assert passing_it_on.grant(standing())
    await passing_it_on.run()
    error = outcome.exception()
    assert isinstance(error, ClientError)
    assert error.code is code
    assert getattr(error, "refusal", None) is refusal
    assert (passing_it_on.granted, keeper.running) == (False, True)


async def test_a_lost_lease_ends_the_session_here() -> None:
    passing_on, _ = passing(FakeDurable(LeaseLost("s", "gone")))
    passing_on.wish(ORDER, 0.0)
    assert passing_on.grant(standing())
    with pytest.raises(LeaseLost):
        await passing_on.run()


# --- what a stream lacks --------------------------------------------------------------------------


def rows(name: int, count: int = 2) -> Rows:
    return Rows(Tensor(ElementType.FLOAT32, (count, 1), bytes([name]) * 4 * count))


parts = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda ids: Ids(tuple(ids))),
        st.integers(0, 3).map(rows),
    ),
    max_size=5,
)


def joined(pieces: list[ThinkerPart]) -> tuple[ThinkerPart, ...]:
    """As a renderer gives them: neighbouring texts are one."""
    found: list[ThinkerPart] = []
    for piece in pieces:
        if found and isinstance(piece, Ids) and isinstance(found[-1], Ids):
            found[-1] = Ids(found[-1].ids + piece.ids)
        else:
            found.append(piece)
    return tuple(found)


def flat(pieces: tuple[ThinkerPart, ...]) -> list[object]:
    found: list[object] = []
    for piece in pieces:
        found += piece.ids if isinstance(piece, Ids) else [(piece, k) for k in range(2)]
    return found


@given(parts, parts)
def test_what_is_fed_to_a_stream_makes_it_hold_what_is_wanted(
    held: list[ThinkerPart], more: list[ThinkerPart]
) -> None:
    before, wanted = joined(held), joined([*held, *more])
    rest = remainder(before, wanted)
    if not before:
        assert rest is None
        return
    assert rest is not None
    assert flat(before) + flat(rest) == flat(wanted)
    assert positions_of(before) + positions_of(rest) == positions_of(wanted) == len(flat(wanted))


@given(parts, parts)
def test_a_stream_that_holds_something_else_is_not_extended(
    held: list[ThinkerPart], wanted: list[ThinkerPart]
) -> None:
    before, after = joined(held), joined(wanted)
    rest = remainder(before, after)
    fits = bool(before) and flat(after)[: len(flat(before))] == flat(before)
    assert (rest is not None) is fits
