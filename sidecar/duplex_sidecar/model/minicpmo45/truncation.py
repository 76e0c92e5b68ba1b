"""What is left of a reply that its listener did not hear to the end. Pure.

Sound and tokens of a unit have no marks between them: the tokens that were heard are reckoned by
the share of the unit's samples that were played. A unit of which nothing was heard counts as one in
which the model listened; of one that was heard in part the tokens heard stay, closed by chunk_eos.
The reply is over with it. What the decode policy remembers is made anew from the ids that are left,
as if nothing else had ever been said.
"""

from collections.abc import Sequence
from itertools import islice

import msgspec
from msgspec import structs

from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    PENALTY_WINDOW_TOKENS,
    PolicyState,
    UnitRules,
    advance,
    answer_facts,
)
from duplex_sidecar.model.minicpmo45.handoff import find_segment
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary


class SaidUnit(msgspec.Struct, frozen=True):
    """A committed unit: its answer, the flags that it was given under, how many of its content ids
    are left (None: nothing was taken back), and whether the reply was stopped behind it."""

    seq: int
    sampled_ids: tuple[int, ...]
    emitted_ids: tuple[int, ...]
    is_speech: bool
    force_listen: bool
    kept_tokens: int | None = None
    cancelled: bool = False


class Left(msgspec.Struct, frozen=True):
    """What of an answer is rendered: content ids and what closes them. Fields as in
    `window.parts.HistoryUnit`."""

    ids: tuple[int, ...]
    terminator: int | None


def heard_tokens(
    emitted_ids: Sequence[int],
    heard_samples: int,
    unit_samples: int,
    final_prompt_token: int,
    vocabulary: Vocabulary,
) -> int:
    """How many content ids of a unit were heard when `heard_samples` of its sound were played.

    Ids before the spoken ones (the decision to speak) count as heard with the first of those.
    """
    content = answer_facts(emitted_ids, vocabulary).content_ids
    segment = find_segment(emitted_ids, final_prompt_token, vocabulary)
    if heard_samples >= unit_samples:
        return len(content)
    if segment is None or heard_samples <= 0:
        return 0
    heard = (segment.end - segment.start) * heard_samples // unit_samples
    return min(len(content), segment.start + heard) if heard else 0


def left_of(
    content_ids: tuple[int, ...],
    terminator: int | None,
    kept_tokens: int | None,
    vocabulary: Vocabulary,
) -> Left:
    """An answer of which `kept_tokens` content ids are left."""
    if kept_tokens is None or kept_tokens >= len(content_ids):
        return Left(content_ids, terminator)
    if kept_tokens == 0:
        return Left((), vocabulary.listen)
    return Left(content_ids[:kept_tokens], vocabulary.chunk_eos)


def turn_over(policy: PolicyState) -> PolicyState:
    """The reply under way was stopped: as after a listen that the client has forced."""
    return structs.replace(policy, turn_ended=True, response_open=False)


def policy_after_cut(
    said: Sequence[SaidUnit],
    first_of_turn: int,
    vocabulary: Vocabulary,
    *,
    begins_there: bool = True,
) -> PolicyState:
    """The policy's state behind the last of `said`, whose `kept_tokens` say what is left.

    said: oldest first, without a gap, with `PENALTY_WINDOW_TOKENS` tokens in them if there were so
    many. first_of_turn: first known unit of the reply that was cut. begins_there: the reply began
    with it, and so because the user had spoken: the model says nothing unasked.
    """
    state = PolicyState(
        penalty_ids=(),
        turn_ended=begins_there,
        response_open=False,
        speech_pending=begins_there,
        pending_terminator=None,
    )
    for unit in said:
        if unit.seq < first_of_turn:
            continue
        state = _after(structs.replace(state, penalty_ids=()), unit, vocabulary)
        if unit.kept_tokens is not None or unit.cancelled:
            state = turn_over(state)
    return structs.replace(state, penalty_ids=_penalty_ids(said, vocabulary))


def _after(state: PolicyState, unit: SaidUnit, vocabulary: Vocabulary) -> PolicyState:
    """The state after what is left of a unit. One of which nothing is left listened, and was told
    to: no draw of the model's says so."""
    facts = answer_facts(unit.emitted_ids, vocabulary)
    content, kept = facts.content_ids, unit.kept_tokens
    sampled, emitted, force_listen = unit.sampled_ids, unit.emitted_ids, unit.force_listen
    if kept is not None and kept < len(content):
        if kept == 0:
            sampled = emitted = (vocabulary.listen,)
            force_listen = True
        else:
            sampled = (*sampled[:kept], vocabulary.chunk_eos)
            emitted = (*emitted[:kept], vocabulary.chunk_eos)
    rules = UnitRules(
        policy=state,
        is_speech=unit.is_speech,
        force_listen=force_listen,
        max_tokens=None,
        sampling=GREEDY_SAMPLING,
        seed="",
    )
    return advance(rules, sampled, emitted, vocabulary)


def _penalty_ids(said: Sequence[SaidUnit], vocabulary: Vocabulary) -> tuple[int, ...]:
    """The newest sampled ids that are left, oldest first."""
    blank = PolicyState((), True, False, False, None)
    newest_first: list[int] = []
    for unit in reversed(said):
        newest_first += reversed(_after(blank, unit, vocabulary).penalty_ids)
        if len(newest_first) >= PENALTY_WINDOW_TOKENS:
            break
    return tuple(reversed(list(islice(newest_first, PENALTY_WINDOW_TOKENS))))
