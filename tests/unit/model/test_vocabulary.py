from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.model.minicpmo45.vocabulary import (
    REQUIRED_TOKENS,
    ControlToken,
    Vocabulary,
    VocabularyError,
)

pytestmark = pytest.mark.unit

CONTROL_IDS = {token: id_ for id_, token in enumerate(REQUIRED_TOKENS)}
CONTROL_BYTES = tuple(token.value.encode() for token in REQUIRED_TOKENS)


def bytes_vocabulary() -> Vocabulary:
    """One id per byte value, after the control tokens."""
    every_byte = tuple(bytes([value]) for value in range(256))
    return Vocabulary(CONTROL_IDS, frozenset(), frozenset(), CONTROL_BYTES + every_byte)


def ids_of(text: str) -> list[int]:
    return [len(CONTROL_BYTES) + value for value in text.encode()]


def test_control_tokens_are_found_by_name(vocabulary: Vocabulary) -> None:
    assert vocabulary.listen == vocabulary.id_of(ControlToken.LISTEN) == 2
    assert vocabulary.terminators == {2, 7, 8}
    assert vocabulary.turn_eos not in vocabulary.terminators
    assert vocabulary.find(ControlToken.IMAGE) is None
    with pytest.raises(VocabularyError, match="<image>"):
        vocabulary.id_of(ControlToken.IMAGE)


def test_specials_have_no_text(vocabulary: Vocabulary) -> None:
    assert vocabulary.text([3, 4, 10, 18, 11, 9, 7]) == " one two"
    assert vocabulary.text_length_characters([4, 10, 9]) == 4


def test_a_character_may_span_tokens(vocabulary: Vocabulary) -> None:
    assert vocabulary.text([14, 15]) == "é"
    assert vocabulary.text_length_characters([13, 14]) == 2
    assert vocabulary.text([14]) == "\ufffd"
    piece = vocabulary.text_piece([13, 14])
    assert piece == ("a", "é".encode()[:1])
    assert vocabulary.text_piece([15, 13], piece.pending) == ("éa", b"")


@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=6))
def test_pieces_of_a_stream_join_to_the_whole_text(text: str, cuts: list[int]) -> None:
    vocabulary = bytes_vocabulary()
    ids = ids_of(text)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    said, pending = "", b""
    for start, end in pairwise(bounds):
        piece = vocabulary.text_piece(ids[start:end], pending)
        said, pending = said + piece.text, piece.pending
        assert len(pending) <= 3
    assert (said, pending) == (text, b"")


@given(st.binary(max_size=16))
def test_any_bytes_decode_without_error(data: bytes) -> None:
    vocabulary = bytes_vocabulary()
    ids = [len(CONTROL_BYTES) + value for value in data]
    piece = vocabulary.text_piece(ids)
    assert piece.text + piece.pending.decode(errors="replace") == vocabulary.text(ids)


def test_contradicting_tables_are_refused() -> None:
    without_listen = {k: v for k, v in CONTROL_IDS.items() if k is not ControlToken.LISTEN}
    with pytest.raises(VocabularyError, match="listen"):
        Vocabulary(without_listen, frozenset(), frozenset(), CONTROL_BYTES)
    with pytest.raises(VocabularyError, match=r"outside of the 10 tokens: \[44\]"):
        Vocabulary(CONTROL_IDS, frozenset({44}), frozenset(), CONTROL_BYTES)
    twice = CONTROL_IDS | {ControlToken.SPEAK: CONTROL_IDS[ControlToken.LISTEN]}
    with pytest.raises(VocabularyError, match="share one id"):
        Vocabulary(twice, frozenset(), frozenset(), CONTROL_BYTES)
