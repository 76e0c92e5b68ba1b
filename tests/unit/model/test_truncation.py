"""What is left of a reply that was not heard to the end, and what the policy remembers then."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    PolicyState,
    UnitRules,
    advance,
    initial_state,
)
from duplex_sidecar.model.minicpmo45.truncation import (
    Left,
    SaidUnit,
    heard_tokens,
    left_of,
    policy_after_cut,
    turn_over,
)
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary

pytestmark = pytest.mark.unit

CONTROLS = tuple(ControlToken)
V = Vocabulary(
    control_ids={token: id_ for id_, token in enumerate(CONTROLS)},
    special_ids=frozenset(),
    bad_ids=frozenset(),
    token_bytes=(*(t.value.encode() for t in CONTROLS), b"a", b"b", b"c", b"d"),
)
A = len(CONTROLS)
B, C, D = A + 1, A + 2, A + 3
AUDIO = CONTROLS.index(ControlToken.AUDIO)
SPEAK = CONTROLS.index(ControlToken.SPEAK)


@pytest.mark.parametrize(
    ("heard", "kept"),
    [(0, 0), (-500, 0), (249, 0), (250, 2), (500, 3), (999, 4), (1_000, 5), (2_000, 5)],
)
def test_the_share_of_sound_is_the_share_of_tokens(heard: int, kept: int) -> None:
    """The decision to speak is heard with the first of the four spoken ones."""
    ids = (SPEAK, A, B, C, D, V.chunk_eos)
    assert heard_tokens(ids, heard, 1_000, AUDIO, V) == kept


def test_the_end_of_a_turn_is_heard_with_its_last_sample() -> None:
    ids = (SPEAK, A, V.turn_eos, V.listen)
    assert heard_tokens(ids, 999, 1_000, AUDIO, V) == 2
    assert heard_tokens(ids, 1_000, 1_000, AUDIO, V) == 3


def test_a_unit_without_spoken_tokens_is_heard_or_not() -> None:
    ids = (V.turn_eos, V.listen)
    assert heard_tokens(ids, 5, 10, AUDIO, V) == 0
    assert heard_tokens(ids, 10, 10, AUDIO, V) == 1


def test_what_is_left_is_closed_as_the_contract_says() -> None:
    ids = (SPEAK, A, B)
    assert left_of(ids, V.chunk_eos, None, V) == Left(ids, V.chunk_eos)
    assert left_of(ids, V.chunk_tts_eos, 3, V) == Left(ids, V.chunk_tts_eos)
    assert left_of(ids, V.chunk_tts_eos, 2, V) == Left((SPEAK, A), V.chunk_eos)
    assert left_of(ids, V.chunk_eos, 0, V) == Left((), V.listen)
    assert left_of((), V.listen, 0, V) == Left((), V.listen)


def said(seq: int, *ids: int, is_speech: bool = False, force: bool = False) -> SaidUnit:
    return SaidUnit(seq, ids, ids, is_speech, force)


def test_a_reply_of_which_nothing_was_heard_is_still_owed() -> None:
    units = (
        said(1, V.listen),
        said(2, SPEAK, A, V.chunk_eos, is_speech=True),
        said(3, SPEAK, B, V.chunk_eos),
    )
    units = (units[0], *(SaidUnit(*_fields(unit), kept_tokens=0) for unit in units[1:]))
    state = policy_after_cut(units, 2, V)
    assert (state.turn_ended, state.response_open, state.speech_pending) == (True, False, True)
    assert state.penalty_ids == (V.listen,)


def test_of_a_reply_that_was_heard_in_part_the_rest_is_forgotten() -> None:
    first = said(2, SPEAK, A, V.chunk_eos, is_speech=True)
    second = SaidUnit(3, (SPEAK, B, C), (SPEAK, B, V.chunk_eos), False, False, 1)
    state = policy_after_cut((said(1, V.listen), first, second), 2, V)
    assert (state.turn_ended, state.speech_pending) == (True, False)
    assert state.penalty_ids == (V.listen, SPEAK, A, SPEAK)


def test_what_came_after_the_reply_counts_on() -> None:
    cut = SaidUnit(2, (SPEAK, A, V.chunk_eos), (SPEAK, A, V.chunk_eos), True, False, 0)
    after = said(3, SPEAK, C, V.turn_eos, V.listen, is_speech=True)
    state = policy_after_cut((cut, after), 2, V)
    assert (state.turn_ended, state.speech_pending) == (True, False)
    assert state.penalty_ids == (SPEAK, C, V.turn_eos, V.listen)


def test_a_reply_that_was_stopped_is_over() -> None:
    unit = said(1, SPEAK, A, V.chunk_eos, is_speech=True)
    stopped = SaidUnit(*_fields(unit), cancelled=True)
    assert policy_after_cut((stopped,), 1, V).turn_ended
    assert not policy_after_cut((unit,), 1, V).turn_ended
    open_turn = PolicyState(
        (), turn_ended=False, response_open=True, speech_pending=True, pending_terminator=None
    )
    assert turn_over(open_turn) == PolicyState((), True, False, True, None)


def _fields(unit: SaidUnit) -> tuple[int, tuple[int, ...], tuple[int, ...], bool, bool]:
    return unit.seq, unit.sampled_ids, unit.emitted_ids, unit.is_speech, unit.force_listen


content = st.lists(st.sampled_from([SPEAK, A, B, C, V.tts_bos, V.turn_eos]), max_size=6)
answers = st.lists(
    st.tuples(content, st.sampled_from([V.listen, V.chunk_eos]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(answers)
def test_without_a_cut_the_penalty_is_that_of_the_whole_conversation(
    given_: list[tuple[list[int], int, bool, bool]],
) -> None:
    state = initial_state(seeded_text=False)
    units: list[SaidUnit] = []
    for seq, (ids, terminator, is_speech, force) in enumerate(given_, start=1):
        emitted = (V.listen,) if force else (*ids, terminator)
        rules = UnitRules(state, is_speech, force, None, GREEDY_SAMPLING, "")
        state = advance(rules, emitted, emitted, V)
        units.append(SaidUnit(seq, emitted, emitted, is_speech, force))
    after = policy_after_cut(units, 1, V)
    assert after.penalty_ids == state.penalty_ids
