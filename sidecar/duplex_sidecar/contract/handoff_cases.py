"""Runs recorded hand-offs (`handoff_sessions`) through `handoff.select`.

The recorded interface gives cumulative ids and a ledger of forwarded tokens by value; the product
names rows by (unit, token index). `_LedgerView` translates: it finds where the unit stands in the
ledger, and from there on the product's own row indices are compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from duplex_sidecar.contract.types import CaseResult, Comparison
from duplex_sidecar.model.minicpmo45.handoff import (
    Handoff,
    HandoffError,
    HandoffFault,
    HandoffState,
    Segment,
    find_segment,
    leading_listens,
    select,
)
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary


class _Expected(msgspec.Struct):
    outcome: str
    error: str | None = None
    ids: list[int] | None = None
    hidden_rows: list[int] | None = None
    text: str | None = None
    turn_start: bool | None = None
    segment_end: bool | None = None
    turn_end: bool | None = None
    prompt_len: int | None = None
    generation_tokens: int | None = None
    condition_seq: int | None = None
    replace_prompt: bool | None = None
    turn_id_after: int | None = None
    max_codes: int | None = None
    min_codes: int | None = None
    upstream_quirk: str | None = None


class _Output(msgspec.Struct):
    request: int
    turn_id: int
    output_ids: list[int]
    final_prompt_token: int
    ledger_ids: list[int]
    ledger_positions: list[int]
    hidden_rows: int
    expected: _Expected


class HandoffSession(msgspec.Struct):
    id: int | str
    steps: list[_Output]


class _Located(NamedTuple):
    """Where a unit stands in the ledger: its token k is ledger entry `offset + k`."""

    offset: int
    fed_tokens: int


def check_handoff_session(session: HandoffSession, vocabulary: Vocabulary) -> CaseResult:
    """One session of `handoff_sessions`."""
    compare = Comparison(session.id)
    replay = _HandoffReplay(vocabulary)
    for index, output in enumerate(session.steps):
        if output.expected.upstream_quirk is not None:
            compare.skip(len(session.steps) - index)
            break
        got = replay.take(output)
        expected = output.expected
        for name in expected.__struct_fields__:
            if name != "upstream_quirk":
                where = f"output {index} {name}"
                compare.same(where, getattr(expected, name), getattr(got, name))
        if expected.outcome == "error":
            break
    return compare.result()


class _HandoffReplay:
    """Cumulative outputs of requests, cut into units."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._request: int | None = None
        self._seen: list[int] = []
        self._state = HandoffState(turn=0, started=False, condition_seq=0)

    def take(self, output: _Output) -> _Expected:
        if output.request != self._request:
            self._request, self._seen = output.request, []
            self._state = HandoffState(output.turn_id, started=False, condition_seq=0)
        known, ids = len(self._seen), output.output_ids
        continues = ids[:known] == self._seen
        unit = ids[known:] if continues else ids
        self._seen = ids
        if self._state.turn != output.turn_id:
            self._state = _turn_to_start(self._state, output.turn_id)
        state = self._state if continues else _turn_to_start(self._state, output.turn_id)
        try:
            return self._select(state, output, unit)
        except HandoffError as error:
            return _Expected(outcome="error", error=error.fault.value)

    def _select(self, state: HandoffState, output: _Output, unit: list[int]) -> _Expected:
        segment = find_segment(unit, output.final_prompt_token, self._vocabulary)
        located = _Located(0, len(unit)) if segment is None else self._locate(output, unit, segment)
        selection = select(
            state, unit, output.final_prompt_token, self._vocabulary, located.fed_tokens
        )
        if selection.handoff is None:
            # Turn numbers are given from outside here, and a restart counts for its own output.
            return _Expected(outcome="none")
        self._state = selection.state
        return _as_recorded(selection.handoff, located, selection.state)

    def _locate(self, output: _Output, unit: list[int], segment: Segment) -> _Located:
        """The latest contiguous place of the unit: whole, or without an unfed last token that the
        segment does not need. Listens at its start may be folded into the prompt."""
        if len(output.ledger_ids) != output.hidden_rows:
            raise HandoffError(HandoffFault.LEDGER_MISMATCH)
        folded = leading_listens(unit, self._vocabulary)
        ends = [len(unit)]
        if segment.end < len(unit):
            ends.append(len(unit) - 1)
        places = [
            _Located(start - folded, end)
            for end in ends
            if (start := _latest(output, unit[folded:end])) is not None
        ]
        if not places:
            raise HandoffError(HandoffFault.MISSING_HIDDEN_ROWS)
        return max(places)


def _turn_to_start(state: HandoffState, turn: int) -> HandoffState:
    return HandoffState(turn, started=False, condition_seq=state.condition_seq)


def _latest(output: _Output, block: Sequence[int]) -> int | None:
    """Index of the block's latest occurrence at contiguous positions of the ledger."""
    ids, positions = output.ledger_ids, output.ledger_positions
    for start in range(len(ids) - len(block), -1, -1):
        end = start + len(block)
        contiguous = list(range(positions[start], positions[start] + len(block)))
        if ids[start:end] == block and positions[start:end] == contiguous:
            return start
    return None


def _as_recorded(handoff: Handoff, located: _Located, after: HandoffState) -> _Expected:
    return _Expected(
        outcome="handoff",
        ids=list(handoff.ids),
        hidden_rows=[located.offset + index for index in handoff.row_indices],
        text=handoff.text,
        turn_start=handoff.turn_start,
        segment_end=handoff.segment_end,
        turn_end=handoff.turn_end,
        prompt_len=handoff.condition_len,
        generation_tokens=handoff.budget.max_codes,
        condition_seq=handoff.condition_seq,
        replace_prompt=handoff.turn_start,
        turn_id_after=after.turn,
        max_codes=handoff.budget.max_codes,
        min_codes=handoff.budget.min_codes,
    )
