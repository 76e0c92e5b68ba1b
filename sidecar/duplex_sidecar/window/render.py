"""Renders prompts (contract sections A and B) from records; the only place that knows their order.

Every prompt of a session comes from here: an append that extends a stream, and the whole prompt
after a slide, a truncation, an eviction, a restart or a move. A prompt whose length is not the
planned one is refused, never padded or cut.
"""

from collections.abc import Sequence
from enum import StrEnum

from duplex_sidecar.window.parts import (
    BlockKind,
    HistoryUnit,
    LayoutIds,
    MediaKind,
    MediaLengths,
    MediaPart,
    PromptContext,
    PromptPart,
    TextPart,
    UnitInput,
    parts_length,
)


class RenderErrorCode(StrEnum):
    LENGTH_MISMATCH = "length_mismatch"
    """The rendered prompt has another length than planned; the append fails as a whole."""
    NO_IMAGE_TOKENS = "no_image_tokens"
    """Frames for a model whose tokenizer has no image tokens."""


class RenderError(Exception):
    """A prompt that must not be submitted. `code` is for decisions, `reason` for people."""

    def __init__(self, code: RenderErrorCode, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


def render_append(
    pending: UnitInput,
    completed: HistoryUnit | None,
    ids: LayoutIds,
    lengths: MediaLengths,
    expected_tokens: int,
) -> tuple[PromptPart, ...]:
    """What extends a stream: closure of `completed` (the append before), then the append.

    completed: None where the stream already ends with a closed unit (seq 1, or a stream that was
    opened ahead with `history_parts`). Its `ids` are in the stream already; only its terminator is
    not. Raises RenderError when the length is not `expected_tokens`.
    """
    return _checked(append_parts(pending, completed, ids, lengths), expected_tokens)


def render_prompt(
    context: PromptContext,
    previous_ids: Sequence[int],
    history: Sequence[HistoryUnit],
    pending: UnitInput,
    ids: LayoutIds,
    lengths: MediaLengths,
    expected_tokens: int,
) -> tuple[PromptPart, ...]:
    """The whole prompt of a fresh stream: context, retained units (oldest first), the append.

    history: the retained units only, each complete, the one just answered included unless it was
    dropped. Raises RenderError when the length is not `expected_tokens`.
    """
    return _checked(
        prompt_parts(context, previous_ids, history, pending, ids, lengths), expected_tokens
    )


def append_parts(
    pending: UnitInput, completed: HistoryUnit | None, ids: LayoutIds, lengths: MediaLengths
) -> tuple[PromptPart, ...]:
    """`render_append` without its check of the length."""
    writer = _Writer(ids, lengths)
    if completed is not None:
        writer.closure(completed.terminator)
    writer.unit_input(pending)
    return writer.parts()


def prompt_parts(
    context: PromptContext,
    previous_ids: Sequence[int],
    history: Sequence[HistoryUnit],
    pending: UnitInput,
    ids: LayoutIds,
    lengths: MediaLengths,
) -> tuple[PromptPart, ...]:
    """`render_prompt` without its check of the length."""
    writer = _Writer(ids, lengths)
    writer.context(context, previous_ids)
    for unit in history:
        writer.unit(unit)
    writer.unit_input(pending)
    return writer.parts()


def history_parts(
    context: PromptContext,
    previous_ids: Sequence[int],
    history: Sequence[HistoryUnit],
    ids: LayoutIds,
    lengths: MediaLengths,
) -> tuple[PromptPart, ...]:
    """Context and closed units alone: what a stream opened ahead of its next append holds."""
    writer = _Writer(ids, lengths)
    writer.context(context, previous_ids)
    for unit in history:
        writer.unit(unit)
    return writer.parts()


def unit_parts(unit: HistoryUnit, ids: LayoutIds, lengths: MediaLengths) -> tuple[PromptPart, ...]:
    """One closed unit as it stands in a rebuilt prompt."""
    writer = _Writer(ids, lengths)
    writer.unit(unit)
    return writer.parts()


def layout_ids(parts: Sequence[PromptPart], ids: LayoutIds) -> list[list[int]]:
    """The ids of a prompt with slots in place of rows, run-length coded: [[id, count], ...]."""
    runs: list[list[int]] = []
    for part in parts:
        if isinstance(part, MediaPart):
            _add_run(runs, _slot_id(part.kind, ids), part.length)
        else:
            for id_ in part.ids:
                _add_run(runs, id_, 1)
    return runs


def require_length(parts: Sequence[PromptPart], expected_tokens: int) -> None:
    """Raises RenderError unless the parts have exactly `expected_tokens` positions."""
    length = parts_length(parts)
    if length != expected_tokens:
        raise RenderError(
            RenderErrorCode.LENGTH_MISMATCH,
            f"rendered {length} positions where {expected_tokens} are planned",
        )


def _checked(parts: tuple[PromptPart, ...], expected_tokens: int) -> tuple[PromptPart, ...]:
    require_length(parts, expected_tokens)
    return parts


def _slot_id(kind: MediaKind, ids: LayoutIds) -> int:
    if kind is MediaKind.AUDIO:
        return ids.audio_slot
    if kind is MediaKind.REFERENCE:
        return ids.reference_slot
    return _image_id(ids.image_slot)


def _image_id(id_: int | None) -> int:
    if id_ is None:
        raise RenderError(
            RenderErrorCode.NO_IMAGE_TOKENS, "the tokenizer has no tokens for image blocks"
        )
    return id_


def _add_run(runs: list[list[int]], id_: int, count: int) -> None:
    if runs and runs[-1][0] == id_:
        runs[-1][1] += count
    else:
        runs.append([id_, count])


class _Writer:
    """Collects parts; neighbouring texts become one part."""

    def __init__(self, ids: LayoutIds, lengths: MediaLengths) -> None:
        self._ids = ids
        self._lengths = lengths
        self._parts: list[PromptPart] = []
        self._text: list[int] = []

    def context(self, context: PromptContext, previous_ids: Sequence[int]) -> None:
        self._text.extend(context.prefix_ids)
        if context.reference_positions:
            self._media(MediaKind.REFERENCE, 0, 0, context.reference_positions)
        if previous_ids:
            self._text.extend(context.marker_ids)
            self._text.extend(previous_ids)
        self._text.extend(context.suffix_ids)

    def unit(self, unit: HistoryUnit) -> None:
        self.unit_input(unit.input)
        self._text.extend(unit.ids)
        self.closure(unit.terminator)

    def unit_input(self, unit: UnitInput) -> None:
        self._text.append(self._ids.unit)
        for index, kind in enumerate(unit.blocks):
            opening, closing = self._block_ids(kind)
            self._text.append(opening)
            self._media(MediaKind.VISION, unit.seq, index, self._lengths.image_block)
            self._text.append(closing)
        for chunk in range(unit.chunks):
            if chunk:
                self._text += (self._ids.unit_end, self._ids.unit)
            self._media(MediaKind.AUDIO, unit.seq, chunk, self._lengths.audio_chunk)

    def closure(self, terminator: int | None) -> None:
        if terminator is not None:
            self._text.append(terminator)
        self._text.append(self._ids.unit_end)

    def parts(self) -> tuple[PromptPart, ...]:
        self._flush_text()
        return tuple(self._parts)

    def _block_ids(self, kind: BlockKind) -> tuple[int, int]:
        ids = self._ids
        if kind is BlockKind.SOURCE:
            return _image_id(ids.image), _image_id(ids.image_end)
        return _image_id(ids.slice), _image_id(ids.slice_end)

    def _media(self, kind: MediaKind, unit: int, index: int, length: int) -> None:
        self._flush_text()
        self._parts.append(MediaPart(kind, unit, index, length))

    def _flush_text(self) -> None:
        if self._text:
            self._parts.append(TextPart(tuple(self._text)))
            self._text.clear()
