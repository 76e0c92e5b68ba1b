"""What a client's word makes of a reply: what is stopped, what is taken back, what is refused."""

import pytest
from msgspec import structs
from session_kit import MODEL, VOCABULARY, WORD_IDS

from duplex_sidecar.ledger.records import (
    CancelledDraft,
    Entry,
    TruncatedDraft,
    kept_tokens,
    note,
    stopped_units,
)
from duplex_sidecar.model.minicpmo45.producer import ProducerState
from duplex_sidecar.model.minicpmo45.truncation import SaidUnit
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.conversation import SentUnit, Speech, first_speech
from duplex_sidecar.session.cuts import (
    closing_marks,
    stopped,
    taken_back,
    units_of,
)

pytestmark = pytest.mark.unit

SPEAK, LISTEN, CHUNK = (
    MODEL.encode("<|speak|>")[0],
    VOCABULARY.listen,
    VOCABULARY.chunk_eos,
)
SLOT = MODEL.encode("<|audio|>")[0]
SECOND = 24_000


def spoken(seq: int, *, kept: int | None = None) -> SaidUnit:
    ids = (SPEAK, *WORD_IDS[:4], CHUNK)
    return SaidUnit(seq, ids, ids, False, False, kept)


def sent(*units: int, turn: int = 1, start: int = 0) -> tuple[SentUnit, ...]:
    """A second of sound each."""
    return tuple(
        SentUnit(unit, turn, start + SECOND * place, start + SECOND * (place + 1), 10 * unit)
        for place, unit in enumerate(units)
    )


@pytest.mark.parametrize(
    ("heard_ms", "kept"),
    [
        (0, {4: 0, 5: 0, 6: 0}),
        (500, {4: 3, 5: 0, 6: 0}),
        (1_000, {5: 0, 6: 0}),
        (2_750, {6: 4}),
        (2_999, {6: 4}),
        (3_000, {}),
    ],
)
def test_what_was_not_heard_is_taken_back(heard_ms: int, kept: dict[int, int]) -> None:
    said = [spoken(seq) for seq in (3, 4, 5, 6)]
    taken = taken_back(sent(4, 5, 6), said, heard_ms, SLOT, VOCABULARY)
    assert taken.kept == kept
    assert taken.first == min(kept, default=None)


def test_what_was_taken_back_before_stays_so() -> None:
    said = [spoken(4, kept=2), spoken(5, kept=0)]
    assert taken_back(sent(4, 5), said, 1_900, SLOT, VOCABULARY).kept == {}
    assert taken_back(sent(4, 5), said, 100, SLOT, VOCABULARY).kept == {4: 0}


@pytest.mark.parametrize(
    ("heard_ms", "code"),
    [
        (3_001, ErrorCode.PLAYBACK_ITEM_MISMATCH),
        (4_999, ErrorCode.PLAYBACK_ITEM_MISMATCH),
    ],
)
def test_no_more_is_heard_than_was_sent(heard_ms: int, code: ErrorCode) -> None:
    with pytest.raises(ClientError) as error:
        taken_back(sent(4, 5, 6), [spoken(4), spoken(5), spoken(6)], heard_ms, SLOT, VOCABULARY)
    assert (error.value.code, error.value.param) == (code, "audio_end_ms")


def test_what_is_too_long_ago_is_said_for_good() -> None:
    known = sent(64, 65, start=10 * SECOND)
    for units, said, heard_ms in (
        (known, [spoken(64), spoken(65)], 500),
        (sent(4), [spoken(5)], 500),
        (sent(4), [spoken(5)], 1_000),
    ):
        with pytest.raises(ClientError) as error:
            taken_back(units, said, heard_ms, SLOT, VOCABULARY)
        assert error.value.code is ErrorCode.PLAYBACK_ACK_TOO_LATE


def speech(**change: object) -> Speech:
    return structs.replace(first_speech(), turn=2, sent=sent(4, 5, turn=2), **change)


def test_a_turn_is_known_as_long_as_its_units_are() -> None:
    assert units_of(speech(), 2) == sent(4, 5, turn=2)
    for turn, code in (
        (1, ErrorCode.PLAYBACK_ACK_TOO_LATE),
        (3, ErrorCode.PLAYBACK_ITEM_NOT_FOUND),
    ):
        with pytest.raises(ClientError) as error:
            units_of(speech(), turn)
        assert error.value.code is code


def test_a_stopped_turn_leaves_no_codes_behind_and_its_epoch() -> None:
    producer = ProducerState(source=1, epoch=3, sequence=2, pending_codes=(1, 2, 3))
    before = speech(turn_open=True, turn_samples=9, turn_text="so", producer=producer)
    after = stopped(before)
    assert (after.producer.epoch, after.producer.sequence) == (4, 0)
    assert after.producer.pending_codes == ()
    assert (after.turn_open, after.handoff.turn) == (False, before.handoff.turn + 1)
    marks = closing_marks(before, 5)
    assert {(mark.turn, mark.unit, mark.samples, mark.text) for mark in marks} == {(2, 5, 9, "so")}
    silent = speech(turn_open=True, producer=ProducerState(source=1, epoch=3))
    assert stopped(silent).producer == silent.producer, "no epoch is skipped"


def test_records_say_what_is_left_of_each_unit() -> None:
    def entry(draft: TruncatedDraft | CancelledDraft) -> Entry:
        record = note(draft, state_sha256="", replica="a", at_ms=1, prev_hash="")
        return Entry(1, "", record, b"")

    cut = TruncatedDraft(
        seq=6, turn=1, unit=4, token_index=2, through=6, played_ms=1, ends_turn=True
    )
    later = structs.replace(cut, seq=7, token_index=1, through=5, ends_turn=False)
    entries = [entry(cut), entry(later), entry(CancelledDraft(seq=9, turn=2))]
    assert kept_tokens(entries) == {4: 1, 5: 0, 6: 0}
    assert stopped_units(entries) == {6, 9}
