"""Joining slices of audio changes what they cost, never what they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.framing.append import FramerState
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.protocol.commands import (
    AppendInput,
    Command,
    CommitInput,
    Heartbeat,
)
from duplex_sidecar.protocol.errors import ClientError
from duplex_sidecar.session.input import InputDesk
from duplex_sidecar.session.mailbox import MAILBOX_COMMANDS, Mailbox, joined

pytestmark = pytest.mark.unit

RATE_HZ = 16_000


def sound(samples: int, value: int = 1) -> bytes:
    return value.to_bytes(2, "little") * samples


def drained(box: Mailbox) -> list[list[Command]]:
    runs: list[list[Command]] = []
    while run := box.take(2):
        runs.append(run)
    return runs


def test_slices_wait_for_those_that_close_the_unit() -> None:
    box = Mailbox()
    assert [box.put(AppendInput(sound(100)), 600) for _ in range(3)] == [False, False, True]
    (run,) = drained(box)
    assert joined(run) == AppendInput(sound(300))
    assert box.put(AppendInput(sound(100)), 600) is False, "what was taken no longer counts"


@pytest.mark.parametrize("command", [CommitInput(), Heartbeat(), AppendInput(b"", (b"frame",))])
def test_anything_else_is_looked_at_at_once(command: Command) -> None:
    assert Mailbox().put(command, 1_000_000) is True


def test_a_full_mailbox_is_looked_at() -> None:
    box = Mailbox()
    due = [box.put(AppendInput(b""), 10) for _ in range(MAILBOX_COMMANDS)]
    assert due.index(True) == MAILBOX_COMMANDS - 1
    assert box.full
    box.clear()
    assert not box.full
    assert drained(box) == []


@pytest.mark.parametrize(
    "second",
    [
        AppendInput(sound(4), (b"frame",)),
        AppendInput(sound(4), force_listen=True),
        AppendInput(sound(4), is_speech=False),
        AppendInput(sound(4), from_sample=4),
        AppendInput(b"odd"),
        CommitInput(),
    ],
)
def test_what_does_not_only_go_on_stands_alone(second: Command) -> None:
    box = Mailbox()
    box.put(AppendInput(sound(4)), 100)
    box.put(second, 100)
    assert drained(box) == [[AppendInput(sound(4))], [second]]


def test_two_odd_pieces_are_no_even_one() -> None:
    box = Mailbox()
    box.put(AppendInput(b"odd"), 100)
    box.put(AppendInput(b"odd"), 100)
    assert len(drained(box)) == 2


def test_positions_have_to_join() -> None:
    box = Mailbox()
    for position in (0, 4, 9):
        box.put(AppendInput(sound(4), from_sample=position), 100)
    first, second = drained(box)
    assert joined(first) == AppendInput(sound(8), from_sample=0)
    assert second == [AppendInput(sound(4), from_sample=9)]


pieces = st.builds(
    AppendInput,
    audio=st.one_of(
        st.integers(0, 9_000).map(sound),
        st.just(b"odd"),
        st.integers(1, 40).map(lambda n: b"x" * n),
    ),
    from_sample=st.one_of(st.none(), st.integers(0, 40_000)),
    is_speech=st.sampled_from([None, True]),
    force_listen=st.booleans(),
)


@given(st.lists(st.one_of(pieces, st.builds(CommitInput)), max_size=12))
def test_taken_together_or_one_by_one_is_the_same(commands: list[Command]) -> None:
    assert together(commands) == one_by_one(commands)


def together(commands: list[Command]) -> FramerState:
    box, framer = Mailbox(), UnitFramer(0)
    desk = InputDesk(framer, RATE_HZ, 0)
    for command in commands:
        box.put(command, desk.missing_bytes)
    while run := box.take(desk.sample_bytes):
        if refused(desk, joined(run)):
            for command in run:
                refused(desk, command)
    return framer.snapshot()


def one_by_one(commands: list[Command]) -> FramerState:
    framer = UnitFramer(0)
    desk = InputDesk(framer, RATE_HZ, 0)
    for command in commands:
        refused(desk, command)
    return framer.snapshot()


def refused(desk: InputDesk, command: Command) -> bool:
    try:
        if isinstance(command, AppendInput):
            desk.append(command)
        else:
            desk.commit()
    except ClientError:
        return True
    return False
