"""What a prompt is made of, as plain data: ids as they are, and named places for media rows.

A `MediaPart` says which rows stand there, not what is in them: whoever submits the prompt to the
Thinker looks the rows up by (kind, unit, index). Lengths are positions of the Thinker.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class BlockKind(StrEnum):
    """An image block in the context: the whole frame, or one high-resolution slice of it."""

    SOURCE = "source"
    SLICE = "slice"


class MediaKind(StrEnum):
    """Where the rows of a media part come from."""

    REFERENCE = "reference"
    """The reference voice of the session; unit 0, index 0, all positions in one part."""
    AUDIO = "audio"
    """One chunk of a unit's audio; index = chunk, 10 positions."""
    VISION = "vision"
    """One image block of a unit; index = block in KV order, 64 positions."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Token ids, at least one."""

    ids: tuple[int, ...]


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    """`length` rows: part `index` of `kind` of unit `unit` (0 for the reference voice)."""

    kind: MediaKind
    unit: int
    index: int
    length: int


PromptPart = TextPart | MediaPart


class LayoutIds(msgspec.Struct, frozen=True):
    """Ids that a prompt needs besides text. Slots stand where rows replace the embedding.

    The image ids are None when the tokenizer has none: such a model takes no frames.
    """

    unit: int
    unit_end: int
    audio_slot: int
    reference_slot: int
    image_slot: int | None
    image: int | None
    image_end: int | None
    slice: int | None
    slice_end: int | None


class MediaLengths(msgspec.Struct, frozen=True):
    """Positions of one audio chunk and of the rows of one image block."""

    audio_chunk: int
    image_block: int


class PromptContext(msgspec.Struct, frozen=True):
    """The session context: prefix, reference voice, [marker + previous], suffix."""

    prefix_ids: tuple[int, ...]
    reference_positions: int
    suffix_ids: tuple[int, ...]
    marker_ids: tuple[int, ...]


class UnitInput(msgspec.Struct, frozen=True):
    """What one append put in: chunks of audio and image blocks in KV order (after the first
    `<unit>`, before the first chunk)."""

    seq: int
    chunks: int
    blocks: tuple[BlockKind, ...]


class HistoryUnit(msgspec.Struct, frozen=True):
    """One accepted append with its answer: confirmed ids without the terminator, terminator
    (None: the unit ended without one). Truncation replaces `ids` and `terminator`."""

    input: UnitInput
    ids: tuple[int, ...]
    terminator: int | None


def part_length(part: PromptPart) -> int:
    """Positions of one part."""
    return len(part.ids) if isinstance(part, TextPart) else part.length


def parts_length(parts: Iterable[PromptPart]) -> int:
    """Positions of all parts."""
    return sum(part_length(part) for part in parts)
