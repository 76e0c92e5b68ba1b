"""Control tokens and token texts of MiniCPM-o 4.5 (contract section A, "Tokens").

A `Vocabulary` is plain data: `checkpoint.tokenizer.load_vocabulary` makes one from tokenizer.json,
the contract check from decode_vocab.json. Everything here that asks "which id is listen" asks it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class ControlToken(StrEnum):
    """Control tokens by the names that the tokenizer gives them."""

    UNIT = "<unit>"
    UNIT_END = "</unit>"
    LISTEN = "<|listen|>"
    SPEAK = "<|speak|>"
    TTS_BOS = "<|tts_bos|>"
    TTS_EOS = "<|tts_eos|>"
    TTS_PAD = "<|tts_pad|>"
    CHUNK_EOS = "<|chunk_eos|>"
    CHUNK_TTS_EOS = "<|chunk_tts_eos|>"
    TURN_EOS = "<|turn_eos|>"
    AUDIO = "<|audio|>"
    IMAGE = "<image>"
    IMAGE_END = "</image>"
    SLICE = "<slice>"
    SLICE_END = "</slice>"
    IM_START = "<|im_start|>"
    IM_END = "<|im_end|>"
    AUDIO_START = "<|audio_start|>"
    AUDIO_END = "<|audio_end|>"


REQUIRED_TOKENS = (
    ControlToken.UNIT,
    ControlToken.UNIT_END,
    ControlToken.LISTEN,
    ControlToken.SPEAK,
    ControlToken.TTS_BOS,
    ControlToken.TTS_EOS,
    ControlToken.TTS_PAD,
    ControlToken.CHUNK_EOS,
    ControlToken.CHUNK_TTS_EOS,
    ControlToken.TURN_EOS,
)
"""Without these there is no duplex conversation; the others may be missing."""


class VocabularyError(ValueError):
    """The tokenizer lacks required control tokens, or its tables contradict each other."""


class TextPiece(NamedTuple):
    """Text decoded so far, and the bytes of a character that is not complete yet (at most 3)."""

    text: str
    pending: bytes


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids and texts of one checkpoint's tokenizer. Raises `VocabularyError` when it cannot serve.

    control_ids: id by control token; all of `REQUIRED_TOKENS` are present.
    special_ids: every id without spoken text: the control tokens and the tokenizer's own specials.
    bad_ids: ids that must never be sampled (`tokenizer.bad_token_ids`).
    token_bytes: UTF-8 bytes of each id, index = id; one token may hold part of a character.
    """

    control_ids: Mapping[ControlToken, int]
    special_ids: frozenset[int]
    bad_ids: frozenset[int]
    token_bytes: tuple[bytes, ...]
    # The ids that the per-token rules ask for, resolved once.
    unit: int = field(init=False)
    unit_end: int = field(init=False)
    listen: int = field(init=False)
    speak: int = field(init=False)
    tts_bos: int = field(init=False)
    tts_eos: int = field(init=False)
    tts_pad: int = field(init=False)
    chunk_eos: int = field(init=False)
    chunk_tts_eos: int = field(init=False)
    turn_eos: int = field(init=False)
    terminators: frozenset[int] = field(init=False)
    """Stop ids of a unit: listen, chunk_eos, chunk_tts_eos. turn_eos is not one of them."""

    def __post_init__(self) -> None:
        ids = MappingProxyType(dict(self.control_ids))
        missing = [token.value for token in REQUIRED_TOKENS if token not in ids]
        if missing:
            raise VocabularyError(f"the tokenizer lacks control tokens: {', '.join(missing)}")
        outside = sorted(
            id_
            for id_ in {*ids.values(), *self.special_ids, *self.bad_ids}
            if not 0 <= id_ < len(self.token_bytes)
        )
        if outside:
            raise VocabularyError(f"ids outside of the {len(self.token_bytes)} tokens: {outside}")
        required = [ids[token] for token in REQUIRED_TOKENS]
        if len(set(required)) != len(required):
            raise VocabularyError("two control tokens share one id")
        assign = object.__setattr__
        assign(self, "control_ids", ids)
        assign(self, "special_ids", self.special_ids | frozenset(ids.values()))
        for token in REQUIRED_TOKENS:
            assign(self, token.name.lower(), ids[token])
        assign(self, "terminators", frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos)))

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self.token_bytes)

    def id_of(self, token: ControlToken) -> int:
        """Id of a control token; raises `VocabularyError` for an optional one that is missing."""
        id_ = self.control_ids.get(token)
        if id_ is None:
            raise VocabularyError(f"the tokenizer lacks {token.value}")
        return id_

    def find(self, token: ControlToken) -> int | None:
        """Id of a control token, None when the tokenizer has none."""
        return self.control_ids.get(token)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """UTF-8 bytes of the ids, specials skipped; may begin or end inside a character."""
        return b"".join(self.token_bytes[id_] for id_ in ids if id_ not in self.special_ids)

    def text(self, ids: Iterable[int]) -> str:
        """Text of the ids, specials skipped; bytes that form no character become U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", errors="replace")

    def text_length_characters(self, ids: Iterable[int]) -> int:
        """Length of `text(ids)` in characters (code points); an unfinished character counts 1."""
        return len(self.text(ids))

    def text_piece(self, ids: Iterable[int], pending: bytes = b"") -> TextPiece:
        """Text of the next ids of a stream: an unfinished last character waits in `pending`."""
        data = pending + self.bytes_of(ids)
        cut = len(data) - _unfinished_bytes(data)
        return TextPiece(data[:cut].decode("utf-8", errors="replace"), data[cut:])


def _unfinished_bytes(data: bytes) -> int:
    """Number of bytes at the end (0..3) that are the start of a longer character."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
    return 0
