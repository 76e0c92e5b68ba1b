"""Camera frames are checked by their headers."""

import contextlib
import io
import struct
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.framing.frames import MAX_FRAME_BYTES, read_frame
from duplex_sidecar.model.minicpmo45.framing import FrameSize

pytestmark = pytest.mark.unit


def image(kind: str, width: int = 64, height: int = 48) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(out, kind)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d"
        + body
        + struct.pack(">I", zlib.crc32(body))
        + b"\x00\x00\x00\x05IDAT"
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_size_comes_from_the_header(kind: str) -> None:
    data = image(kind)
    frame = read_frame(data)
    assert frame.size == FrameSize(64, 48)
    assert frame.data == data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", FramingErrorCode.FRAME_FORMAT_UNSUPPORTED),
        (b"hello", FramingErrorCode.FRAME_FORMAT_UNSUPPORTED),
        (image("GIF"), FramingErrorCode.FRAME_FORMAT_UNSUPPORTED),
        (b"\xff\xd8\xff", FramingErrorCode.FRAME_UNREADABLE),
        (image("JPEG")[:30], FramingErrorCode.FRAME_UNREADABLE),
        (image("PNG")[:20], FramingErrorCode.FRAME_UNREADABLE),
        (image("JPEG") + bytes(MAX_FRAME_BYTES), FramingErrorCode.FRAME_TOO_LARGE),
        (png_header(60_000, 60_000), FramingErrorCode.FRAME_TOO_LARGE),
        (png_header(0, 5), FramingErrorCode.FRAME_UNREADABLE),
        (image("PNG", 200, 2), FramingErrorCode.FRAME_SHAPE_UNSUPPORTED),
    ],
)
def test_bad_frames_are_named(data: bytes, code: FramingErrorCode) -> None:
    with pytest.raises(FramingError) as caught:
        read_frame(data)
    assert caught.value.code is code


@given(st.sampled_from(("JPEG", "PNG")), st.data())
def test_damaged_headers_never_raise_anything_else(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(image(kind))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(3, min(90, len(damaged) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    try:
        frame = read_frame(bytes(damaged))
    except FramingError:
        return
    assert frame.size.width >= 1


# --- files that are made to keep a reader busy ----------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def png_with(extra: bytes) -> bytes:
    """A picture with `extra`, over and over, between its header and its pixels."""
    plain = image("PNG")
    times = (MAX_FRAME_BYTES - len(plain)) // len(extra)
    return plain[:33] + extra * times + plain[33:]


def jpeg_with(extra: bytes) -> bytes:
    plain = image("JPEG")
    return plain[:2] + extra * ((MAX_FRAME_BYTES - len(plain)) // len(extra)) + plain[2:]


def best_of(times: int, data: bytes) -> float:
    """Seconds that reading a frame takes when nobody else is in the way."""
    found: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        with contextlib.suppress(FramingError):
            read_frame(data)
        found.append(time.perf_counter() - started)
    return min(found)


BOMB = zlib.compress(bytes(1 << 20), 9)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png_with(chunk(b"iCCP", b"a\0\0" + BOMB)), id="profiles that inflate"),
        pytest.param(png_with(chunk(b"zTXt", b"a\0\0" + BOMB)), id="texts that inflate"),
        pytest.param(png_with(chunk(b"prVt", b"")), id="many chunks"),
        pytest.param(jpeg_with(b"\xff\xe5\0\2"), id="many segments"),
        pytest.param(jpeg_with(b"\xff\xfe\0\2"), id="many comments"),
        pytest.param(jpeg_with(b"\xff\xe1\0\x08Exif\0\0"), id="many notes"),
        pytest.param(jpeg_with(b"\xff\xdb\0\2"), id="many tables"),
        pytest.param(jpeg_with(b"\xff"), id="padding"),
    ],
)
def test_no_file_keeps_the_sidecar_busy(data: bytes) -> None:
    assert best_of(3, data) < 50 * best_of(3, image("JPEG")) + 0.002


@pytest.mark.parametrize(
    "data", [jpeg_with(b"\xff\xfe\0\2"), jpeg_with(b"\xff"), b"\xff\xd8\xff\xd9" + bytes(90)]
)
def test_a_jpeg_that_does_not_come_to_its_pixels_is_refused(data: bytes) -> None:
    with pytest.raises(FramingError) as caught:
        read_frame(data)
    assert caught.value.code is FramingErrorCode.FRAME_UNREADABLE


@pytest.mark.parametrize("segments", [0, 40])
def test_a_camera_may_write_notes_and_profiles(segments: int) -> None:
    plain = image("JPEG")
    notes = (b"\xff\xe1\xff\xff" + bytes(65_533)) * segments
    assert read_frame(plain[:2] + notes + plain[2:]).size == FrameSize(64, 48)
