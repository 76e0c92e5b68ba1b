"""SigLIP and resampler: sizes, order and positions. Values against vLLM: the integration test."""

import copy
import io

import numpy as np
import pytest
import torch
from PIL import Image

from duplex_sidecar.stages.encoder.images import frame_blocks
from duplex_sidecar.stages.encoder.vision import sine_positions

pytestmark = pytest.mark.unit


def pixels(height: int, width: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(-1, 1, (3, height, width))
    return values.astype(np.float32)


def test_every_block_gives_64_rows_in_the_order_given(encoders):
    blocks = [pixels(28, 56, 1), pixels(56, 28, 2), pixels(28, 56, 3), pixels(14, 14, 4)]
    rows = encoders.vision.encode(blocks)
    assert [tuple(row.shape) for row in rows] == [(64, 256)] * 4
    for block, row in zip(blocks, rows, strict=True):
        (alone,) = encoders.vision.encode([block])
        assert (alone - row).abs().max() <= 1e-5


def frame(height: int, width: int, seed: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).save(file, "PNG")
    return file.getvalue()


SESSIONS = {
    "one frame": [frame(120, 160, 1)],
    "two frames, the first in slices": [frame(480, 640, 2), frame(96, 128, 3)],
    "the same sizes, other pictures": [frame(480, 640, 4), frame(96, 128, 5)],
    "two small ones": [frame(96, 128, 6), frame(96, 128, 7)],
    "the first one's picture": [frame(120, 160, 1)],
}


@pytest.mark.parametrize("shift", [0, 2])
def test_frames_of_several_sessions_together_have_the_rows_that_each_has_alone(encoders, shift):
    """One pass over all of them, whoever stands first: tower and resampler take blocks of a size
    together, whosever they are, and nobody's rows depend on who else is there."""
    names = [*list(SESSIONS)[shift:], *list(SESSIONS)[:shift]]
    blocks = {name: frame_blocks(SESSIONS[name], high_resolution=True) for name in names}
    assert {len(each) for each in blocks.values()} == {1, 2, 4}
    together = iter(encoders.vision.encode([block for name in names for block in blocks[name]]))
    rows = {name: [next(together) for _ in blocks[name]] for name in names}
    for name in names:
        alone = encoders.vision.encode(blocks[name])
        for row, own in zip(rows[name], alone, strict=True):
            assert (row - own).abs().max() <= 1e-5
    (first,), (twin,) = rows["one frame"], rows["the first one's picture"]
    assert (first - twin).abs().max() <= 1e-5
    pair = zip(*(rows[n] for n in list(SESSIONS)[1:3]), strict=True)
    assert all((one - other).abs().max() > 1e-2 for one, other in pair), "each its own picture"


def test_no_blocks_no_rows(encoders):
    assert encoders.vision.encode([]) == []


def test_the_same_pixels_at_another_place_give_other_rows(encoders):
    block = pixels(28, 28, 5)
    (rows,) = encoders.vision.encode([block])
    (turned,) = encoders.vision.encode([np.ascontiguousarray(block[:, ::-1])])
    assert (rows - turned).abs().max() > 0.05


def test_a_picture_wider_than_the_position_table_is_encoded(encoders):
    (rows,) = encoders.vision.encode([pixels(14, 14 * 100, 6)])
    assert rows.isfinite().all()


def test_positions_tell_column_then_row():
    positions = sine_positions(3, 5, torch.zeros(1, 16)).view(3, 5, 16)
    assert torch.equal(positions[0, :, :8], positions[2, :, :8])
    assert torch.equal(positions[:, 0, 8:], positions[:, 4, 8:])
    # First number of either half: the sine of the plain coordinate.
    assert torch.allclose(positions[0, :, 0], torch.arange(5.0).sin())
    assert torch.allclose(positions[:, 0, 8], torch.arange(3.0).sin())
    assert torch.allclose(positions[0, :, 4], torch.arange(5.0).cos())


def test_rows_have_the_type_of_the_weights(encoders):
    modules = encoders.modules
    vision = type(encoders.vision)(encoders.shape, _half(modules.vpm), _half(modules.resampler))
    (rows,) = vision.encode([pixels(28, 28, 7)])
    (exact,) = encoders.vision.encode([pixels(28, 28, 7)])
    assert rows.dtype is torch.bfloat16
    assert (rows.float() - exact).abs().max() < 0.15


def _half(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(module).to(torch.bfloat16)
