"""The byte-level tokenizer: texts, control tokens, gaps, and files that are none."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.presets import FULL_VOCAB_SIZE, full_special_ids
from duplex_sidecar.checkpoint.replies import SENTENCES, make_teacher
from duplex_sidecar.checkpoint.tokenizer import (
    SPECIAL_TOKENS,
    DuplexTokenizer,
    load_vocabulary,
    parse_tokenizer,
    read_tokenizer,
    train_tokenizer,
    vocabulary_of,
)
from duplex_sidecar.model.minicpmo45.constants import PREVIOUS_MARKER
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary

pytestmark = pytest.mark.unit

SIZE = 1024


@cache
def trained() -> bytes:
    return train_tokenizer(SIZE)


@cache
def tiny() -> DuplexTokenizer:
    return parse_tokenizer(trained())


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(tiny(), SIZE, "tiny")


def bytes_of(ids: tuple[int, ...]) -> bytes:
    return b"".join(tiny().bytes_of(id_) or b"" for id_ in ids)


def test_training_gives_the_same_file_each_time() -> None:
    assert train_tokenizer(SIZE) == trained()
    assert tiny().size == SIZE
    assert tiny().special_ids == frozenset(range(SIZE - len(SPECIAL_TOKENS), SIZE))


@given(st.text())
def test_every_text_comes_back_byte_for_byte(text: str) -> None:
    assert bytes_of(tiny().encode(text)) == text.encode()


@given(st.text(alphabet="ab \n\r\t"))
def test_blanks_and_newlines_stay(text: str) -> None:
    assert bytes_of(tiny().encode(text)) == text.encode()


@given(st.text(max_size=20), st.lists(st.integers(1, 8), max_size=20))
def test_a_stream_of_tokens_never_shows_half_a_character(text: str, cuts: list[int]) -> None:
    ids, shown, pending = list(tiny().encode(text)), "", b""
    ids = [id_ for id_ in ids if id_ not in vocabulary().special_ids]
    expected = vocabulary().text(ids)
    for cut in [*cuts, len(ids) + 1]:
        piece = vocabulary().text_piece(ids[:cut], pending)
        shown, pending, ids = shown + piece.text, piece.pending, ids[cut:]
    assert shown == expected
    assert pending == b""


def test_part_of_a_character_counts_as_one() -> None:
    ids = tiny().encode("😀")
    assert len(ids) > 1
    assert vocabulary().text_length_characters(ids) == 1
    assert vocabulary().text_length_characters(ids[:-1]) == 1
    assert vocabulary().text_piece(ids[:-1]).text == ""


def test_control_tokens_are_found_by_name_also_inside_text() -> None:
    ids = tiny().encode(f"{ControlToken.IM_START}system\nhi{ControlToken.IM_END}")
    assert ids[0] == vocabulary().id_of(ControlToken.IM_START)
    assert ids[-1] == vocabulary().id_of(ControlToken.IM_END)
    assert set(ids[1:-1]).isdisjoint(vocabulary().special_ids)
    assert {vocabulary().find(token) for token in ControlToken} <= vocabulary().special_ids
    assert tiny().encode(PREVIOUS_MARKER)
    assert vocabulary().text(ids) == "system\nhi"


def test_ids_with_gaps_are_special_and_never_sampled(tmp_path: Path) -> None:
    data = train_tokenizer(SIZE, full_special_ids())
    tokenizer = parse_tokenizer(data)
    gapped = vocabulary_of(tokenizer, FULL_VOCAB_SIZE, "full")
    assert gapped.tts_bos == 151_703
    assert gapped.size == FULL_VOCAB_SIZE
    assert 150_000 in gapped.bad_ids
    assert gapped.bad_ids <= gapped.special_ids
    assert gapped.listen not in gapped.bad_ids
    ids = tokenizer.encode(f"{ControlToken.LISTEN} yes")
    assert ids[0] == gapped.listen
    assert tokenizer.encode(" yes") == ids[1:]


def test_training_refuses_ids_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="pieces"):
        train_tokenizer(50_000)
    for ids in ((1,), tuple(range(len(SPECIAL_TOKENS))), (2000,) * len(SPECIAL_TOKENS)):
        with pytest.raises(ValueError, match="free id"):
            train_tokenizer(SIZE, ids)


def _without_listen(file: dict[str, Any]) -> None:
    file["added_tokens"] = [t for t in file["added_tokens"] if t["content"] != "<|listen|>"]
    del file["model"]["vocab"]["<|listen|>"]


def _other_model(file: dict[str, Any]) -> None:
    file["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


def _other_decoder(file: dict[str, Any]) -> None:
    file["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}


def _foreign_piece(file: dict[str, Any]) -> None:
    file["model"]["vocab"]["木"] = SIZE


@pytest.mark.parametrize(
    "spoil", [_without_listen, _other_model, _other_decoder, _foreign_piece, dict.clear]
)
def test_a_tokenizer_that_cannot_serve_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    file = json.loads(trained())
    spoil(file)
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(CheckpointError) as caught:
        vocabulary_of(read_tokenizer(tmp_path), 2 * SIZE, "tiny")
    assert caught.value.fault is CheckpointFault.INVALID_TOKENIZER


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_vocabulary(tmp_path)
    assert caught.value.fault is CheckpointFault.MISSING
    for data in (b"", b"[]", b"\x00"):
        with pytest.raises(CheckpointError) as caught:
            parse_tokenizer(data)
        assert caught.value.fault is CheckpointFault.INVALID_TOKENIZER
    with pytest.raises(CheckpointError, match="but the model has"):
        vocabulary_of(tiny(), SIZE - 1, "tiny")


def test_the_taught_sentences_are_words_of_one_token_each() -> None:
    for sentence in SENTENCES:
        pieces = [(tiny().bytes_of(id_) or b"").decode() for id_ in tiny().encode(sentence)]
        assert all(piece in (",", ".") or piece.startswith(" ") for piece in pieces)
        words = sentence.replace(",", " ,").replace(".", " .").split()
        assert len(pieces) == len(words)


def test_every_taught_token_leads_to_a_terminator() -> None:
    teacher, ids = make_teacher(tiny(), vocabulary()), vocabulary()
    ends = ids.terminators
    for start in teacher.followers:
        reached, frontier = {start}, {start}
        while frontier:
            found = {n for id_ in frontier for n in teacher.followers.get(id_, ())}
            frontier = found - reached
            reached |= found
        assert reached & ends
    for id_, following in teacher.followers.items():
        assert following
        assert all(n in teacher.followers or n in ends for n in following), id_
