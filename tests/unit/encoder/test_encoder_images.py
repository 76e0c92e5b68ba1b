"""Decoding camera frames: limits, damage, and the blocks that come out."""

import contextlib
import io
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from duplex_sidecar.model.minicpmo45.framing import FrameSize, block_kinds
from duplex_sidecar.stages.encoder.images import MAX_FRAME_BYTES, FrameError, frame_blocks

pytestmark = pytest.mark.unit


def picture(width: int, height: int, *, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A gradient with a bright dot, so that turned or swapped pictures differ."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, down, np.full_like(across, 40)], axis=-1).astype(np.uint8)
    pixels[0, 0] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + header


def test_one_frame_is_one_block_of_its_own_shape():
    (block,) = frame_blocks([picture(896, 448)])
    assert block.shape == (3, 322, 630)
    assert block.dtype == np.float32
    assert block.min() >= -1.0
    assert block.max() <= 1.0
    # Red grows to the right, green downwards, blue is constant.
    assert (np.diff(block[0].mean(0)) > -0.01).all()
    assert (np.diff(block[1].mean(1)) > -0.01).all()
    assert abs(block[2, 100:].mean() - (40 / 255 - 0.5) / 0.5) < 0.01


def test_a_pair_is_source_slices_and_composite_in_kv_order():
    blocks = frame_blocks([picture(1280, 720), picture(640, 480, kind="JPEG")])
    assert [block.shape for block in blocks] == [
        (3, 336, 602),
        (3, 476, 420),
        (3, 476, 420),
        (3, 392, 518),
    ]
    # Together the two slices are the whole frame: left half, then right half.
    assert blocks[1][0].mean() < blocks[2][0].mean()
    assert abs(blocks[1][1].mean() - blocks[2][1].mean()) < 0.02


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_other_colour_modes_become_rgb(mode):
    assert frame_blocks([picture(60, 40, mode=mode)])[0].shape[0] == 3


def test_no_frames_no_blocks():
    assert frame_blocks([]) == []


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=2))
def test_as_many_blocks_as_framing_reserves(sizes):
    frames = []
    for width, height in sizes:
        file = io.BytesIO()
        Image.new("L", (width, height)).save(file, "PNG", compress_level=1)
        frames.append(file.getvalue())
    for high_resolution in (True, False):
        kinds = block_kinds(
            [FrameSize(width, height) for width, height in sizes], high_resolution=high_resolution
        )
        blocks = frame_blocks(frames, high_resolution=high_resolution)
        assert len(blocks) == len(kinds)
        assert all(side % 14 == 0 for block in blocks for side in block.shape[1:])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an image",
        picture(64, 64)[:-40],
        picture(64, 64, kind="JPEG")[:300],
        picture(64, 64)[:60] + b"\x00" * 200,
        picture(64, 64, kind="GIF", mode="P"),
        picture(64, 64, kind="BMP"),
        png_header(64, 64),
        bytes(MAX_FRAME_BYTES + 1),
    ],
    ids=["empty", "text", "cut png", "cut jpeg", "bad png", "gif", "bmp", "no pixels", "too long"],
)
def test_what_cannot_be_decoded_is_refused(data):
    with pytest.raises(FrameError, match="frame 0"):
        frame_blocks([data])


@pytest.mark.parametrize("size", [(8193, 1), (1, 8193), (4097, 4096), (60_000, 60_000)])
def test_a_huge_picture_is_refused_by_its_header(size):
    with pytest.raises(FrameError):
        frame_blocks([png_header(*size)])


def test_the_second_frame_is_named_and_a_third_is_refused():
    with pytest.raises(FrameError, match="frame 1"):
        frame_blocks([picture(20, 20), b""])
    with pytest.raises(FrameError, match="3 frames"):
        frame_blocks([picture(20, 20)] * 3)


# --- what stands in a file beside the picture -----------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def best_of(times: int, data: bytes) -> float:
    """Seconds that a frame costs when nobody else is in the way."""
    found: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        with contextlib.suppress(FrameError):
            frame_blocks([data])
        found.append(time.perf_counter() - started)
    return min(found)


BOMB = zlib.compress(bytes(1 << 20), 9)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    "content", [b"a\0\0" + BOMB, b"Exif\0\0", b"MPF\0"], ids=["profile", "note", "pictures"]
)
def test_what_stands_beside_the_picture_costs_nothing(kind: str, content: bytes) -> None:
    plain = picture(256, 256, kind=kind)
    if kind == "PNG":
        full = plain[:33] + chunk(b"iCCP", content) * 1000 + plain[33:]
    else:
        segment = b"\xff\xe2" + struct.pack(">H", 2 + len(content)) + content
        full = plain[:2] + segment * 40 + plain[2:]
    assert (frame_blocks([full])[0] == frame_blocks([plain])[0]).all()
    assert best_of(3, full) < 10 * best_of(3, plain) + 0.05


@pytest.mark.parametrize(
    "data",
    [
        picture(64, 64)[:33] + chunk(b"IDAT", b"") * 100_000,
        picture(64, 64, kind="JPEG")[:2] + b"\xff\xdb\0\2" * 100_000,
        picture(64, 64, kind="JPEG")[:2] + (b"\xff\xdb\xff\xff" + bytes(65_533)) * 60,
        picture(64, 64, kind="JPEG")[:-2] + b"\xff\xda\0\2" * 100_000,
    ],
    ids=["chunks", "segments", "tables", "scans"],
)
def test_a_flood_of_parts_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(FrameError, match="more than"):
        frame_blocks([data])
    assert best_of(3, data) < 10 * best_of(3, picture(256, 256)) + 0.05


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_keeps_its_colours(mode: str, progressive: bool) -> None:
    file = io.BytesIO()
    made = Image.open(io.BytesIO(picture(64, 48))).convert(mode)
    made.save(file, "JPEG", quality=95, progressive=progressive, comment=b"note", exif=b"Exif\0\0")
    expected = Image.open(io.BytesIO(file.getvalue())).convert("RGB").resize((518, 392), 3)
    (block,) = frame_blocks([file.getvalue()])
    assert abs(np.asarray(expected).mean((0, 1)) / 127.5 - 1 - block.mean((1, 2))).max() < 0.02


@pytest.mark.parametrize("interlace", [0, 1])
def test_a_png_keeps_palette_and_transparency(interlace: int) -> None:
    file = io.BytesIO()
    made = Image.open(io.BytesIO(picture(60, 40, mode="P")))
    made.save(file, "PNG", transparency=3, interlace=interlace)
    again = frame_blocks([file.getvalue()])[0]
    assert (again == frame_blocks([picture(60, 40, mode="P")])[0]).all()
