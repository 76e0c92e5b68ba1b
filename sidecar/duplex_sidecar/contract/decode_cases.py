"""Runs recorded sequences of the decode policy (`decode_cases`) through `sampling.choose`.

Many sequences advance together, one token a step, so that the batched form itself is checked.
"""

from collections.abc import Iterator
from functools import partial

import msgspec
import torch
from torch import Tensor

from duplex_sidecar.contract.files import RecordedFile
from duplex_sidecar.contract.types import CaseResult, Comparison, guarded, raised
from duplex_sidecar.contract.vocabulary_file import recorded_vocabulary
from duplex_sidecar.model.minicpmo45.decode import (
    PolicyState,
    Sampling,
    UnitRules,
    advance,
    initial_state,
)
from duplex_sidecar.model.minicpmo45.sampling import Choice, UnitRow, choose
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

BATCH_ROWS = 64
UNUSED_DRAW = 0.5
"""For a draw that the record lacks, because its outcome did not matter."""


class _Sampling(msgspec.Struct):
    greedy: bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class _Row(msgspec.Struct):
    fill: float
    set: dict[str, float]


class _LookAhead(msgspec.Struct):
    row: _Row
    emitted: int


class _State(msgspec.Struct):
    turn_ended: bool
    speech_pending: bool
    response_open: bool
    pending_terminator: int | None


class _Unit(msgspec.Struct):
    seq: int
    force_listen: bool
    is_speech: bool
    rows: list[_Row]
    uniforms: list[list[float]]
    emitted: list[int]
    stop: str
    state_after: _State
    lookahead: _LookAhead | None = None
    upstream_quirk: str | None = None


class _Sequence(msgspec.Struct):
    id: int | str
    sampling: _Sampling
    max_tokens: int | None
    seeded_text: bool
    units: list[_Unit]
    penalty_history_after: list[int]


def check_decode_file(file: RecordedFile) -> Iterator[CaseResult]:
    """All sequences of a file, in its order."""
    vocabulary = recorded_vocabulary(file.path)
    first, batch = 1, list[bytes]()
    for line in file.lines():
        batch.append(line)
        if len(batch) == BATCH_ROWS:
            yield from _check_batch(file, first, batch, vocabulary)
            first, batch = first + BATCH_ROWS, []
    yield from _check_batch(file, first, batch, vocabulary)


def _check_batch(
    file: RecordedFile, first: int, lines: list[bytes], vocabulary: Vocabulary
) -> list[CaseResult]:
    """All of these lines together; each by itself when one of them stops the others."""
    try:
        return _run_together([file.decode(line, _Sequence) for line in lines], vocabulary)
    except Exception as error:
        together = raised(f"lines {first} to {first + len(lines) - 1} together", error)

    def alone(line: bytes) -> CaseResult:
        return _run_together([file.decode(line, _Sequence)], vocabulary)[0]

    results = [guarded(f"line {first + i}", partial(alone, line)) for i, line in enumerate(lines)]
    if any(result.failed for result in results):
        return results
    # Nothing is wrong with any of them: then it is with running them together.
    return [*results, together]


def _run_together(sequences: list[_Sequence], vocabulary: Vocabulary) -> list[CaseResult]:
    # By place and not by id: nothing says that a file gives an id once.
    batch = [_Replay(str(place), each, vocabulary) for place, each in enumerate(sequences)]

    def recorded(seed: str, number: int) -> float:
        return batch[int(seed)].draw(number)

    while open_replays := [replay for replay in batch if not replay.done]:
        logits = torch.cat([replay.logits() for replay in open_replays])
        choice = choose(logits, [replay.row() for replay in open_replays], vocabulary, recorded)
        for index, replay in enumerate(open_replays):
            replay.take(Choice((choice.sampled_ids[index],), (choice.emitted_ids[index],)))
    return [replay.result() for replay in batch]


class _Replay:
    """One recorded sequence: the session's side of the policy, one token at a time.

    seed: names its draws, among all that run together.
    """

    def __init__(self, seed: str, sequence: _Sequence, vocabulary: Vocabulary) -> None:
        self._seed = seed
        self._sequence = sequence
        self._vocabulary = vocabulary
        self._compare = Comparison(sequence.id)
        given = sequence.sampling
        top_k = max(0, given.top_k)  # the recorded engine takes -1 for all ids as well
        self._sampling = Sampling(given.greedy, given.temperature, top_k, given.top_p)
        self._policy = initial_state(seeded_text=sequence.seeded_text)
        self._unit_index = -1
        self.done = False
        self._next_unit()

    def row(self) -> UnitRow:
        return UnitRow(self._rules, tuple(self._emitted), tuple(self._sampled))

    def draw(self, number: int) -> float:
        draws = self._unit.uniforms[number // 2]
        return draws[number % 2] if number % 2 < len(draws) else UNUSED_DRAW

    def logits(self) -> Tensor:
        """Logits [1, V] of the next token."""
        token = len(self._emitted)
        ahead = self._unit.lookahead
        row = ahead.row if self._stop is not None and ahead is not None else self._unit.rows[token]
        values = [row.fill - id_ / 128 for id_ in range(self._vocabulary.size)]
        for id_, value in row.set.items():
            values[int(id_)] = value
        return torch.tensor([values], dtype=torch.float32)

    def take(self, choice: Choice) -> None:
        """The token chosen for `row`."""
        where, unit = f"unit {self._unit.seq}", self._unit
        if self._stop is not None and unit.lookahead is not None:
            self._compare.same(f"{where} look-ahead", unit.lookahead.emitted, choice.emitted_ids[0])
            self._after_look_ahead(where, choice)
            self._next_unit()
            return
        self._sampled += choice.sampled_ids
        self._emitted += choice.emitted_ids
        self._stop = self._stop_reason()
        if self._stop is None and len(self._emitted) < len(unit.rows):
            return
        tokens_agree = self._compare.same(f"{where} emitted", unit.emitted, self._emitted)
        self._compare.same(f"{where} stop", unit.stop, self._stop)
        self._policy = self._advance(self._sampled, self._emitted)
        self._compare_state(where, self._policy)
        if not tokens_agree or self._stop is None:
            self._leave(len(self._sequence.units) - self._unit_index - 1)
        elif unit.lookahead is None:
            self._next_unit()

    def result(self) -> CaseResult:
        return self._compare.result()

    def _stop_reason(self) -> str | None:
        if self._emitted[-1] in self._vocabulary.terminators:
            return "terminator"
        return "length" if len(self._emitted) >= self._rules.token_limit else None

    def _advance(self, sampled: list[int], emitted: list[int]) -> PolicyState:
        return advance(self._rules, sampled, emitted, self._vocabulary)

    def _after_look_ahead(self, where: str, choice: Choice) -> None:
        late = self._advance(
            [*self._sampled, *choice.sampled_ids], [*self._emitted, *choice.emitted_ids]
        )
        self._compare.same(f"{where} state after the look-ahead", self._policy, late)

    def _compare_state(self, where: str, state: PolicyState) -> None:
        expected = self._unit.state_after
        for name in expected.__struct_fields__:
            self._compare.same(f"{where} {name}", getattr(expected, name), getattr(state, name))

    def _next_unit(self) -> None:
        self._unit_index += 1
        if self._unit_index == len(self._sequence.units):
            history = list(self._policy.penalty_ids)
            self._compare.same("penalty history", self._sequence.penalty_history_after, history)
            self.done = True
            return
        self._unit = self._sequence.units[self._unit_index]
        if self._unit.upstream_quirk is not None:
            self._leave(len(self._sequence.units) - self._unit_index)
            return
        self._rules = UnitRules(
            policy=self._policy,
            is_speech=self._unit.is_speech,
            force_listen=self._unit.force_listen,
            max_tokens=self._sequence.max_tokens,
            sampling=self._sampling,
            seed=self._seed,
        )
        self._emitted: list[int] = []
        self._sampled: list[int] = []
        self._stop: str | None = None

    def _leave(self, skipped_units: int) -> None:
        self._compare.skip(skipped_units)
        self.done = True
