"""Decode policy of one unit (contract section C): which token comes next, and what it changes.

The policy is a function of (`UnitRules`, ids of the unit so far). Rules are made by the session
from its `PolicyState`, travel with the append as msgpack, and say everything; whoever samples keeps
nothing across units. After the answer the session calls `advance` to get the next `PolicyState`.

`next_step` holds the steps before sampling, `emit` those after it; the tensor work in between
(steps 3 to 6) is `sampling.choose`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

MAX_UNIT_TOKENS = 20
"""Tokens of a unit, the terminator included; a request limit can only lower it."""
PENALTY_WINDOW_TOKENS = 512
REPETITION_PENALTY = 1.05
MAX_UNIT_CHARACTERS = 28
"""A token that brings the unit's text to this length is replaced by chunk_eos (step 7)."""
MAX_SEED_CHARACTERS = 256
MAX_FORCED_TOKENS = 64


class PolicyState(msgspec.Struct, frozen=True):
    """What the policy remembers between units.

    penalty_ids: the last sampled ids of the session, oldest first, at most
    `PENALTY_WINDOW_TOKENS`. turn_ended: the model's turn is over (also before its first).
    response_open: a reply was announced by tts_bos, or opened by seeded text, and nothing was said
    yet. speech_pending: the user spoke and the model has not answered to it. pending_terminator:
    last token of the last unit, None when the unit ended without one; the next append feeds it.
    """

    penalty_ids: tuple[int, ...]
    turn_ended: bool
    response_open: bool
    speech_pending: bool
    pending_terminator: int | None


class Sampling(msgspec.Struct, frozen=True):
    """How step 6 samples. top_k 0 means all ids. Temperature 0 makes step 6, not step 3, greedy."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError("temperature must be between 0 and 100")
        if self.top_k < 0:
            raise ValueError("top_k must be 0 (all ids) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError("top_p must be above 0 and at most 1")


SESSION_SAMPLING = Sampling(greedy=False, temperature=0.7, top_k=20, top_p=0.8)
GREEDY_SAMPLING = Sampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0)


class UnitRules(msgspec.Struct, frozen=True):
    """Everything that decides the tokens of one unit, apart from the logits.

    policy: state before the unit. is_speech, force_listen: flags of the append (force_listen as
    framing sends it to the model). max_tokens: limit of the request, None for none.
    seed: names the unit's random draws, for example "<session>:<unit>".
    forced_ids: a committed unit that is run again emits exactly these, terminator included.
    bench_script: same effect, for measurements with random weights; stages refuse it otherwise.
    """

    policy: PolicyState
    is_speech: bool
    force_listen: bool
    max_tokens: int | None
    sampling: Sampling
    seed: str
    forced_ids: tuple[int, ...] = ()
    bench_script: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_tokens must be 1 or more")
        if len(self.seed) > MAX_SEED_CHARACTERS:
            raise ValueError(f"seed is longer than {MAX_SEED_CHARACTERS} characters")
        if len(self.policy.penalty_ids) > PENALTY_WINDOW_TOKENS:
            raise ValueError(f"more than {PENALTY_WINDOW_TOKENS} penalty ids")
        if self.forced_ids and self.bench_script:
            raise ValueError("forced_ids and bench_script exclude each other")
        if len(self.scripted_ids) > MAX_FORCED_TOKENS:
            raise ValueError(f"more than {MAX_FORCED_TOKENS} forced ids")

    @property
    def scripted_ids(self) -> tuple[int, ...]:
        """Ids to emit without sampling."""
        return self.forced_ids or self.bench_script

    @property
    def token_limit(self) -> int:
        """Tokens that the engine may generate for this unit (its max_tokens)."""
        if self.scripted_ids:
            return len(self.scripted_ids)
        if self.max_tokens is None:
            return MAX_UNIT_TOKENS
        return min(MAX_UNIT_TOKENS, self.max_tokens)


_rules_decoder = msgspec.msgpack.Decoder(UnitRules)


def encode_rules(rules: UnitRules) -> bytes:
    """Rules as msgpack, the form in which they travel (`ThinkerFeed.rules`)."""
    return msgspec.msgpack.encode(rules)


def decode_rules(data: bytes, vocabulary: Vocabulary) -> UnitRules:
    """Rules from msgpack. Raises ValueError for a malformed message and for ids not in the
    vocabulary, so that nothing that passed can fail while sampling."""
    rules = _rules_decoder.decode(data)
    for id_ in (*rules.policy.penalty_ids, *rules.scripted_ids):
        if not 0 <= id_ < vocabulary.size:
            raise ValueError(f"id {id_} is not in the vocabulary of {vocabulary.size}")
    return rules


def initial_state(*, seeded_text: bool) -> PolicyState:
    """State of a session before its first append; seeded user text opens a response."""
    return PolicyState(
        penalty_ids=(),
        turn_ended=not seeded_text,
        response_open=seeded_text,
        speech_pending=seeded_text,
        pending_terminator=None,
    )


# --- one token --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A token that has to be sampled.

    penalty_ids: distinct ids to penalise (step 5). turn_open: listen means tts_bos (step 8).
    spoken_ids: ids of the unit after its last turn_eos (step 7). token_index: index in the unit.
    """

    penalty_ids: tuple[int, ...]
    turn_open: bool
    spoken_ids: tuple[int, ...]
    token_index: int


def next_step(
    rules: UnitRules,
    sampled_ids: Sequence[int],
    emitted_ids: Sequence[int],
    vocabulary: Vocabulary,
) -> int | SampledStep:
    """What decides the token after `emitted_ids`: an id needs no logits, a `SampledStep` does.

    sampled_ids and emitted_ids are the unit's tokens so far, of the same length. An id returned
    here is both the sampled and the emitted one.
    """
    index = len(emitted_ids)
    if index < len(rules.scripted_ids):
        return rules.scripted_ids[index]
    if index and emitted_ids[-1] in vocabulary.terminators:
        return emitted_ids[-1]  # asynchronous look-ahead after the unit's end
    if index >= max(1, rules.token_limit - 1):
        return vocabulary.chunk_eos
    state = advance(rules, sampled_ids, emitted_ids, vocabulary)
    if rules.force_listen or (
        not rules.is_speech and state.turn_ended and not state.speech_pending
    ):
        return vocabulary.listen
    return SampledStep(
        penalty_ids=tuple(sorted(set(state.penalty_ids))),
        turn_open=not state.turn_ended,
        spoken_ids=_after_last(vocabulary.turn_eos, emitted_ids),
        token_index=index,
    )


def emit(step: SampledStep, sampled_id: int, vocabulary: Vocabulary) -> int:
    """The emitted id for a sampled one: the text limit (step 7) and the listen rule (step 8)."""
    if sampled_id not in vocabulary.special_ids:
        characters = vocabulary.text_length_characters((*step.spoken_ids, sampled_id))
        return vocabulary.chunk_eos if characters >= MAX_UNIT_CHARACTERS else sampled_id
    if sampled_id == vocabulary.listen and step.turn_open:
        return vocabulary.tts_bos
    return sampled_id


def _after_last(marker: int, ids: Sequence[int]) -> tuple[int, ...]:
    for index in range(len(ids) - 1, -1, -1):
        if ids[index] == marker:
            return tuple(ids[index + 1 :])
    return tuple(ids)


# --- one unit ---------------------------------------------------------------------------------


def advance(
    rules: UnitRules,
    sampled_ids: Sequence[int],
    emitted_ids: Sequence[int],
    vocabulary: Vocabulary,
) -> PolicyState:
    """Policy state after the tokens of a unit, whole or as far as generated.

    Ids after the first terminator (asynchronous look-ahead) change nothing. Raises ValueError when
    the two lists differ in length.
    """
    if len(sampled_ids) != len(emitted_ids):
        raise ValueError(f"{len(sampled_ids)} sampled and {len(emitted_ids)} emitted ids")
    turn_ended = rules.policy.turn_ended
    response_open = rules.policy.response_open
    speech_pending = rules.policy.speech_pending or rules.is_speech
    pending_terminator: int | None = None
    recorded: list[int] = []
    for sampled, emitted in zip(sampled_ids, emitted_ids, strict=True):
        # chunk_eos is masked before sampling, so as a sampled id it comes from step 2 or 3.
        if not rules.force_listen and sampled != vocabulary.chunk_eos:
            recorded.append(sampled)
        if emitted in vocabulary.terminators:
            pending_terminator = emitted
            if rules.force_listen and emitted == vocabulary.listen:
                turn_ended, response_open = True, False
            break
        if emitted == vocabulary.turn_eos:
            turn_ended, response_open = True, False
            continue
        if turn_ended or response_open:
            announced = emitted == vocabulary.tts_bos and speech_pending
            response_open = speech_pending = announced
        turn_ended = False
    return PolicyState(
        penalty_ids=(*rules.policy.penalty_ids, *recorded)[-PENALTY_WINDOW_TOKENS:],
        turn_ended=turn_ended,
        response_open=response_open,
        speech_pending=speech_pending,
        pending_terminator=pending_terminator,
    )


class Decision(StrEnum):
    """What the model did with a unit."""

    LISTEN = "listen"
    SPEAK = "speak"


class AnswerFacts(msgspec.Struct, frozen=True):
    """What the emitted ids of a unit mean.

    content_ids: ids that get KV in their own unit, that is all but the terminator.
    terminator: None when the unit ended at its token limit. turn_end: holds a turn_eos.
    """

    decision: Decision
    content_ids: tuple[int, ...]
    terminator: int | None
    turn_end: bool


def answer_facts(emitted_ids: Sequence[int], vocabulary: Vocabulary) -> AnswerFacts:
    """Facts of a whole unit. Ids after the first terminator are ignored (late look-ahead)."""
    content: list[int] = []
    terminator: int | None = None
    for id_ in emitted_ids:
        if id_ in vocabulary.terminators:
            terminator = id_
            break
        content.append(id_)
    listens = not content and terminator == vocabulary.listen
    return AnswerFacts(
        decision=Decision.LISTEN if listens else Decision.SPEAK,
        content_ids=tuple(content),
        terminator=terminator,
        turn_end=vocabulary.turn_eos in content,
    )
