"""The 64-id vocabulary that decode and hand-off cases are written in."""

from importlib import resources
from pathlib import Path

import msgspec

from duplex_sidecar.contract.files import ContractFileError
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary, VocabularyError

VOCABULARY_NAME = "decode_vocab.json"


class _VocabularyFile(msgspec.Struct):
    size: int
    named: dict[ControlToken, int]
    other_special_ids: list[int]
    bad_token_ids: list[int]
    text: dict[str, str]


def recorded_vocabulary(beside: Path) -> Vocabulary:
    """The vocabulary file beside a recorded file, else the one that the package ships."""
    path = beside.parent / VOCABULARY_NAME
    try:
        if path.is_file():
            data = path.read_bytes()
        else:
            data = resources.files("duplex_sidecar.contract").joinpath(VOCABULARY_NAME).read_bytes()
        recorded = msgspec.json.decode(data, type=_VocabularyFile)
        return Vocabulary(
            control_ids=recorded.named,
            special_ids=frozenset(recorded.other_special_ids),
            bad_ids=frozenset(recorded.bad_token_ids),
            token_bytes=tuple(
                recorded.text.get(str(id_), "").encode() for id_ in range(recorded.size)
            ),
        )
    except (OSError, msgspec.DecodeError, VocabularyError) as error:
        raise ContractFileError(f"{path}: not a vocabulary: {error}") from error
