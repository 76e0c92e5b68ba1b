from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    MAX_UNIT_CHARACTERS,
    MAX_UNIT_TOKENS,
    PENALTY_WINDOW_TOKENS,
    SESSION_SAMPLING,
    AnswerFacts,
    Decision,
    PolicyState,
    SampledStep,
    Sampling,
    UnitRules,
    advance,
    answer_facts,
    decode_rules,
    emit,
    encode_rules,
    initial_state,
    next_step,
)
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

pytestmark = pytest.mark.unit

LISTEN, SPEAK, TTS_BOS, CHUNK_EOS, TURN_EOS = 2, 3, 4, 7, 9
WORD = 10
OPEN_TURN = PolicyState((), False, False, False, None)


def rules(
    policy: PolicyState | None = None,
    *,
    is_speech: bool = True,
    force_listen: bool = False,
    max_tokens: int | None = None,
    forced_ids: tuple[int, ...] = (),
) -> UnitRules:
    state = initial_state(seeded_text=False) if policy is None else policy
    return UnitRules(state, is_speech, force_listen, max_tokens, GREEDY_SAMPLING, "s:1", forced_ids)


def play(
    unit: UnitRules, wanted: Sequence[int], vocabulary: Vocabulary
) -> tuple[list[int], list[int]]:
    """Run a unit whose sampler always wants the next id of `wanted` (the last one again)."""
    sampled: list[int] = []
    emitted: list[int] = []
    while len(emitted) < unit.token_limit:
        step = next_step(unit, sampled, emitted, vocabulary)
        if isinstance(step, SampledStep):
            pick = wanted[min(len(emitted), len(wanted) - 1)]
            sampled.append(pick)
            emitted.append(emit(step, pick, vocabulary))
        else:
            sampled.append(step)
            emitted.append(step)
        if emitted[-1] in vocabulary.terminators:
            break
    return sampled, emitted


def test_silence_before_any_speech_listens(vocabulary: Vocabulary) -> None:
    unit = rules(is_speech=False)
    assert next_step(unit, [], [], vocabulary) == LISTEN
    # A listen forced by silence is remembered, one forced by the payload is not.
    assert advance(unit, [LISTEN], [LISTEN], vocabulary).penalty_ids == (LISTEN,)
    payload = rules(force_listen=True)
    assert next_step(payload, [], [], vocabulary) == LISTEN
    assert advance(payload, [LISTEN], [LISTEN], vocabulary).penalty_ids == ()


def test_after_turn_eos_in_silence_the_next_token_listens(vocabulary: Vocabulary) -> None:
    unit = rules(OPEN_TURN, is_speech=False)
    assert play(unit, [WORD, TURN_EOS, WORD], vocabulary)[1] == [WORD, TURN_EOS, LISTEN]


def test_the_token_limit_goes_before_a_forced_listen(vocabulary: Vocabulary) -> None:
    unit = rules(OPEN_TURN, is_speech=False, max_tokens=3)
    assert play(unit, [WORD, TURN_EOS, WORD], vocabulary)[1] == [WORD, TURN_EOS, CHUNK_EOS]


def test_listen_in_an_open_turn_is_tts_bos(vocabulary: Vocabulary) -> None:
    sampled, emitted = play(rules(OPEN_TURN), [LISTEN, WORD, CHUNK_EOS], vocabulary)
    assert sampled == [LISTEN, WORD, CHUNK_EOS]
    assert emitted == [TTS_BOS, WORD, CHUNK_EOS]
    # The penalty history has what was sampled; chunk_eos never enters it.
    state = advance(rules(OPEN_TURN), sampled, emitted, vocabulary)
    assert state.penalty_ids == (LISTEN, WORD)


def test_the_text_limit_counts_from_the_last_turn_end(vocabulary: Vocabulary) -> None:
    long_word = 16  # 12 characters
    unit = rules(OPEN_TURN)
    sampled, emitted = play(unit, [long_word], vocabulary)
    assert sampled == [long_word] * 3
    assert emitted == [long_word, long_word, CHUNK_EOS]
    assert advance(unit, sampled, emitted, vocabulary).penalty_ids == (long_word,) * 3
    wanted = [long_word, long_word, TURN_EOS, long_word, long_word, long_word]
    assert play(unit, wanted, vocabulary)[1] == [*wanted[:-1], CHUNK_EOS]


def test_one_token_of_exactly_the_limit_is_replaced(vocabulary: Vocabulary) -> None:
    step = SampledStep((), turn_open=True, spoken_ids=(16, 16), token_index=2)
    assert vocabulary.text_length_characters((16, 16, 10)) == MAX_UNIT_CHARACTERS
    assert emit(step, 10, vocabulary) == CHUNK_EOS
    assert emit(step, 13, vocabulary) == 13
    assert emit(step, SPEAK, vocabulary) == SPEAK


def test_a_unit_closes_at_its_limit(vocabulary: Vocabulary) -> None:
    assert play(rules(OPEN_TURN), [SPEAK], vocabulary)[1] == [*[SPEAK] * 19, CHUNK_EOS]
    assert play(rules(OPEN_TURN, max_tokens=30), [SPEAK], vocabulary)[1][-1] == CHUNK_EOS
    assert play(rules(OPEN_TURN, max_tokens=2), [SPEAK], vocabulary)[1] == [SPEAK, CHUNK_EOS]
    unit = rules(OPEN_TURN, max_tokens=1)
    assert play(unit, [SPEAK], vocabulary)[1] == [SPEAK]
    assert advance(unit, [SPEAK], [SPEAK], vocabulary).pending_terminator is None


@pytest.mark.parametrize(
    ("state", "emitted", "pending", "open_"),
    [
        # tts_bos while pending announces the reply, the next token is the reply.
        (PolicyState((), True, False, True, None), [TTS_BOS], True, True),
        (PolicyState((), True, False, True, None), [TTS_BOS, WORD], False, False),
        (PolicyState((), True, False, True, None), [SPEAK], False, False),
        (PolicyState((), False, False, True, None), [SPEAK], True, False),
        (PolicyState((), False, True, True, None), [TURN_EOS], True, False),
        (PolicyState((), False, True, True, None), [CHUNK_EOS], True, True),
    ],
)
def test_speech_stays_pending_until_it_is_answered(
    state: PolicyState, emitted: list[int], pending: bool, open_: bool, vocabulary: Vocabulary
) -> None:
    after = advance(rules(state, is_speech=False), emitted, emitted, vocabulary)
    assert (after.speech_pending, after.response_open) == (pending, open_)


def test_forced_ids_are_emitted_exactly(vocabulary: Vocabulary) -> None:
    committed = (SPEAK, LISTEN, TURN_EOS, 19, WORD, CHUNK_EOS)
    unit = rules(is_speech=False, forced_ids=committed)
    emitted: list[int] = []
    for _ in committed:
        token = next_step(unit, emitted, emitted, vocabulary)
        assert isinstance(token, int)
        emitted.append(token)
    assert tuple(emitted) == committed
    assert unit.token_limit == len(committed)


def test_answer_facts(vocabulary: Vocabulary) -> None:
    listens = AnswerFacts(Decision.LISTEN, (), LISTEN, turn_end=False)
    assert answer_facts([LISTEN, LISTEN], vocabulary) == listens
    said = answer_facts([SPEAK, WORD, TURN_EOS, LISTEN], vocabulary)
    assert said == AnswerFacts(Decision.SPEAK, (SPEAK, WORD, TURN_EOS), LISTEN, turn_end=True)
    assert answer_facts([SPEAK], vocabulary).terminator is None


def test_wrong_rules_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="id 20 is not in the vocabulary"):
        decode_rules(encode_rules(rules(forced_ids=(20,))), vocabulary)
    with pytest.raises(ValueError, match="max_tokens"):
        rules(max_tokens=0)
    with pytest.raises(ValueError, match="exclude each other"):
        UnitRules(OPEN_TURN, True, False, None, GREEDY_SAMPLING, "", (2,), (2,))
    with pytest.raises(ValueError, match="penalty ids"):
        rules(PolicyState((3,) * 513, False, False, False, None))
    with pytest.raises(ValueError, match="top_p"):
        Sampling(False, 1.0, 0, 0.0)
    for broken in (b"", b"\xc1", msgspec.msgpack.encode({"seed": 3})):
        with pytest.raises(ValueError, match=r"."):
            decode_rules(broken, vocabulary)


ids = st.integers(0, 18)
states = st.builds(
    PolicyState,
    st.lists(ids, max_size=40).map(tuple),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.none(),
)
units = st.builds(
    UnitRules,
    states,
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(1, 30),
    st.just(SESSION_SAMPLING),
    st.text(max_size=8),
)


@given(units, st.lists(ids, min_size=1, max_size=20))
@settings(max_examples=150)
def test_every_unit_keeps_the_rules(
    vocabulary: Vocabulary, unit: UnitRules, wanted: list[int]
) -> None:
    assert decode_rules(encode_rules(unit), vocabulary) == unit
    sampled, emitted = play(unit, wanted, vocabulary)
    assert len(emitted) <= unit.token_limit <= MAX_UNIT_TOKENS
    assert not vocabulary.terminators.intersection(emitted[:-1])
    if unit.token_limit > 1:
        assert emitted[-1] in vocabulary.terminators
    if emitted[-1] == LISTEN:
        before = advance(unit, sampled[:-1], emitted[:-1], vocabulary)
        assert before.turn_ended or unit.force_listen
    after_turns = emitted[max((i + 1 for i, t in enumerate(emitted) if t == TURN_EOS), default=0) :]
    assert vocabulary.text_length_characters(after_turns) < MAX_UNIT_CHARACTERS
    state = advance(unit, sampled, emitted, vocabulary)
    assert len(state.penalty_ids) <= PENALTY_WINDOW_TOKENS
    # A late look-ahead step re-emits the terminator and changes nothing.
    if emitted[-1] in vocabulary.terminators:
        late = next_step(unit, sampled, emitted, vocabulary)
        assert late == emitted[-1]
        assert advance(unit, [*sampled, late], [*emitted, late], vocabulary) == state


@given(st.lists(st.tuples(units, st.lists(ids, min_size=1, max_size=20)), max_size=6))
@settings(max_examples=50)
def test_the_penalty_history_is_what_was_sampled(
    vocabulary: Vocabulary, session: list[tuple[UnitRules, list[int]]]
) -> None:
    state, expected = initial_state(seeded_text=False), []
    for unit, wanted in session:
        unit = msgspec.structs.replace(unit, policy=state)
        sampled, emitted = play(unit, wanted, vocabulary)
        if not unit.force_listen:
            expected += [id_ for id_ in sampled if id_ != CHUNK_EOS]
        state = advance(unit, sampled, emitted, vocabulary)
    assert state.penalty_ids == tuple(expected)
