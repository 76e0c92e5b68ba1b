"""The checkpoint's tokenizer: a byte-level BPE in tokenizer.json, read by `tokenizers` alone.

No code of the checkpoint is ever run. Control tokens are looked up by name (contract section A),
so their ids may stand anywhere; ids of the model's table that no token has are never sampled.
"""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.layout import TOKENIZER_NAME
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary, VocabularyError

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
END_OF_TEXT = "<|endoftext|>"
AUDIO_BOS = "<|audio_bos|>"
TEXT_EOS = "<|text_eos|>"
SPECIAL_TOKENS: tuple[str, ...] = (
    END_OF_TEXT,
    *(token.value for token in ControlToken),
    AUDIO_BOS,
    TEXT_EOS,
)
"""What the tokenizers that we make hold beside the text pieces. The last two are the Talker's."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool


class _Part(msgspec.Struct):
    type: str


class _Model(msgspec.Struct):
    type: str
    vocab: dict[str, int]


class _File(msgspec.Struct):
    model: _Model
    decoder: _Part
    added_tokens: list[_AddedToken]


def _byte_of_character() -> Mapping[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for the
    characters from U+0100 on, in order (the published GPT-2 table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return MappingProxyType(table)


_BYTE_OF_CHARACTER = _byte_of_character()


class DuplexTokenizer:
    """Ids of texts and bytes of ids. `size` is the greatest id + 1; ids may have gaps.

    Not bound to a model's table: `load_vocabulary` does that.
    """

    file_name = TOKENIZER_NAME

    def __init__(self, tokenizer: Tokenizer, file: _File) -> None:
        self._tokenizer = tokenizer
        self._ids = dict(file.model.vocab) | {
            token.content: token.id for token in file.added_tokens
        }
        self.size = max(self._ids.values()) + 1
        self.special_ids = frozenset(token.id for token in file.added_tokens if token.special)
        literal = {token.id: token.content.encode() for token in file.added_tokens}
        self._bytes = literal | {
            id_: _piece_bytes(piece)
            for piece, id_ in file.model.vocab.items()
            if id_ not in literal
        }

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text`; the names of control tokens in it become those tokens. Newlines stay."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def id_of(self, token: str) -> int | None:
        """Id of one token by its name, None when there is none."""
        return self._ids.get(token)

    def bytes_of(self, id_: int) -> bytes | None:
        """UTF-8 bytes of one id (perhaps part of a character), None when no token has the id."""
        return self._bytes.get(id_)


def _piece_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        raise ValueError(f"piece {piece!r} is not in the byte-level alphabet") from None


def read_tokenizer(folder: Path) -> DuplexTokenizer:
    """FOLDER/tokenizer.json. Raises CheckpointError (missing, unreadable, invalid_tokenizer)."""
    path = folder / TOKENIZER_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(CheckpointFault.MISSING, str(path), "no such file") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(CheckpointFault.UNREADABLE, str(path), reason) from None
    return parse_tokenizer(data, str(path))


def parse_tokenizer(data: bytes, name: str = TOKENIZER_NAME) -> DuplexTokenizer:
    """The bytes of a tokenizer.json; `name` is for the error text."""
    if len(data) > MAX_TOKENIZER_BYTES:
        raise _invalid(name, f"longer than {MAX_TOKENIZER_BYTES} bytes")
    try:
        parsed = msgspec.json.decode(data, type=_File)
        if parsed.model.type != "BPE" or parsed.decoder.type != "ByteLevel":
            raise _invalid(name, f"{parsed.model.type}, not a byte-level BPE")
        # The library raises bare Exception for whatever it cannot use.
        return DuplexTokenizer(Tokenizer.from_buffer(data), parsed)
    except CheckpointError:
        raise
    except Exception as error:
        raise _invalid(name, str(error)) from None


def load_vocabulary(folder: Path) -> Vocabulary:
    """The control ids and token texts of a checkpoint, over the Thinker's whole id range.

    Ids of the model's table without a token are special and bad: they have no text and are never
    sampled. Raises CheckpointError.
    """
    tokenizer = read_tokenizer(folder)
    return vocabulary_of(tokenizer, read_config(folder).thinker.vocab_size, str(folder))


def vocabulary_of(tokenizer: DuplexTokenizer, vocab_size: int, name: str) -> Vocabulary:
    """`load_vocabulary` for a tokenizer already read; `name` is for the error text."""
    if tokenizer.size > vocab_size:
        reason = f"{tokenizer.size} ids, but the model has {vocab_size}"
        raise CheckpointError(CheckpointFault.INVALID_TOKENIZER, name, reason)
    table = [tokenizer.bytes_of(id_) for id_ in range(vocab_size)]
    unused = frozenset(id_ for id_, data in enumerate(table) if data is None)
    controls = {token: tokenizer.id_of(token.value) for token in ControlToken}
    try:
        return Vocabulary(
            control_ids={token: id_ for token, id_ in controls.items() if id_ is not None},
            special_ids=tokenizer.special_ids | unused,
            bad_ids=unused,
            token_bytes=tuple(data or b"" for data in table),
        )
    except VocabularyError as error:
        raise CheckpointError(CheckpointFault.INVALID_TOKENIZER, name, str(error)) from None


def train_tokenizer(vocab_size: int, special_ids: Sequence[int] | None = None) -> bytes:
    """A tokenizer.json made from the text that ships with the package.

    vocab_size counts `SPECIAL_TOKENS`. special_ids: where they stand (one id each, above all text
    pieces); None = right after the text pieces.
    """
    tokenizer = Tokenizer(models.BPE())
    # The package's stubs have no setters for these two.
    untyped: Any = tokenizer
    untyped.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    untyped.decoder = decoders.ByteLevel()
    pieces = vocab_size - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_corpus().splitlines(keepends=True), trainer)
    document = msgspec.json.decode(tokenizer.to_str(), type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(document["model"], type=dict[str, msgspec.Raw])
    vocab = msgspec.json.decode(model["vocab"], type=dict[str, int])
    if len(vocab) != pieces:
        raise ValueError(f"the text gives {len(vocab)} pieces, not {pieces}")
    ids = range(pieces, vocab_size) if special_ids is None else special_ids
    if len(ids) != len(SPECIAL_TOKENS) or min(ids) < pieces or len(set(ids)) != len(ids):
        raise ValueError("one free id above the text pieces for each special token")
    # Special tokens stand in the model's own table too: that is what fixes their ids, gaps or not.
    vocab |= dict(zip(SPECIAL_TOKENS, ids, strict=True))
    model["vocab"] = msgspec.Raw(msgspec.json.encode(vocab))
    document["model"] = msgspec.Raw(msgspec.json.encode(model))
    complete = Tokenizer.from_buffer(msgspec.json.encode(document))
    complete.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return complete.to_str(pretty=True).encode()


def _corpus() -> str:
    return (resources.files("duplex_sidecar.checkpoint") / "assets" / "sentences.txt").read_text(
        encoding="utf-8"
    )


def _invalid(name: str, reason: str) -> CheckpointError:
    return CheckpointError(CheckpointFault.INVALID_TOKENIZER, name, reason)
