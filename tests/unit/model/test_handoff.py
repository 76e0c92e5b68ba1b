from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.model.minicpmo45.handoff import (
    INITIAL_HANDOFF_STATE,
    HandoffError,
    HandoffFault,
    HandoffState,
    next_turn,
    select,
)
from duplex_sidecar.model.minicpmo45.talker import UnitKind
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

pytestmark = pytest.mark.unit

LISTEN, SPEAK, TTS_BOS, TTS_EOS, CHUNK_EOS, TURN_EOS = 2, 3, 4, 5, 7, 9
AUDIO = 1


def test_the_decision_token_is_not_spoken(vocabulary: Vocabulary) -> None:
    selection = select(INITIAL_HANDOFF_STATE, [SPEAK, 10, 11, CHUNK_EOS], AUDIO, vocabulary)
    handoff = selection.handoff
    assert handoff is not None
    assert (handoff.ids, handoff.row_indices) == ((10, 11), (1, 2))
    assert (handoff.text, handoff.kind) == (" one two", UnitKind.START)
    assert (handoff.turn_start, handoff.segment_end, handoff.turn_end) == (True, True, False)
    assert handoff.condition_len == 3
    assert selection.state == HandoffState(turn=0, started=True, condition_seq=1)


def test_a_segment_starts_after_the_last_tts_bos(vocabulary: Vocabulary) -> None:
    ids = [TTS_BOS, 10, TTS_BOS, 11, 12, TTS_EOS, 13, CHUNK_EOS]
    handoff = select(INITIAL_HANDOFF_STATE, ids, AUDIO, vocabulary).handoff
    assert handoff is not None
    assert (handoff.ids, handoff.row_indices) == ((11, 12), (3, 4))
    assert handoff.segment_end is False


def test_after_a_prompt_that_ends_with_tts_bos_everything_is_spoken(vocabulary: Vocabulary) -> None:
    handoff = select(INITIAL_HANDOFF_STATE, [10, 11, CHUNK_EOS], TTS_BOS, vocabulary).handoff
    assert handoff is not None
    assert handoff.row_indices == (0, 1)


def test_turn_eos_is_spoken_and_ends_the_turn(vocabulary: Vocabulary) -> None:
    started = HandoffState(turn=4, started=True, condition_seq=9)
    selection = select(started, [10, 11, TURN_EOS, 12, CHUNK_EOS], AUDIO, vocabulary)
    assert selection.handoff is not None
    assert selection.handoff.ids == (11, TURN_EOS)
    assert selection.handoff.kind is UnitKind.END
    assert selection.handoff.budget.max_codes == 104
    assert selection.turn_ended
    assert selection.state == HandoffState(turn=5, started=False, condition_seq=10)


@pytest.mark.parametrize("ids", [[LISTEN], [CHUNK_EOS], [SPEAK, CHUNK_EOS], [10, LISTEN]])
def test_nothing_to_say_changes_nothing(ids: list[int], vocabulary: Vocabulary) -> None:
    started = HandoffState(turn=1, started=True, condition_seq=3)
    assert select(started, ids, AUDIO, vocabulary) == (None, started, False)


def test_a_turn_end_that_is_not_spoken_is_reported(vocabulary: Vocabulary) -> None:
    started = HandoffState(turn=1, started=True, condition_seq=3)
    selection = select(started, [TURN_EOS, LISTEN], AUDIO, vocabulary)
    assert selection == (None, HandoffState(2, started=False, condition_seq=3), True)
    silent = next_turn(started)
    assert select(silent, [TURN_EOS, LISTEN], AUDIO, vocabulary) == (None, silent, False)


def test_a_token_without_a_hidden_row_is_an_error(vocabulary: Vocabulary) -> None:
    with pytest.raises(HandoffError) as caught:
        select(INITIAL_HANDOFF_STATE, [SPEAK, 10, 11], AUDIO, vocabulary)
    assert caught.value.fault is HandoffFault.MISSING_HIDDEN_ROWS
    assert select(INITIAL_HANDOFF_STATE, [SPEAK, 10, 11], AUDIO, vocabulary, 3).handoff is not None


@given(st.lists(st.tuples(st.lists(st.integers(0, 18), max_size=12), st.booleans()), max_size=12))
def test_conditions_and_turns_are_numbered_without_gaps(
    vocabulary: Vocabulary, units: list[tuple[list[int], bool]]
) -> None:
    state, conditions, turns = INITIAL_HANDOFF_STATE, [], []
    for content, cut_short in units:
        ids = [*(id_ for id_ in content if id_ not in vocabulary.terminators), CHUNK_EOS]
        selection = select(state, ids, AUDIO, vocabulary)
        state = selection.state
        handoff = selection.handoff
        if handoff is not None:
            assert handoff.ids == tuple(ids[row] for row in handoff.row_indices)
            assert max(handoff.row_indices) < len(ids) - 1
            forbidden = {*vocabulary.terminators, TTS_EOS, TTS_BOS, 6, 0, 1}
            assert not forbidden.intersection(handoff.ids)
            assert TURN_EOS not in handoff.ids[:-1]
            assert handoff.turn_end == (handoff.ids[-1] == TURN_EOS) == selection.turn_ended
            conditions.append(handoff.condition_seq)
            turns.append((handoff.turn, handoff.turn_start, handoff.turn_end))
        if cut_short:
            state = next_turn(state)
    assert conditions == list(range(len(conditions)))
    for (turn, _, end), (following, start, _) in pairwise(turns):
        assert start == (following > turn)
        assert following > turn if end else following >= turn
    assert all(start for _, start, _ in turns[:1])
