"""A new vocoder epoch hears what the lost one heard: the same chunks, on the same boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from duplex_sidecar.ledger.journal import VoiceMark
from duplex_sidecar.model.minicpmo45.producer import (
    INITIAL_PRODUCER_STATE,
    Chunk,
    CodeRecord,
    ProducerState,
    produce_unit,
)
from duplex_sidecar.session.catching_up import (
    FULL_CHUNKS,
    NOTHING_SOUNDED,
    SHORT_CHUNKS,
    SoundedCodes,
    begin_again,
    sounded_of,
)

pytestmark = pytest.mark.unit

UNITS = st.lists(st.integers(min_value=0, max_value=104), min_size=0, max_size=14)


class Turn:
    """A turn that sounds unit by unit, and its marks as the ledger keeps them."""

    def __init__(self) -> None:
        self.producer = INITIAL_PRODUCER_STATE
        self.sent: list[Chunk] = []
        self.marks: list[VoiceMark] = []
        self.sounded = NOTHING_SOUNDED
        self._code = 0

    def unit(self, count: int, *, turn_end: bool = False) -> list[Chunk]:
        codes = tuple(range(self._code, self._code + count))
        self._code += count
        record = CodeRecord(
            source=1, turn=(0, 0), codes=codes, finished=True, turn_end=turn_end, text=""
        )
        outputs, self.producer = produce_unit(self.producer, record)
        chunks = [chunk for chunk in outputs if isinstance(chunk, Chunk)]
        audible = [chunk for chunk in chunks if chunk.code_count]
        self.sent += chunks
        self.sounded = self.sounded.then(chunk.codes[chunk.left_context :] for chunk in audible)
        if audible:
            self._mark(audible)
        return chunks

    def _mark(self, audible: list[Chunk]) -> None:
        new = tuple(code for chunk in audible for code in chunk.codes[chunk.left_context :])
        before = self.marks[-1] if self.marks else None
        offset = before.code_offset + len(before.codes) if before else 0
        unit = len(self.marks) + 1
        self.marks.append(VoiceMark(0, 0, 1, unit, offset, new, offset, offset + len(new)))


def heard(chunks: "list[Chunk] | tuple[Chunk, ...]") -> list[tuple[int, ...]]:
    return [chunk.codes for chunk in chunks if chunk.code_count]


@given(UNITS)
def test_a_short_turn_is_heard_again_from_its_first_chunk(counts: list[int]) -> None:
    turn = Turn()
    for count in counts:
        turn.unit(count)
        if len(heard(turn.sent)) > FULL_CHUNKS:
            break
        chunks, after = begin_again(turn.producer, turn.sounded)
        assert turn.sounded.exact
        assert heard(chunks) == heard(turn.sent)
        check(turn.producer, chunks, after)


@given(UNITS)
def test_what_follows_is_what_would_have_followed(counts: list[int]) -> None:
    """Codes that wait are not lost, and the next chunk has its left context."""
    turn, again = Turn(), Turn()
    for count in counts:
        turn.unit(count)
        again.unit(count)
    _, again.producer = begin_again(again.producer, again.sounded)
    first, second = turn.unit(30, turn_end=True), again.unit(30, turn_end=True)
    assert [c.codes for c in first] == [c.codes for c in second]
    assert [(c.left_context, c.last_chunk, c.text) for c in first] == [
        (c.left_context, c.last_chunk, c.text) for c in second
    ]
    assert {c.epoch for c in second} == {first[0].epoch + 1}


@given(UNITS.filter(lambda counts: sum(counts) > 25 * (FULL_CHUNKS + 1)))
def test_a_long_turn_is_heard_from_two_chunks_back(counts: list[int]) -> None:
    turn = Turn()
    for count in counts:
        turn.unit(count)
    chunks, after = begin_again(turn.producer, turn.sounded)
    assert not turn.sounded.exact
    assert heard(chunks) == heard(turn.sent)[-SHORT_CHUNKS:]
    check(turn.producer, chunks, after)


@given(UNITS)
def test_the_ledgers_marks_say_the_same(counts: list[int]) -> None:
    turn = Turn()
    for count in counts:
        turn.unit(count)
        assert sounded_of(turn.marks, 1) == turn.sounded
    assert sounded_of(turn.marks, 2) == NOTHING_SOUNDED


def test_marks_that_begin_late_are_an_approximation() -> None:
    turn = Turn()
    for _ in range(4):
        turn.unit(25)
    assert sounded_of(turn.marks[2:], 1).exact is False


def check(before: ProducerState, chunks: tuple[Chunk, ...], after: ProducerState) -> None:
    """One epoch on, numbered from 0; nothing else of the stream has moved."""
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.epoch for chunk in chunks} <= {before.epoch + 1}
    assert after == structs.replace(before, epoch=before.epoch + 1, sequence=len(chunks))


def test_nothing_sounded_is_caught_up_with_nothing() -> None:
    assert begin_again(INITIAL_PRODUCER_STATE, SoundedCodes())[0] == ()
