"""The vocabulary that cases of decode and hand-off are written in: `decode_vocab.json`.

The shipped one has 64 ids. One that is written for a real tokenizer has also the bytes of the ids
that hold part of a character, and so no text of their own.
"""

from importlib import resources
from pathlib import Path

import msgspec

from duplex_sidecar.contract.types import ContractFileError
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary, VocabularyError

VOCABULARY_NAME = "decode_vocab.json"


class _VocabularyFile(msgspec.Struct):
    size: int
    named: dict[ControlToken, int]
    other_special_ids: list[int]
    bad_token_ids: list[int]
    text: dict[str, str]
    bytes_hex: dict[str, str] = {}


def recorded_vocabulary(beside: Path) -> Vocabulary:
    """The vocabulary file beside a recorded file, else the one that the package ships."""
    path = beside.parent / VOCABULARY_NAME
    try:
        if path.is_file():
            data = path.read_bytes()
        else:
            data = resources.files("duplex_sidecar.contract").joinpath(VOCABULARY_NAME).read_bytes()
        recorded = msgspec.json.decode(data, type=_VocabularyFile)
        texts = {id_: text.encode() for id_, text in recorded.text.items()}
        texts |= {id_: bytes.fromhex(part) for id_, part in recorded.bytes_hex.items()}
        return Vocabulary(
            control_ids=recorded.named,
            special_ids=frozenset(recorded.other_special_ids),
            bad_ids=frozenset(recorded.bad_token_ids),
            token_bytes=tuple(texts.get(str(id_), b"") for id_ in range(recorded.size)),
        )
    except (OSError, ValueError, VocabularyError) as error:
        raise ContractFileError(f"{path}: not a vocabulary: {error}") from error


def encode_vocabulary(vocabulary: Vocabulary) -> bytes:
    """A vocabulary file of these ids."""
    text: dict[str, str] = {}
    bytes_hex: dict[str, str] = {}
    for id_, data in enumerate(vocabulary.token_bytes):
        try:
            text[str(id_)] = data.decode()
        except UnicodeDecodeError:
            bytes_hex[str(id_)] = data.hex()
    return msgspec.json.encode(
        _VocabularyFile(
            size=vocabulary.size,
            named=dict(vocabulary.control_ids),
            other_special_ids=sorted(
                vocabulary.special_ids - frozenset(vocabulary.control_ids.values())
            ),
            bad_token_ids=sorted(vocabulary.bad_ids),
            text=text,
            bytes_hex=bytes_hex,
        )
    )
