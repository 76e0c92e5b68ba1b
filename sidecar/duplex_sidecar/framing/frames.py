"""Camera frames as they arrive: bytes kept as they are, only the header is read here.

The pixels are decoded in the encoder's own process, so a malicious image never reaches a decoder in
the sidecar.
"""

from io import BytesIO
from typing import Final

import msgspec
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.model.minicpmo45.framing import FrameSize

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_FRAME_PIXELS: Final = 4096 * 4096
MAX_FRAME_SHAPE: Final = 64
"""Longest side over shortest."""

_PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_MAGIC: Final = b"\xff\xd8\xff"


class Frame(msgspec.Struct, frozen=True):
    """One JPEG or PNG image as received, and its size in pixels."""

    data: bytes
    size: FrameSize


def read_frame(data: bytes) -> Frame:
    """Check a camera frame by its header. Raises FramingError FRAME_TOO_LARGE,
    FRAME_FORMAT_UNSUPPORTED, FRAME_UNREADABLE or FRAME_SHAPE_UNSUPPORTED."""
    if len(data) > MAX_FRAME_BYTES:
        raise FramingError(
            FramingErrorCode.FRAME_TOO_LARGE,
            f"{len(data)} bytes; allowed are {MAX_FRAME_BYTES}",
        )
    width, height = _header_size(data)
    if width < 1 or height < 1:
        raise FramingError(FramingErrorCode.FRAME_UNREADABLE, "the image has no pixels")
    if width * height > MAX_FRAME_PIXELS:
        raise FramingError(
            FramingErrorCode.FRAME_TOO_LARGE,
            f"{width} x {height} pixels; allowed are {MAX_FRAME_PIXELS} in all",
        )
    if max(width, height) > MAX_FRAME_SHAPE * min(width, height):
        raise FramingError(
            FramingErrorCode.FRAME_SHAPE_UNSUPPORTED,
            f"{width} x {height} pixels; a side may be {MAX_FRAME_SHAPE} times the other",
        )
    return Frame(data, FrameSize(width, height))


def _header_size(data: bytes) -> tuple[int, int]:
    """Width and height. The readers are called directly: `Image.open` would look at more formats
    and warn about sizes that are refused here anyway."""
    if data.startswith(_PNG_MAGIC):
        reader = PngImageFile
    elif data.startswith(_JPEG_MAGIC):
        reader = JpegImageFile
    else:
        raise FramingError(
            FramingErrorCode.FRAME_FORMAT_UNSUPPORTED, "the image is neither JPEG nor PNG"
        )
    try:
        with reader(BytesIO(data)) as image:
            return image.size
    except Exception:  # the readers raise many kinds for broken headers; all mean the same here
        raise FramingError(
            FramingErrorCode.FRAME_UNREADABLE, "the header of the image cannot be read"
        ) from None
