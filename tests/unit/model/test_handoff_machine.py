"""Random sessions of units that are spoken, silent, cut short, done again and taken up elsewhere:
what the Talker is handed is what the contract's words say (section D), and turns have an order."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duplex_sidecar.model.minicpmo45.handoff import (
    INITIAL_HANDOFF_STATE,
    Handoff,
    HandoffError,
    HandoffFault,
    HandoffState,
    next_turn,
    select,
)
from duplex_sidecar.model.minicpmo45.talker import UnitKind
from duplex_sidecar.model.minicpmo45.vocabulary import REQUIRED_TOKENS, Vocabulary

pytestmark = pytest.mark.unit

CONTROL = {token: id_ for id_, token in enumerate(REQUIRED_TOKENS)}
VOCABULARY = Vocabulary(
    control_ids=CONTROL,
    special_ids=frozenset(),
    bad_ids=frozenset(),
    token_bytes=(
        *(token.value.encode() for token in REQUIRED_TOKENS),
        *(f" {word}".encode() for word in ("one", "two", "three", "four")),
    ),
)
WORD = len(CONTROL)
LISTEN, TTS_BOS, TURN_EOS = VOCABULARY.listen, VOCABULARY.tts_bos, VOCABULARY.turn_eos
CHUNK_ENDS = {VOCABULARY.chunk_eos, VOCABULARY.chunk_tts_eos}
BOUNDARIES = {
    *CHUNK_ENDS,
    LISTEN,
    VOCABULARY.tts_eos,
    VOCABULARY.tts_pad,
    VOCABULARY.unit,
    VOCABULARY.unit_end,
}
AUDIO = VOCABULARY.unit
"""Any id that is no tts_bos stands for the prompt's last position."""

answers = st.builds(
    lambda inner, end: (*inner, end),
    st.lists(
        st.integers(WORD, WORD + 3) | st.sampled_from(sorted({*BOUNDARIES, TTS_BOS, TURN_EOS})),
        max_size=8,
    ),
    st.sampled_from((LISTEN, VOCABULARY.chunk_eos, VOCABULARY.chunk_tts_eos)),
)
COUNT_OF_CODES = {UnitKind.START: 26, UnitKind.MID: 26, UnitKind.END: 104}


def spoken(answer: tuple[int, ...], last_of_prompt: int) -> list[int]:
    """Indices of the tokens that are handed over, step by step as section D tells it."""
    rest = [index for index, id_ in enumerate(answer)]
    while rest and answer[rest[0]] == LISTEN:
        rest = rest[1:]
    openings = [index for index, id_ in enumerate(answer) if id_ == TTS_BOS]
    if not rest:
        return []
    if openings:
        rest = [index for index in rest if index > openings[-1]]
    elif last_of_prompt != TTS_BOS:
        if answer[rest[0]] in BOUNDARIES:
            return []
        rest = rest[1:]
    handed: list[int] = []
    for index in rest:
        if answer[index] in BOUNDARIES:
            break
        handed.append(index)
        if answer[index] == TURN_EOS:
            break
    return handed


class HandingOver(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = INITIAL_HANDOFF_STATE
        self.handoffs: list[Handoff] = []
        self.turn = self.conditions = 0
        self.started = False

    @rule(answer=answers, last_of_prompt=st.sampled_from((AUDIO, TTS_BOS)))
    def unit(self, answer: tuple[int, ...], last_of_prompt: int) -> None:
        selection = select(self.state, answer, last_of_prompt, VOCABULARY, len(answer))
        # A unit that is done again, here or elsewhere, is handed over in the same words.
        assert select(self.state, answer, last_of_prompt, VOCABULARY, len(answer)) == selection
        handed = spoken(answer, last_of_prompt)
        if not handed:
            assert selection.handoff is None
            assert selection.turn_ended == (self.started and TURN_EOS in answer)
            if selection.turn_ended:
                self._end_turn()
        else:
            assert selection.handoff is not None
            self._check(selection.handoff, answer, handed)
            ends = answer[handed[-1]] == TURN_EOS
            assert selection.turn_ended == ends
            self.handoffs.append(selection.handoff)
            self.conditions += 1
            self.started = True
            if ends:
                self._end_turn()
        self.state = selection.state

    def _check(self, handoff: Handoff, answer: tuple[int, ...], handed: list[int]) -> None:
        ids = [answer[index] for index in handed]
        assert list(handoff.row_indices) == handed
        assert list(handoff.ids) == ids
        assert handoff.condition_len == len(ids) + 1
        assert handoff.turn == self.turn
        assert handoff.condition_seq == self.conditions
        assert handoff.turn_start != self.started
        assert handoff.turn_end == (ids[-1] == TURN_EOS)
        behind = answer[handed[-1] + 1] if handed[-1] + 1 < len(answer) else None
        assert handoff.segment_end == (not handoff.turn_end and behind in CHUNK_ENDS)
        kind = UnitKind.START if handoff.turn_start else UnitKind.MID
        assert handoff.kind is (UnitKind.END if handoff.turn_end else kind)
        assert handoff.budget.max_codes == COUNT_OF_CODES[handoff.kind]

    def _end_turn(self) -> None:
        self.turn += 1
        self.started = False

    @rule(answer=answers, last_of_prompt=st.sampled_from((AUDIO, TTS_BOS)), data=st.data())
    def unit_whose_rows_are_lost(
        self, answer: tuple[int, ...], last_of_prompt: int, data: st.DataObject
    ) -> None:
        """With too few rows nothing is handed over in part."""
        handed = spoken(answer, last_of_prompt)
        if not handed:
            return
        rows = data.draw(st.integers(0, handed[-1]))
        with pytest.raises(HandoffError) as refused:
            select(self.state, answer, last_of_prompt, VOCABULARY, rows)
        assert refused.value.fault is HandoffFault.MISSING_HIDDEN_ROWS

    @rule()
    def cut_short(self) -> None:
        self.state = next_turn(self.state)
        self._end_turn()

    @rule()
    def go_on_elsewhere(self) -> None:
        packed = msgspec.msgpack.encode(self.state)
        self.state = msgspec.msgpack.decode(packed, type=HandoffState)

    @invariant()
    def the_state_is_what_was_handed_over(self) -> None:
        assert self.state == HandoffState(self.turn, self.started, self.conditions)

    @invariant()
    def every_turn_starts_once_and_ends_at_most_once(self) -> None:
        by_turn: dict[int, list[Handoff]] = {}
        for handoff in self.handoffs:
            by_turn.setdefault(handoff.turn, []).append(handoff)
        assert list(by_turn) == sorted(by_turn)
        for handoffs in by_turn.values():
            assert [h.turn_start for h in handoffs] == [True, *[False] * (len(handoffs) - 1)]
            assert not any(handoff.turn_end for handoff in handoffs[:-1])


TestHandingOver = HandingOver.TestCase
TestHandingOver.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
