"""All calls of a gateway together keep no more than it may have, and give back what they kept."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_gateway import client_socket
from duplex_gateway.budget import Account, Budget
from duplex_gateway.client_socket import ClientSocket
from duplex_gateway.ending import Ended
from duplex_gateway.held import HeldLimits, Room
from duplex_gateway.metrics import CallEnd, Metrics
from duplex_gateway.resume import ResumeState
from duplex_gateway.wire import ClientMessage, Facts, read_client_message
from duplex_sidecar.doors.unread import Unread

pytestmark = pytest.mark.unit

MEBI = 1024 * 1024


def frames(size_bytes: int) -> ClientMessage:
    """Hardly any sound, and so many bytes of pictures."""
    event = {
        "type": "input_audio_buffer.append",
        "audio": "AAAA",
        "video_frames": ["x" * size_bytes],
    }
    return read_client_message(json.dumps(event).encode())


def fill(state: ResumeState, said: ClientMessage, most: int = 100) -> Room:
    """Until it gets no more; says why."""
    for _ in range(most):
        room = state.room(memory_bytes=said.memory_bytes)
        if room is not Room.FREE:
            return room
        state.take(said)
    return Room.FREE


def test_thirty_calls_at_their_bounds_do_not_take_what_the_process_has() -> None:
    budget = Budget(64 * MEBI, most_calls=100)
    calls = [ResumeState(None, HeldLimits(), Account(budget)) for _ in range(30)]
    outcomes = [fill(call, frames(MEBI)) for call in calls]
    assert budget.held_bytes <= 32 * MEBI
    assert outcomes[0] is Room.SOON  # its own bound: an owner would make room
    assert set(outcomes[3:]) == {Room.NONE}


def test_a_call_that_keeps_little_goes_on_whatever_the_others_keep() -> None:
    budget = Budget(64 * MEBI, most_calls=100)
    greedy = [ResumeState(None, HeldLimits(), Account(budget)) for _ in range(4)]
    for call in greedy:
        fill(call, frames(MEBI))
    modest = ResumeState(None, HeldLimits(), Account(budget))
    second = frames(64 * 1024)
    assert [modest.room(memory_bytes=second.memory_bytes), fill(modest, second, 4)] == ["free"] * 2
    assert fill(modest, second) is Room.NONE  # its share is used up, too
    assert all(call.room(memory_bytes=MEBI) is not Room.FREE for call in greedy)


def test_what_becomes_durable_makes_room_for_others() -> None:
    budget = Budget(64 * MEBI, most_calls=100)
    first, second = (ResumeState(None, HeldLimits(), Account(budget)) for _ in range(2))
    first.connect(1, Facts(input_rate_hz=16_000))
    said = frames(15 * MEBI)
    for _ in range(2):
        first.take(said)
    assert second.room(memory_bytes=said.memory_bytes) is Room.NONE
    while first.next_message() is not None:
        pass
    facts = {"type": "input_audio_buffer.committed", "duplex": {"to_sample": 2}}
    first.hear(json.dumps(facts).encode())
    assert second.room(memory_bytes=said.memory_bytes) is Room.FREE
    assert budget.held_bytes == 0


def test_a_message_counts_as_what_it_takes() -> None:
    """One foreign character would make a text four times as large: it is kept as bytes."""
    plain, foreign = frames(MEBI), read_client_message(('"' + "x" * MEBI + '\U0001f600"').encode())
    assert MEBI < plain.memory_bytes < 1.1 * MEBI
    assert MEBI < foreign.memory_bytes < 1.1 * MEBI
    named = read_client_message(
        json.dumps({"type": "session.heartbeat", "event_id": "\U0001f600" * 500}).encode()
    )
    assert named.memory_bytes > 12 * 500 + 4 * 500


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["take", "end"]), st.integers(0, 400)),
        max_size=200,
    )
)
def test_the_limit_holds_and_nothing_is_lost_or_given_back_twice(
    steps: list[tuple[int, str, int]],
) -> None:
    budget = Budget(2_000, most_calls=10)
    with contextlib.ExitStack() as everything:
        calls: dict[int, tuple[contextlib.ExitStack, Account]] = {}
        for number, step, size in steps:
            if number not in calls:
                stack = everything.enter_context(contextlib.ExitStack())
                calls[number] = stack, stack.enter_context(budget.account())
            stack, account = calls[number]
            if step == "end":
                stack.close()
                del calls[number]
            elif account.fits(size):
                account.change(size)
            assert 0 <= budget.held_bytes <= 2_000
            assert budget.held_bytes == sum(one.held_bytes for _, one in calls.values())
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    "error", [Ended(CallEnd.CLIENT_LEFT), RuntimeError(), asyncio.CancelledError()]
)
def test_a_call_gives_back_what_it_held_however_it_ends(error: BaseException) -> None:
    budget = Budget(64 * MEBI, most_calls=10)
    with contextlib.suppress(type(error)), budget.account() as account:
        account.change(1_000)
        with account.holding(500):
            assert budget.held_bytes == 1_500
            raise error
    assert budget.held_bytes == 0


def test_the_page_has_what_is_held() -> None:
    budget = Budget(64 * MEBI, most_calls=10)
    metrics = Metrics(lambda: budget.held_bytes)
    Account(budget).change(4_096)
    assert b"duplex_gateway_held_bytes 4096.0" in metrics.page()


class DeafSocket:
    """A client that reads nothing. seen: called with each message."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self._seen = seen

    async def send_text(self, _: str) -> None:
        self._seen()
        await asyncio.Event().wait()


def nothing() -> Unread:
    """That it has said."""
    return Unread(lambda: None)


async def test_what_a_client_has_not_taken_counts_and_is_given_back() -> None:
    budget = Budget(64 * MEBI, most_calls=10)
    account = Account(budget)
    sent = asyncio.Event()
    deaf: Any = DeafSocket(sent.set)
    sending = asyncio.create_task(ClientSocket(deaf, nothing(), account).send(bytes(5_000)))
    await sent.wait()
    assert budget.held_bytes == 5_000
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert budget.held_bytes == 0


async def test_who_does_not_read_is_let_go_of_soon_where_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_socket, "SHORT_SEND_TIMEOUT_S", 0.0)
    budget = Budget(64 * MEBI, most_calls=10)
    Account(budget).change(32 * MEBI)
    deaf: Any = DeafSocket(lambda: None)
    with pytest.raises(Ended) as ended:
        await ClientSocket(deaf, nothing(), Account(budget)).send(bytes(4 * MEBI))
    assert (ended.value.end, ended.value.close_code) == (CallEnd.SLOW_CLIENT, 4008)
    assert budget.held_bytes == 32 * MEBI
