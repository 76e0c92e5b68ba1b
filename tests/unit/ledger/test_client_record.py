"""Numbers of a client's commands: each counts once, over lost connections, resends and crashes."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplex_sidecar.ledger.client_record import (
    KEPT_COMMANDS,
    AppliedCommand,
    ClientRecord,
    Turnout,
    decode_client_record,
    encode_client_record,
)

pytestmark = pytest.mark.unit


def known(*numbers: int) -> ClientRecord:
    return ClientRecord(tuple(AppliedCommand(number, f"f{number}") for number in numbers))


@pytest.mark.parametrize(
    ("number", "fingerprint", "turnout"),
    [
        (10, "f10", Turnout.NEW),
        (12, "f12", Turnout.NEW),
        (9, "f9", Turnout.AGAIN),
        (6, "f6", Turnout.AGAIN),
        (6, "another", Turnout.OTHER),
        (7, "f7", Turnout.BEHIND),
        (4, "f4", Turnout.FORGOTTEN),
    ],
)
def test_what_becomes_of_a_number(number: int, fingerprint: str, turnout: Turnout) -> None:
    assert known(5, 6, 9).judge(AppliedCommand(number, fingerprint)) is turnout


def test_the_first_number_is_new_and_no_number_is_taken_twice() -> None:
    assert ClientRecord().judge(AppliedCommand(1, "a")) is Turnout.NEW
    assert ClientRecord().last == 0
    with pytest.raises(ValueError, match="after 9"):
        known(5, 9).then(AppliedCommand(9, "f9"))


def test_only_the_last_ones_are_kept_and_read_back() -> None:
    record = ClientRecord()
    for number in range(1, 3 * KEPT_COMMANDS, 2):
        record = record.then(AppliedCommand(number, f"f{number}"))
    assert len(record.applied) == KEPT_COMMANDS
    assert decode_client_record(encode_client_record(record)) == record
    assert decode_client_record("") == ClientRecord()
    assert record.judge(AppliedCommand(1, "f1")) is Turnout.FORGOTTEN


@pytest.mark.parametrize("stored", ["x", "1", ":a", "1:a b:2"])
def test_what_is_no_record_is_refused(stored: str) -> None:
    if stored == "1":
        assert decode_client_record(stored) == ClientRecord((AppliedCommand(1, ""),))
        return
    with pytest.raises(ValueError, match="invalid literal"):
        decode_client_record(stored)


class Conversation(RuleBasedStateMachine):
    """A client and whoever runs its session. Connections and owners are lost at any moment; what is
    written is written whole; the client says again what it has no answer to.

    Commands are additions to a list: one that counts twice, or too late, shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored = ""
        self.effects: list[int] = []
        """With the record, in one write."""
        self.owner = ClientRecord()
        self.number = 0
        self.unanswered: dict[int, bool] = {}
        """By number: whether the session refuses it whenever it hears it."""
        self.on_the_way: list[int] = []
        self.answered: list[int] = []

    def fingerprint(self, number: int) -> str:
        return f"command-{number}"

    @rule(skipped=st.integers(0, 2), refusable=st.booleans())
    def say(self, skipped: int, refusable: bool) -> None:
        self.number += 1 + skipped
        self.unanswered[self.number] = refusable
        self.on_the_way.append(self.number)

    @precondition(lambda self: self.on_the_way)
    @rule(crash=st.sampled_from(["no", "before the write", "after the write"]))
    def hear(self, crash: str) -> None:
        number = self.on_the_way.pop(0)
        command = AppliedCommand(number, self.fingerprint(number))
        turnout = self.owner.judge(command)
        if turnout is Turnout.NEW and not self.unanswered.get(number, False):
            if crash == "before the write":
                self.lose_owner()
                return
            after = self.owner.then(command)
            self.stored = encode_client_record(after)
            self.effects.append(number)
            if crash == "after the write":
                self.lose_owner()
                return
            self.owner = after
        elif turnout is Turnout.AGAIN:
            assert number in self.effects
        elif turnout is Turnout.BEHIND:
            assert number not in self.effects
        if self.unanswered.pop(number, None) is not None:
            self.answered.append(number)

    @rule()
    def lose_connection(self) -> None:
        """What is on its way is lost; the client says it again, in order."""
        self.on_the_way = sorted(self.unanswered)

    @rule()
    def lose_owner(self) -> None:
        self.owner = decode_client_record(self.stored)
        self.lose_connection()

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def say_again_too_early(self, data: st.DataObject) -> None:
        self.on_the_way.append(data.draw(st.sampled_from(sorted(self.unanswered) or [1])))

    @rule()
    def be_told_at_the_greeting(self) -> None:
        """The client lets go of what is applied, on the word of the greeting."""
        for number in [n for n in self.unanswered if n in self.effects and n <= self.owner.last]:
            del self.unanswered[number]

    @invariant()
    def each_counts_once_and_in_order(self) -> None:
        assert self.effects == sorted(set(self.effects))

    @invariant()
    def what_is_written_is_known(self) -> None:
        assert decode_client_record(self.stored).last == max(self.effects, default=0)


TestConversation = Conversation.TestCase
