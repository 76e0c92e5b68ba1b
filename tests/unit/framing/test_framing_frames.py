"""Camera frames are checked by their headers."""

import io
import struct
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
