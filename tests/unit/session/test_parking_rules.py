"""When a session parks and when it ends: the rules, at their edges and all at once."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duplex_api.resolve import ResolvedLifecycle
from duplex_sidecar.session.parking import (
    PARK_SENTENCES,
    Expire,
    Park,
    ParkReason,
    Standing,
    verdict,
)

pytestmark = pytest.mark.unit

LIFE = ResolvedLifecycle(
    idle_timeout_ms=600_000,
    disconnect_grace_ms=30_000,
    max_duration_ms=3_600_000,
    park_after_ms=120_000,
    ttl_after_finished_ms=1,
    retention_ms=1,
)
CALM = Standing(
    now_s=1000.0,
    opened_s=990.0,
    last_input_s=999.0,
    attached_s=990.0,
    detached_s=None,
    turn_open=False,
    between_units=True,
)


def test_a_session_that_is_used_goes_on() -> None:
    assert verdict(LIFE, {}, CALM) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"last_input_s": 880.0}, None),
        ({"last_input_s": 879.9}, Park(ParkReason.PARK_AFTER)),
        # A client that has just come gets the whole time, however long nobody spoke before.
        ({"last_input_s": 700.0, "attached_s": 999.0}, None),
        ({"detached_s": 970.0}, None),
        ({"detached_s": 969.9}, Park(ParkReason.DISCONNECT_GRACE)),
        # Silence of a session without a client is judged by the client's absence.
        ({"detached_s": 999.0, "last_input_s": 700.0}, None),
        ({"last_input_s": 399.9}, Expire("no input within idleTimeout")),
        ({"last_input_s": 399.9, "detached_s": 1.0}, Expire("no input within idleTimeout")),
        ({"opened_s": -2601.0}, Expire("the session reached its maxDuration")),
    ],
)
def test_the_clocks(change: dict[str, float], expected: Expire | Park | None) -> None:
    standing = replace(CALM, opened_s=0.0, attached_s=0.0)
    assert verdict(LIFE, {}, replace(standing, **change)) == expected


@pytest.mark.parametrize(
    ("change", "parks"),
    [
        ({}, True),
        ({"turn_open": True}, False),
        ({"turn_open": True, "now_s": 1005.0}, True),
        ({"turn_open": True, "detached_s": 999.0}, True),
        ({"between_units": False}, False),
        ({"between_units": False, "now_s": 1005.0}, False),
    ],
)
def test_a_wish_is_granted_between_two_units(change: dict[str, float], parks: bool) -> None:
    wishes = {ParkReason.DRAIN: 1005.0}
    expected = Park(ParkReason.DRAIN) if parks else None
    assert verdict(LIFE, wishes, replace(CALM, **change)) == expected


def test_of_two_wishes_the_earlier_counts() -> None:
    wishes = {ParkReason.DRAIN: 1060.0, ParkReason.REQUESTED: 999.0}
    standing = replace(CALM, turn_open=True)
    assert verdict(LIFE, wishes, standing) == Park(ParkReason.REQUESTED)


times = st.floats(min_value=0, max_value=5000)


@given(
    standing=st.builds(
        Standing,
        now_s=times,
        opened_s=times,
        last_input_s=times,
        attached_s=times,
        detached_s=st.none() | times,
        turn_open=st.booleans(),
        between_units=st.booleans(),
    ),
    wishes=st.dictionaries(st.sampled_from(ParkReason), times),
)
@example(
    standing=Standing(
        now_s=121.0,
        opened_s=0.0,
        last_input_s=0.0,
        attached_s=0.0,
        detached_s=None,
        turn_open=True,
        between_units=True,
    ),
    wishes={ParkReason.REQUESTED: 122.0},
)
def test_whatever_is_true(standing: Standing, wishes: dict[ParkReason, float]) -> None:
    judged = verdict(LIFE, wishes, standing)
    if isinstance(judged, Park):
        assert standing.between_units
        assert judged.reason in {*wishes, ParkReason.PARK_AFTER, ParkReason.DISCONNECT_GRACE}
    # Time alone parks at last whoever wants to be parked.
    later = replace(standing, now_s=5001.0, between_units=True)
    if wishes:
        assert isinstance(verdict(LIFE, wishes, later), Park | Expire)
    # A turn that is open only ever puts a wish off. Behind it time alone may park all the same, for
    # its own reason.
    closed = verdict(LIFE, wishes, replace(standing, turn_open=False))
    assert judged is None or type(judged) is type(closed)
    put_off = closed != judged and isinstance(closed, Park)
    assert judged is None or judged == closed or (put_off and closed.reason in wishes)


def test_every_reason_has_a_sentence() -> None:
    assert set(PARK_SENTENCES) == set(ParkReason)
