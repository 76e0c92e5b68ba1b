"""How many positions an append takes, and what its frames become (contract section A).

The sidecar reserves before the encoder runs; the encoder asks the same functions which image blocks
to make. Rows and reserved positions are therefore equal by construction, and checked all the same.
"""

import math
from collections.abc import Sequence

import msgspec

from duplex_sidecar.model.minicpmo45.constants import (
    CHUNK_POSITIONS,
    CLOSURE_POSITIONS,
    FIRST_CHUNK_SAMPLES,
    IMAGE_BLOCK_POSITIONS,
    INEXACT_EXTRA_POSITIONS,
    INEXACT_MAX_POSITIONS,
    INEXACT_MIN_POSITIONS,
    MAX_FRAMES_PER_APPEND,
    PAIR_MAX_SLICES,
    PATCH_PIXELS,
    SAMPLES_PER_POSITION,
    SINGLE_MAX_SLICES,
    TILE_PIXELS,
    TILE_SIDE_PIXELS,
    UNDECODABLE_POSITIONS,
    UNIT_SAMPLES,
    UNKNOWN_CONTEXT_POSITIONS,
    UNKNOWN_REFERENCE_EXTRA_POSITIONS,
)
from duplex_sidecar.window.parts import BlockKind


class FrameSize(msgspec.Struct, frozen=True):
    """Size of a camera frame in pixels, as its header says."""

    width: int
    height: int


class ImageBlock(msgspec.Struct, frozen=True):
    """One image block to encode: the frame resized (bicubic) to resize_width x resize_height, then
    cut to the box [left, right) x [top, bottom). All sides are multiples of 14 pixels."""

    kind: BlockKind
    resize_width: int
    resize_height: int
    left: int
    top: int
    right: int
    bottom: int


class Reservation(msgspec.Struct, frozen=True):
    """Positions of one append. slots: all of them; vision_slots and context_slots are part of it.
    blocks: image blocks in KV order, all frames."""

    slots: int
    vision_slots: int
    context_slots: int
    blocks: tuple[BlockKind, ...]


class ChunkSplit(msgspec.Struct, frozen=True):
    """What the audio encoder makes of an append. left_pad_samples: zeros put ahead of it;
    carry_samples: what stays for the next append."""

    chunks: int
    left_pad_samples: int
    carry_samples: int


def split_chunks(carry_samples: int, new_samples: int, *, first: bool) -> ChunkSplit:
    """Whole chunks in carry + new samples. The first chunk of a session takes 16,560 samples and
    is left-padded to that; every later one takes 16,000."""
    waiting = carry_samples + new_samples
    pad = 0
    chunks = 0
    if first:
        pad = max(0, FIRST_CHUNK_SAMPLES - waiting)
        waiting += pad - FIRST_CHUNK_SAMPLES
        chunks = 1
    chunks += waiting // UNIT_SAMPLES
    return ChunkSplit(chunks=chunks, left_pad_samples=pad, carry_samples=waiting % UNIT_SAMPLES)


def reserve_append(
    seq: int,
    samples: int | None,
    frames: Sequence[FrameSize | None],
    context_positions: int,
    tile_pixels: int | None = TILE_PIXELS,
    *,
    high_resolution: bool = True,
) -> Reservation:
    """Positions of an append, context (for seq 1) and frames included.

    samples: new 16 kHz samples, None when the audio is missing or cannot be decoded. frames: None
    for a frame whose header cannot be read. context_positions: the session context, counted for
    seq 1 only. tile_pixels: None when not known. high_resolution: as in `block_kinds`. The sidecar
    admits whole units of readable frames only; the other rows of the table are the public
    implementation's guesses.
    """
    blocks = block_kinds(frames, tile_pixels, high_resolution=high_resolution)
    vision = IMAGE_BLOCK_POSITIONS * len(blocks)
    context = context_positions if seq <= 1 else 0
    return Reservation(
        slots=_audio_positions(seq, samples) + vision + context,
        vision_slots=vision,
        context_slots=context,
        blocks=blocks,
    )


def context_positions(exact: int | None, reference_samples: int | None) -> int:
    """Positions of the session context: exact where known, else the contract's estimate."""
    if exact is not None:
        return exact
    estimate = UNKNOWN_CONTEXT_POSITIONS
    if reference_samples:
        estimate += reference_samples // SAMPLES_PER_POSITION + UNKNOWN_REFERENCE_EXTRA_POSITIONS
    return estimate


def block_kinds(
    frames: Sequence[FrameSize | None],
    tile_pixels: int | None = TILE_PIXELS,
    *,
    high_resolution: bool = True,
) -> tuple[BlockKind, ...]:
    """Image blocks of an append in KV order. Of two frames the first may be cut into two slices;
    one that cannot be measured is counted with them. high_resolution: the public rule; without it
    no frame is ever cut. Raises ValueError for more than two frames."""
    kinds: list[BlockKind] = []
    for frame, most in zip(frames, _max_slices(len(frames), high_resolution), strict=True):
        kinds.append(BlockKind.SOURCE)
        cut = frame is None or tile_pixels is None or frame.width * frame.height > tile_pixels
        if cut and most > 1:
            kinds += [BlockKind.SLICE] * most
    return tuple(kinds)


def image_blocks(
    frames: Sequence[FrameSize], *, high_resolution: bool = True
) -> tuple[tuple[ImageBlock, ...], ...]:
    """How to cut each frame of an append; kinds in the order of `block_kinds`.

    A frame that is not cut is resized to about 448 x 448 pixels of its own shape, up or down; of a
    frame that is cut the source is only ever made smaller.
    """
    return tuple(
        _frame_blocks(frame, most)
        for frame, most in zip(frames, _max_slices(len(frames), high_resolution), strict=True)
    )


def force_listen(append_flag: bool, turn_seq: int, force_listen_count: int) -> bool:
    """Whether the model must listen to this append: told so, or one of the first N of a turn.

    turn_seq: number of the append in its turn, from 1.
    """
    return append_flag or turn_seq <= force_listen_count


def _audio_positions(seq: int, samples: int | None) -> int:
    """Closure, `<unit>` and audio positions. Exact for whole units: the last chunk's `</unit>`
    belongs to the next append."""
    if samples is None:
        return UNDECODABLE_POSITIONS
    if samples == 0 or samples % UNIT_SAMPLES:
        guess = samples // SAMPLES_PER_POSITION + INEXACT_EXTRA_POSITIONS
        return min(max(guess, INEXACT_MIN_POSITIONS), INEXACT_MAX_POSITIONS)
    seconds = samples // UNIT_SAMPLES
    if seq > 1:
        return CLOSURE_POSITIONS - 1 + CHUNK_POSITIONS * seconds
    # The first chunk needs 1,035 ms, so a first append of one and of two seconds gives one chunk.
    return CHUNK_POSITIONS * max(1, seconds - 1) - 1


def _max_slices(frames: int, high_resolution: bool) -> tuple[int, ...]:
    if frames > MAX_FRAMES_PER_APPEND:
        raise ValueError(f"{frames} frames; an append has at most {MAX_FRAMES_PER_APPEND}")
    if high_resolution and frames == MAX_FRAMES_PER_APPEND:
        return PAIR_MAX_SLICES
    return (SINGLE_MAX_SLICES,) * frames


def _frame_blocks(frame: FrameSize, max_slices: int) -> tuple[ImageBlock, ...]:
    cut = max_slices > 1 and frame.width * frame.height > TILE_PIXELS
    width, height = _best_size(frame.width, frame.height, upscale=not cut)
    source = ImageBlock(BlockKind.SOURCE, width, height, 0, 0, width, height)
    if not cut:
        return (source,)
    columns, rows = _grid(frame, max_slices)
    cell_width, cell_height = _best_size(
        _to_multiple(frame.width, columns) / columns,
        _to_multiple(frame.height, rows) / rows,
        upscale=True,
    )
    slices = (
        ImageBlock(
            kind=BlockKind.SLICE,
            resize_width=cell_width * columns,
            resize_height=cell_height * rows,
            left=column * cell_width,
            top=row * cell_height,
            right=(column + 1) * cell_width,
            bottom=(row + 1) * cell_height,
        )
        for row in range(rows)
        for column in range(columns)
    )
    return (source, *slices)


def _grid(frame: FrameSize, slices: int) -> tuple[int, int]:
    """(columns, rows) with columns * rows = slices, nearest to the frame's shape; a tie goes to
    fewer columns."""
    shape = math.log(frame.width / frame.height)
    grids = [
        (columns, slices // columns) for columns in range(1, slices + 1) if slices % columns == 0
    ]
    return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))


def _best_size(width: float, height: float, *, upscale: bool) -> tuple[int, int]:
    """Whole patches, about as many pixels as a tile, of the same shape; smaller only if need be."""
    if upscale or width * height > TILE_PIXELS:
        shape = width / height
        height = int(TILE_SIDE_PIXELS / math.sqrt(shape))
        width = int(height * shape)
    return _to_multiple(width, PATCH_PIXELS), _to_multiple(height, PATCH_PIXELS)


def _to_multiple(length: float, step: int) -> int:
    """The nearest multiple of `step`, at least one step."""
    return max(round(length / step) * step, step)
