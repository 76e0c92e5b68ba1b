"""What a call keeps besides its input is in its account by what it takes, and leaves it: numbered
commands and heartbeats until they are answered, the format in force until there is another."""

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_gateway.budget import Budget
from duplex_gateway.held import HeldLimits, Room
from duplex_gateway.resume import KEPT_COMMANDS, ResumeState
from duplex_gateway.wire import MAX_COMMAND_BYTES, Facts, Kind, read_client_message

pytestmark = pytest.mark.unit

FOREIGN = "\U0001f600"
FACTS = Facts(input_rate_hz=16_000)


def message(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind} | fields, ensure_ascii=False).encode()


def heartbeat(event_id: str = FOREIGN * 512) -> bytes:
    return message("session.heartbeat", event_id=event_id)


def command(number: int, more: str = "", event_id: str | None = None) -> bytes:
    return message("response.cancel", client_sequence=number, event_id=event_id, more=more)


def large_command(number: int) -> bytes:
    bare = len(command(number, event_id=FOREIGN * 512))
    return command(number, FOREIGN * ((MAX_COMMAND_BYTES - bare) // 4), FOREIGN * 512)


def update(more: str = FOREIGN * 15_000, **fields: Any) -> bytes:
    wanted = {"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcm"}}}}
    return message("session.update", session=wanted, more=more, **fields)


@contextlib.contextmanager
def called(budget: Budget) -> Generator[ResumeState]:
    """A call that has an owner."""
    with budget.account() as account:
        state = ResumeState(None, HeldLimits(), account)
        state.connect(1, FACTS)
        yield state


def say(state: ResumeState, *said: bytes) -> None:
    for each in said:
        assert state.take(read_client_message(each)) == []


def names(state: ResumeState) -> list[str | None]:
    """Of everything that is sent now, which is nothing in the account's eyes after it."""
    found: list[str | None] = []
    while (sent := state.next_message()) is not None:
        found.append(json.loads(sent).get("event_id"))
    return found


def kept_heartbeats(state: ResumeState) -> None:
    for _ in range(HeldLimits().heartbeats):
        say(state, heartbeat())
    names(state)


def kept_commands(state: ResumeState) -> None:
    say(state, *map(large_command, range(1, KEPT_COMMANDS + 1)))
    names(state)


def kept_format(state: ResumeState) -> None:
    say(state, update())
    names(state)
    state.hear(message("session.updated"))


KEPT = pytest.mark.parametrize("keep", [kept_heartbeats, kept_commands, kept_format])


@KEPT
def test_what_is_kept_aside_counts_as_what_it_takes(keep: Callable[[ResumeState], None]) -> None:
    budget = Budget(2**30, most_calls=1)
    with called(budget) as state:
        say(state, heartbeat(), command(1))  # whatever is made once
        names(state)
        for each in (message("session.heartbeat_ack"), applied(1)):
            state.hear(each)
        assert budget.held_bytes == 0
        gc.collect()
        tracemalloc.start()
        try:
            keep(state)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert state.held_bytes == 0, "none of it is input that is not durable"
        assert 0.9 * taken - 10_000 < budget.held_bytes < 1.2 * taken
    assert budget.held_bytes == 0


@KEPT
def test_a_call_that_is_cut_in_the_middle_gives_back_what_it_kept_aside(
    keep: Callable[[ResumeState], None],
) -> None:
    budget = Budget(2**30, most_calls=1)
    with contextlib.suppress(RuntimeError), called(budget) as state:
        keep(state)
        say(state, heartbeat(), large_command(1_000), update())
        assert budget.held_bytes > 0
        raise RuntimeError("cut")
    assert budget.held_bytes == 0


@KEPT
def test_what_is_kept_aside_leaves_no_room_beyond_the_budget(
    keep: Callable[[ResumeState], None],
) -> None:
    budget = Budget(100_000, most_calls=1_000)
    with called(budget) as state:
        keep(state)  # without asking
        assert state.room(memory_bytes=1) is Room.NONE
        assert not state.takes_heartbeat(1)


def applied(number: int) -> bytes:
    return message("session.command_applied", duplex={"client_sequence": number})


def refused(name: str | None) -> bytes:
    return message("error", error={"code": "response_cancel_not_active", "event_id": name})


def test_each_answer_gives_back_what_it_answers() -> None:
    budget = Budget(2**30, most_calls=1)
    with called(budget) as state:
        kept_heartbeats(state)
        for _ in range(HeldLimits().heartbeats):
            before = budget.held_bytes
            state.hear(message("session.heartbeat_ack"))
            assert budget.held_bytes < before
        assert budget.held_bytes == 0
        state.hear(message("session.heartbeat_ack"))  # that nobody asked for
        say(state, large_command(1), large_command(2), large_command(2))
        sent = names(state)
        state.hear(applied(1))
        state.hear(applied(1))
        state.hear(refused(sent[2]))
        assert budget.held_bytes == 0


def test_heartbeats_of_an_owner_that_is_lost_are_answered_and_given_back() -> None:
    budget = Budget(2**30, most_calls=1)
    with called(budget) as state:
        kept_heartbeats(state)
        say(state, heartbeat("unsent"))
        acks = [json.loads(ack)["client_event_id"] for ack in state.lose()]
        assert acks == [FOREIGN * 512] * HeldLimits().heartbeats + ["unsent"]
        assert budget.held_bytes == 0


def test_the_format_in_force_gives_way_to_the_next_one() -> None:
    budget = Budget(2**30, most_calls=1)
    with called(budget) as state:
        kept_format(state)
        large = budget.held_bytes
        assert large > 60_000
        say(state, update("x"))
        names(state)
        assert budget.held_bytes > large
        state.hear(message("session.updated"))
        assert 0 < budget.held_bytes < 2_000
        state.lose()
        state.connect(2, FACTS)
        assert (len(names(state)), budget.held_bytes < 2_000) == (1, True)


def test_a_command_that_gives_way_to_newer_ones_is_given_back_and_not_said_again() -> None:
    budget = Budget(2**30, most_calls=1)
    with called(budget) as state:
        kept_commands(state)
        full = budget.held_bytes
        state.lose()
        say(state, command(500), message("session.update", session={}, client_sequence=1))
        state.connect(2, FACTS)
        sent: list[int] = []
        while (each := state.next_message()) is not None:
            sent.append(json.loads(each)["client_sequence"])
        assert sent == [1, 500, 1, *range(2, KEPT_COMMANDS + 1)]
        assert budget.held_bytes < full


def test_a_command_is_kept_by_its_bytes() -> None:
    """Not by its characters: of some of them there are four bytes."""
    long = read_client_message(command(1, FOREIGN * (MAX_COMMAND_BYTES // 4)))
    assert long.kind is Kind.OTHER
    assert read_client_message(large_command(1)).kind is Kind.COMMAND


STEPS = st.one_of(
    st.tuples(st.just("say"), st.just("heartbeat"), st.integers(0, 512)),
    st.tuples(st.just("say"), st.just("command"), st.integers(1, 5)),
    st.tuples(st.just("say"), st.just("format"), st.integers(0, 500)),
    st.tuples(st.just("say"), st.just("sound"), st.integers(0, 9)),
    st.tuples(st.just("send"), st.none(), st.integers(1, 5)),
    st.tuples(st.just("hear"), st.sampled_from(["ack", "updated", "durable"]), st.integers(0, 9)),
    st.tuples(st.just("hear"), st.sampled_from(["applied", "refused"]), st.integers(1, 5)),
    st.tuples(st.just("move"), st.booleans(), st.integers(0, 9)),
)


@given(st.lists(STEPS, max_size=80))
def test_in_whatever_order_things_happen_nothing_is_lost_or_given_back_twice(
    steps: list[tuple[str, Any, int]],
) -> None:
    budget = Budget(2**30, most_calls=1)
    fence = 1
    sent: list[str | None] = [None]
    with called(budget) as state:
        for step, what, size in steps:
            match step, what:
                case "say", "heartbeat":
                    state.take(read_client_message(heartbeat(FOREIGN * size)))
                case "say", "command":
                    state.take(read_client_message(command(size, FOREIGN * size)))
                case "say", "format":
                    state.take(read_client_message(update(FOREIGN * size)))
                case "say", _:
                    audio = "AAAA" * size
                    state.take(
                        read_client_message(message("input_audio_buffer.append", audio=audio))
                    )
                case "send", _:
                    for _ in range(size):
                        if (each := state.next_message()) is not None:
                            sent.append(json.loads(each).get("event_id"))
                case "hear", kind:
                    state.hear(
                        {
                            "ack": message("session.heartbeat_ack"),
                            "updated": message("session.updated"),
                            "durable": message(
                                "input_audio_buffer.committed", duplex={"to_sample": 3 * size}
                            ),
                            "applied": applied(size),
                            "refused": refused(sent[-min(size, len(sent))]),
                        }[kind]
                    )
                case _, another:
                    state.lose()
                    fence += another
                    state.connect(fence, FACTS)
            assert budget.held_bytes == state.account.held_bytes >= 0
        settle(state, fence)
        base = state._input._base
        assert budget.held_bytes == (0 if base is None else base.memory_bytes)
    assert budget.held_bytes == 0


def settle(state: ResumeState, fence: int) -> None:
    """A last owner answers everything."""
    state.lose()
    state.connect(fence + 1, FACTS)
    names(state)
    for _ in range(100):
        state.hear(message("session.updated"))
        state.hear(message("session.heartbeat_ack"))
    for number in range(1, 6):
        state.hear(applied(number))
    state.hear(message("input_audio_buffer.committed", duplex={"to_sample": 10_000}))
