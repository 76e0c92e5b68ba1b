"""What a connection may have received that nobody has taken, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_gateway.budget import Budget
from duplex_sidecar.doors.unread import (
    FREE_BYTES,
    LOOK_EVERY_S,
    MESSAGE_TIMEOUT_S,
    MOST_BYTES,
    READ_BYTES,
    ROOM_TIMEOUT_S,
    Overdue,
    Unread,
)

pytestmark = pytest.mark.unit

LIMIT_BYTES = 1024 * 1024


def unread_of_a_client() -> Unread:
    unread = Unread(lambda: None)
    unread.admit()
    return unread


def read_until_stopped(unread: Unread, most: int = 100_000) -> int:
    """Bytes of one frame without an end."""
    came = 0
    while unread.may_read and came < most * READ_BYTES:
        unread.read(READ_BYTES)
        came += READ_BYTES
    return came


def test_a_stranger_is_read_no_further_than_a_first_message_goes() -> None:
    told: list[bool] = []
    unread = Unread(lambda: told.append(unread.may_read))
    assert read_until_stopped(unread) <= FREE_BYTES + READ_BYTES
    assert unread.look(1_000.0) is None  # whoever looks for its name has a bound of their own
    unread.admit()
    assert told == [True]
    assert unread.look(2_000.0) == MESSAGE_TIMEOUT_S


def test_a_client_is_read_up_to_a_bound_where_nobody_counts() -> None:
    assert MOST_BYTES < read_until_stopped(unread_of_a_client()) <= MOST_BYTES + 2 * READ_BYTES


def test_empty_fragments_are_not_nothing() -> None:
    unread, frames = unread_of_a_client(), 0
    while unread.may_read:
        for _ in range(READ_BYTES // 6):
            unread.frame(0)
        unread.read(READ_BYTES)
        frames += READ_BYTES // 6
    assert 16 * frames < MOST_BYTES  # an entry of a list takes 8 bytes


def test_many_that_do_not_end_what_they_say_take_no_more_than_there_is() -> None:
    budget = Budget(2 * LIMIT_BYTES, most_calls=100)
    clients = [unread_of_a_client() for _ in range(50)]
    for client in clients:
        with budget.account() as account:
            client.count_for(account.part())
    for _ in range(4_000):
        for client in clients:
            read_until_stopped(client, most=1)
    assert budget.held_bytes <= 50 * (FREE_BYTES + READ_BYTES)
    assert budget.held_bytes > LIMIT_BYTES
    for client in clients:
        client.closed()
    assert budget.held_bytes == 0


def test_what_a_call_keeps_and_what_it_has_not_read_have_one_share() -> None:
    budget = Budget(2 * LIMIT_BYTES, most_calls=4)
    greedy = budget.account().__enter__()
    greedy.change(LIMIT_BYTES)
    with budget.account() as account:
        client = unread_of_a_client()
        client.count_for(account.part())
        account.change(budget.share_bytes // 2)
        assert read_until_stopped(client) <= budget.share_bytes // 2
        client.closed()
    assert budget.held_bytes == greedy.held_bytes


def test_who_is_gone_already_is_counted_for_nobody() -> None:
    budget = Budget(2 * LIMIT_BYTES, most_calls=4)
    unread = unread_of_a_client()
    unread.read(1_000)
    unread.closed()
    with budget.account() as account:
        unread.count_for(account.part())
    assert budget.held_bytes == 0


# --- time -----------------------------------------------------------------------------------------


async def test_a_message_has_its_time_and_no_more() -> None:
    unread = unread_of_a_client()
    assert unread.look(0.0) is None
    unread.read(100)
    assert unread.look(5.0) == MESSAGE_TIMEOUT_S
    for second in range(6, int(5 + MESSAGE_TIMEOUT_S)):
        unread.frame(10)  # fragments that go on and on do not help
        unread.read(16)
        assert unread.look(float(second)) == 5 + MESSAGE_TIMEOUT_S - second
    assert unread.look(5 + MESSAGE_TIMEOUT_S - 1) == 1.0
    assert unread.look(5 + MESSAGE_TIMEOUT_S) is None
    assert await unread.overdue() is Overdue.TOO_SLOW


def test_a_message_that_ends_leaves_the_next_one_all_its_time() -> None:
    unread = unread_of_a_client()
    unread.read(100)
    unread.look(0.0)
    unread.frame(100)
    unread.message(kept=True)
    unread.read(10)
    unread.read(50)  # of the next one
    assert unread.look(1_000.0) is None  # whoever serves it does not take the first one
    unread.taken()
    assert unread.look(1_000.0) == MESSAGE_TIMEOUT_S


def test_pings_between_messages_are_no_message() -> None:
    unread = unread_of_a_client()
    unread.other_frame()
    unread.read(600)
    assert unread.look(100.0) is None


async def test_room_is_waited_for_and_not_for_ever() -> None:
    budget = Budget(2 * LIMIT_BYTES, most_calls=100)
    with budget.account() as full:
        full.change(LIMIT_BYTES)
        unread = unread_of_a_client()
        unread.count_for(budget.account().__enter__())
        read_until_stopped(unread)
        assert unread.look(0.0) == LOOK_EVERY_S
        full.change(-LIMIT_BYTES)
        assert unread.may_read
        assert unread.look(5.0) == MESSAGE_TIMEOUT_S - 5.0
        full.change(LIMIT_BYTES)
        assert unread.look(6.0) == LOOK_EVERY_S
        assert unread.look(6.0 + ROOM_TIMEOUT_S) is None
    assert await unread.overdue() is Overdue.NO_ROOM


# --- sums -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("frame"), st.integers(0, 5_000)),
            st.tuples(st.sampled_from(["message", "drop", "ping", "take"]), st.just(0)),
            st.tuples(st.just("read"), st.integers(1, READ_BYTES)),
        )
    )
)
def test_what_is_counted_is_never_less_than_what_frames_brought(
    steps: list[tuple[str, int]],
) -> None:
    budget = Budget(2 * LIMIT_BYTES, most_calls=10)
    with budget.account() as account:
        unread = unread_of_a_client()
        unread.count_for(account.part())
        part, whole = 0, list[int]()
        for step, size in steps:
            match step:
                case "frame":
                    unread.frame(size)
                    part += size
                case "message" | "drop":
                    unread.message(kept=step == "message")
                    whole += [part] if step == "message" else []
                    part = 0
                case "ping":
                    unread.other_frame()
                case "take" if whole:
                    unread.taken()
                    whole.pop(0)
                case _:
                    pass
            unread.read(size if step == "read" else 1)
            assert budget.held_bytes >= part + sum(whole)
        unread.closed()
    assert budget.held_bytes == 0
