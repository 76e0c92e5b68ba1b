"""Camera frames as they arrive: bytes kept as they are, only the header is read here.

The pixels are decoded in the encoder's own process, so a malicious image never reaches a decoder in
the sidecar. Nor does it an image library's reader: even to tell the size, that inflates profiles
and texts which stand ahead of the pixels.
"""

from typing import Final

import msgspec

from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.framing.image_files import (
    ImageFileError,
    is_jpeg,
    is_png,
    jpeg_size,
    png_size,
)
from duplex_sidecar.model.minicpmo45.framing import FrameSize

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_FRAME_PIXELS: Final = 4096 * 4096
MAX_FRAME_SHAPE: Final = 64
"""Longest side over shortest."""


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
    if is_png(data):
        read = png_size
    elif is_jpeg(data):
        read = jpeg_size
    else:
        raise FramingError(
            FramingErrorCode.FRAME_FORMAT_UNSUPPORTED, "the image is neither JPEG nor PNG"
        )
    try:
        return read(data)
    except ImageFileError as error:
        raise FramingError(FramingErrorCode.FRAME_UNREADABLE, f"it is {error}") from None
