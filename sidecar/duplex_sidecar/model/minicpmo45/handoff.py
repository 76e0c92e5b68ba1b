"""Which of a unit's tokens the Talker speaks, and their hidden rows (contract section D).

A row is named by (unit, token index): row k of a unit is the hidden state after feeding token k.
Nothing here looks a row up by the value of its token.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from duplex_sidecar.model.minicpmo45.talker import BUDGETS, Budget, UnitKind, unit_kind
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary


class HandoffFault(StrEnum):
    """Why a segment cannot be handed over."""

    MISSING_HIDDEN_ROWS = "missing_hidden_rows"
    LEDGER_MISMATCH = "ledger_mismatch"


class HandoffError(Exception):
    """A segment lacks hidden rows; `fault` says how. The state was not changed."""

    def __init__(self, fault: HandoffFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class HandoffState(msgspec.Struct, frozen=True):
    """What the hand-off remembers between units.

    turn: number of the present (or next) turn; a handed over turn_eos ends it. started: something
    of this turn was handed over. condition_seq: number of the next condition.
    """

    turn: int
    started: bool
    condition_seq: int


class Handoff(msgspec.Struct, frozen=True):
    """One condition for the Talker.

    ids: tokens to speak; turn_eos, when it is there, is the last. row_indices: for each of them the
    index of its hidden row in the unit's answer. text: what `ids` say. turn_start: the Talker's
    prompt begins anew. segment_end: a chunk end closes the segment. kind: decides the budget.
    """

    turn: int
    condition_seq: int
    ids: tuple[int, ...]
    row_indices: tuple[int, ...]
    text: str
    turn_start: bool
    segment_end: bool
    turn_end: bool
    kind: UnitKind

    @property
    def budget(self) -> Budget:
        """Codes that the Talker may produce for it."""
        return BUDGETS[self.kind]

    @property
    def condition_len(self) -> int:
        """Talker positions of the condition: one per token and the closing audio_bos."""
        return len(self.ids) + 1


class Selection(NamedTuple):
    """Outcome of one unit.

    handoff: None when the Talker has nothing to say. state: for the next unit. turn_ended: the turn
    ended in this unit. Without a handoff (the turn_eos was the unit's first decision, which is not
    spoken) stage 2 then still has to be told: produce a last chunk without codes.
    """

    handoff: Handoff | None
    state: HandoffState
    turn_ended: bool


class Segment(NamedTuple):
    """Half-open range of token indices to hand over; `end` is at the boundary token if any."""

    start: int
    end: int


INITIAL_HANDOFF_STATE = HandoffState(turn=0, started=False, condition_seq=0)


def next_turn(state: HandoffState) -> HandoffState:
    """State after a turn was cut short (barge-in, truncation): the next segment starts a turn."""
    return HandoffState(state.turn + 1, started=False, condition_seq=state.condition_seq)


def find_segment(
    ids: Sequence[int], final_prompt_token: int, vocabulary: Vocabulary
) -> Segment | None:
    """The tokens of a unit's answer that are to be spoken, None when there are none.

    ids: emitted ids of the unit, from its first decision on. final_prompt_token: id at the last
    prompt position before them.
    """
    boundaries = _boundaries(vocabulary)
    first = leading_listens(ids, vocabulary)
    if first == len(ids):
        return None
    start = _last_index(ids, vocabulary.tts_bos) + 1
    if start == 0:
        if final_prompt_token == vocabulary.tts_bos:
            start = first
        elif ids[first] in boundaries:
            return None
        else:
            start = first + 1
    end = start
    while end < len(ids) and ids[end] not in boundaries:
        end += 1
        if ids[end - 1] == vocabulary.turn_eos:
            break
    return Segment(start, end) if end > start else None


def select(
    state: HandoffState,
    emitted_ids: Sequence[int],
    final_prompt_token: int,
    vocabulary: Vocabulary,
    fed_tokens: int | None = None,
) -> Selection:
    """Select what one unit hands to the Talker.

    emitted_ids: the unit's answer, terminator last. fed_tokens: how many of them were fed, that is
    the number of hidden rows; None for all but the last, as the Thinker answers.
    Raises `HandoffError` when a token of the segment has no row.
    """
    segment = find_segment(emitted_ids, final_prompt_token, vocabulary)
    if segment is None:
        ends = state.started and vocabulary.turn_eos in emitted_ids
        return Selection(None, next_turn(state) if ends else state, ends)
    rows = len(emitted_ids) - 1 if fed_tokens is None else fed_tokens
    if segment.end > rows:
        raise HandoffError(HandoffFault.MISSING_HIDDEN_ROWS)
    ids = tuple(emitted_ids[segment.start : segment.end])
    turn_end = ids[-1] == vocabulary.turn_eos
    turn_start = not state.started
    handoff = Handoff(
        turn=state.turn,
        condition_seq=state.condition_seq,
        ids=ids,
        row_indices=tuple(range(segment.start, segment.end)),
        text=vocabulary.text(ids),
        turn_start=turn_start,
        segment_end=not turn_end and _ends_chunk(emitted_ids, segment.end, vocabulary),
        turn_end=turn_end,
        kind=unit_kind(turn_start=turn_start, turn_end=turn_end),
    )
    after = HandoffState(
        turn=state.turn + 1 if turn_end else state.turn,
        started=not turn_end,
        condition_seq=state.condition_seq + 1,
    )
    return Selection(handoff, after, turn_end)


def leading_listens(ids: Sequence[int], vocabulary: Vocabulary) -> int:
    """Number of listens at the start: they may already be folded into the prompt."""
    count = 0
    while count < len(ids) and ids[count] == vocabulary.listen:
        count += 1
    return count


def _ends_chunk(ids: Sequence[int], index: int, vocabulary: Vocabulary) -> bool:
    return index < len(ids) and ids[index] in (vocabulary.chunk_eos, vocabulary.chunk_tts_eos)


def _boundaries(vocabulary: Vocabulary) -> frozenset[int]:
    return vocabulary.terminators | {
        vocabulary.tts_eos,
        vocabulary.tts_pad,
        vocabulary.unit,
        vocabulary.unit_end,
    }


def _last_index(ids: Sequence[int], wanted: int) -> int:
    for index in range(len(ids) - 1, -1, -1):
        if ids[index] == wanted:
            return index
    return -1
