"""Reservation, chunks and image blocks of one append."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.model.minicpmo45.constants import (
    IMAGE_BLOCK_POSITIONS,
    PATCH_PIXELS,
    TILE_PIXELS,
    UNIT_APPEND_POSITIONS,
)
from duplex_sidecar.model.minicpmo45.framing import (
    FrameSize,
    block_kinds,
    context_positions,
    force_listen,
    image_blocks,
    reserve_append,
    split_chunks,
)
from duplex_sidecar.window.parts import BlockKind

pytestmark = pytest.mark.unit

sizes = st.builds(FrameSize, st.integers(1, 4096), st.integers(1, 4096)).filter(
    lambda size: max(size.width, size.height) <= 64 * min(size.width, size.height)
)


@pytest.mark.parametrize(
    ("seq", "samples", "slots"),
    [
        (1, 16_000, 31),
        (1, 32_000, 31),
        (1, 48_000, 43),
        (2, 16_000, 13),
        (2, 32_000, 25),
        (9, 48_000, 37),
        (2, 0, 16),
        (2, 1, 16),
        (2, 24_000, 23),
        (2, 3_200_001, 768),
        (2, None, 64),
        (1, None, 84),
    ],
)
def test_reservation_follows_the_table(seq: int, samples: int | None, slots: int) -> None:
    assert reserve_append(seq, samples, (), context_positions=20).slots == slots


def test_a_unit_takes_thirteen_positions() -> None:
    assert UNIT_APPEND_POSITIONS == 13
    assert reserve_append(7, 16_000, (), 99).slots == UNIT_APPEND_POSITIONS


def test_frames_count_by_pairs() -> None:
    large, small = FrameSize(449, 448), FrameSize(448, 448)
    assert reserve_append(2, 16_000, [large], 0).vision_slots == 66
    assert reserve_append(2, 16_000, [small, large], 0).vision_slots == 132
    assert reserve_append(2, 16_000, [large, small], 0).vision_slots == 264
    assert reserve_append(2, 16_000, [None, small], 0).vision_slots == 264
    with pytest.raises(ValueError, match="3 frames"):
        reserve_append(2, 16_000, [small] * 3, 0)


def test_context_estimate_is_used_only_without_the_exact_one() -> None:
    assert context_positions(0, 65_294) == 0
    assert context_positions(None, None) == 48
    assert context_positions(None, 65_294) == 96


def test_first_appends_of_a_turn_are_forced_to_listen() -> None:
    assert [force_listen(False, seq, 2) for seq in (1, 2, 3)] == [True, True, False]
    assert force_listen(True, 9, 0)


def test_first_chunk_is_padded_on_the_left_and_leaves_no_carry() -> None:
    split = split_chunks(0, 16_000, first=True)
    assert (split.chunks, split.left_pad_samples, split.carry_samples) == (1, 560, 0)


def test_a_first_append_of_two_seconds_leaves_a_carry() -> None:
    split = split_chunks(0, 32_000, first=True)
    assert (split.chunks, split.left_pad_samples, split.carry_samples) == (1, 0, 15_440)


@given(st.integers(1, 20), st.integers(1, 20))
def test_chunks_agree_with_the_reservation(first_units: int, later_units: int) -> None:
    first = split_chunks(0, 16_000 * first_units, first=True)
    assert reserve_append(1, 16_000 * first_units, (), 0).slots == 12 * first.chunks - 1
    later = split_chunks(first.carry_samples, 16_000 * later_units, first=False)
    assert reserve_append(2, 16_000 * later_units, (), 0).slots == 12 * later.chunks + 1
    assert later.carry_samples == first.carry_samples


@given(st.lists(sizes, max_size=2), st.booleans())
def test_blocks_to_encode_are_the_reserved_ones(
    frames: list[FrameSize], high_resolution: bool
) -> None:
    blocks = image_blocks(frames, high_resolution=high_resolution)
    kinds = tuple(block.kind for frame in blocks for block in frame)
    assert kinds == block_kinds(frames, high_resolution=high_resolution)
    assert high_resolution or kinds == (BlockKind.SOURCE,) * len(frames)
    reservation = reserve_append(2, 16_000, frames, 0, high_resolution=high_resolution)
    assert reservation.blocks == kinds
    assert reservation.vision_slots == IMAGE_BLOCK_POSITIONS * len(kinds)


@given(st.lists(sizes, min_size=1, max_size=2))
def test_blocks_are_whole_patches_and_slices_tile_the_frame(frames: list[FrameSize]) -> None:
    for source, *slices in image_blocks(frames):
        assert source.kind is BlockKind.SOURCE
        assert (source.left, source.top) == (0, 0)
        assert (source.right, source.bottom) == (source.resize_width, source.resize_height)
        covered = 0
        for block in (source, *slices):
            for side in (block.left, block.top, block.right, block.bottom):
                assert side % PATCH_PIXELS == 0
            assert block.left < block.right <= block.resize_width
            assert block.top < block.bottom <= block.resize_height
        for cut in slices:
            assert cut.kind is BlockKind.SLICE
            covered += (cut.right - cut.left) * (cut.bottom - cut.top)
        if slices:
            assert covered == slices[0].resize_width * slices[0].resize_height


def test_a_wide_frame_is_cut_into_left_and_right() -> None:
    (source, left, right), (composite,) = image_blocks([FrameSize(960, 540), FrameSize(960, 540)])
    assert (source.resize_width, source.resize_height) == (602, 336)
    assert (left.left, left.top) == (0, 0)
    assert (right.left, right.right) == (left.right, right.resize_width)
    assert composite.resize_width * composite.resize_height <= TILE_PIXELS * 1.1


def test_a_small_frame_is_enlarged_and_a_square_one_cut_into_top_and_bottom() -> None:
    ((small,),) = image_blocks([FrameSize(64, 64)])
    assert (small.resize_width, small.resize_height) == (448, 448)
    (_, top, bottom), _ = image_blocks([FrameSize(900, 900), FrameSize(1, 1)])
    assert (top.top, bottom.top, top.left, bottom.left) == (0, top.bottom, 0, 0)
