"""The rules about a client's commands, on a right history with commands in it and on wrong ones."""

import pytest
from msgspec import structs
from support.made_history import made_history

from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.commands import facts_of
from duplex_sidecar.history.frames import facts_of_message
from duplex_sidecar.history.observations import (
    ChainWrite,
    ClientWrite,
    Command,
    Frame,
    Observation,
    Playback,
)
from duplex_sidecar.history.verdict import Rule

pytestmark = pytest.mark.unit

SOUND_NS = 28_000_000
"""Until then two units of the made history, of 600 samples each, have sounded."""
LAST_NS = 60_000_000


def written(write: ClientWrite, *, at_ns: int = LAST_NS) -> Command:
    """A confirmed write of what a client said, by the last owner of the made history."""
    last = [one for one in made_history() if isinstance(one, Command) and one.name == "renew"]
    before = last[-1] if last else _any_command()
    return structs.replace(
        before,
        number=before.number + at_ns,
        name="client",
        operation=None,
        write=write,
        arguments=(),
        reply=("ok",),
        seen_ns=at_ns - 2,
        executed_ns=at_ns,
        replied_ns=at_ns,
    )


def _any_command() -> Command:
    journals = [one for one in made_history() if isinstance(one, Command) and one.name == "journal"]
    return journals[-1]


def told(at_ns: int, **said: object) -> Frame:
    frames = [one for one in made_history() if isinstance(one, Frame) and one.down]
    plain = structs.replace(
        frames[-1], event=None, acknowledged=None, opened=None, oldest=None, problem=None
    )
    return structs.replace(plain, at_ns=at_ns, **said)


def rules_of(*more: Observation) -> set[Rule]:
    return set(check_history([*made_history(), *more]).rules)


def test_a_right_history_with_commands_holds() -> None:
    assert (
        rules_of(
            written(ClientWrite(3, Playback(1, 1_200), through_event=4)),
            written(ClientWrite(None, Playback(1, 2_400), through_event=8), at_ns=LAST_NS + 5),
            told(LAST_NS + 6, type="session.command_applied", applied=3),
            told(LAST_NS + 7, type="playback.acknowledged", played=Playback(1, 2_400)),
        )
        == set()
    )


def test_a_command_that_is_applied_again() -> None:
    first = ClientWrite(3, Playback(1, 600), 0)
    again = ClientWrite(3, Playback(1, 1_200), 0)
    assert rules_of(written(first), written(again, at_ns=LAST_NS + 5)) == {
        Rule.COMMAND_APPLIED_TWICE
    }
    assert rules_of(written(first), written(first, at_ns=LAST_NS + 5)) == set()


def test_a_command_that_is_said_to_be_applied_too_early() -> None:
    write = written(ClientWrite(3, None, 0))
    early = told(LAST_NS - 1, type="session.command_applied", applied=3)
    assert rules_of(write, early) == {Rule.COMMAND_BEFORE_DURABLE}
    assert rules_of(write, structs.replace(early, at_ns=LAST_NS)) == set()


@pytest.mark.parametrize(("samples", "at_ns"), [(2_401, LAST_NS), (1_201, SOUND_NS)])
def test_more_is_played_than_has_sounded(samples: int, at_ns: int) -> None:
    write = written(ClientWrite(None, Playback(1, samples), 0), at_ns=at_ns)
    assert rules_of(write) == {Rule.PLAYED_BEYOND_COMMITTED}
    frame = told(at_ns, type="playback.acknowledged", played=Playback(1, samples))
    assert rules_of(frame) == {Rule.PLAYED_BEYOND_COMMITTED}
    other_turn = told(at_ns, type="playback.acknowledged", played=Playback(2, 1))
    assert rules_of(other_turn) == {Rule.PLAYED_BEYOND_COMMITTED}


def test_what_was_not_played_leaves_the_journal() -> None:
    write = ClientWrite(None, Playback(1, 1_199), through_event=4)
    assert rules_of(written(write)) == {Rule.TRIMMED_UNPLAYED}


def test_a_cut_and_what_a_client_said_are_read_from_their_scripts() -> None:
    record = b'{"kind":"cancelled","seq":7,"prev_hash":"p"}'
    arguments = (b"1", b"n", b"op", b"p", b"7", b"h", record, b"", b"", b"2:ab 5:cd", b"9")
    words = (b"EVALSHA", b"sha", b"1", b"duplex:{s}:meta", *arguments)
    write = facts_of(words, "cut").write
    assert isinstance(write, ChainWrite)
    assert (write.entry, write.seq, write.client_sequence) == ("cancelled", 7, 5)
    assert write.journaled is not None
    assert (write.journaled.unit, write.journaled.first_sequence) == (7, 9)
    said = (b"1", b"n", b"", b"4", b"24000", b"11")
    facts = facts_of((b"EVALSHA", b"sha", b"1", b"duplex:{s}:meta", *said), "client")
    assert facts.write == ClientWrite(None, Playback(4, 24_000), 11)
    assert facts.fence == 1


def test_answers_to_commands_are_read_from_messages() -> None:
    applied = facts_of_message(b'{"type":"session.command_applied","duplex":{"client_sequence":4}}')
    assert applied.applied == 4
    played = facts_of_message(
        b'{"type":"playback.acknowledged","item_id":"item_a_b_3","duplex":{"played_samples":9}}'
    )
    assert played.played == Playback(3, 9)
