"""Image files by their structure alone: how large the picture is, and the file without what is no
picture. Pure, and in bounded time for any bytes: nothing is decoded or inflated here.

PNG: W3C PNG (Second Edition), 5. JPEG: ITU-T T.81, B.1.
"""

from collections.abc import Iterator
from typing import Final

MAX_JPEG_SEGMENTS: Final = 64
"""Of a JPEG file ahead of its pixels: 15 are usual, and a large profile has 20 more."""
MAX_JPEG_SCANS: Final = 32
"""A progressive file of the usual encoders has 10; each costs a pass over all pixels."""
MAX_PNG_CHUNKS: Final = 4096
"""An encoder that writes 4 KiB a chunk needs 1,024 for the largest frame."""

_PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_MAGIC: Final = b"\xff\xd8\xff"
_PNG_HEADER_END: Final = 24
_PICTURE_CHUNKS: Final = frozenset((b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_FRAME_MARKERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start of frame, of any process. The others there are tables and an extension."""
_BARE_MARKERS: Final = frozenset((0x01, *range(0xD0, 0xD9)))
"""Without a length and content: nothing of them belongs ahead of the pixels."""
_START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_FILL: Final = 0xFF
_QUANTIZATION: Final = 0xDB
_MAX_QUANTIZATION_BYTES: Final = 2 + 4 * 129
"""Four tables, which is all that there can be."""
_COMMENT: Final = 0xFE
_JFIF, _ADOBE = 0xE0, 0xEE
"""The two application segments that say how the colours are meant."""
_APPLICATION: Final = frozenset(range(0xE0, 0xF0))


class ImageFileError(ValueError):
    """The file is not built as such a file is, or of more parts than any camera writes."""


def is_png(data: bytes) -> bool:
    return data.startswith(_PNG_MAGIC)


def is_jpeg(data: bytes) -> bool:
    return data.startswith(_JPEG_MAGIC)


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, out of the first 24 bytes. Raises ImageFileError."""
    if len(data) < _PNG_HEADER_END or data[8:16] != b"\x00\x00\x00\x0dIHDR":
        raise ImageFileError("a PNG begins with its header")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, out of the first start of frame. Raises ImageFileError."""
    for marker, start, end in _jpeg_segments(data):
        if marker in _FRAME_MARKERS:
            if end - start < 7:
                break
            height, width = data[start + 3 : start + 5], data[start + 5 : start + 7]
            return int.from_bytes(width), int.from_bytes(height)
    raise ImageFileError("a JPEG without a frame")


def bare_png(data: bytes) -> bytes:
    """The same picture in a file of header, palette, transparency and pixels alone; what is cut off
    in the middle stays so. Raises ImageFileError."""
    png_size(data)
    kept = [data[: (position := len(_PNG_MAGIC) + 25)]]
    for _ in range(MAX_PNG_CHUNKS):
        end = position + 12 + int.from_bytes(data[position : position + 4])
        kind = data[position + 4 : position + 8]
        if kind in _PICTURE_CHUNKS:
            kept.append(data[position:end])
        if kind == b"IEND" or end >= len(data):
            return b"".join(kept)
        position = end
    raise ImageFileError(f"a PNG of more than {MAX_PNG_CHUNKS} chunks")


def bare_jpeg(data: bytes) -> bytes:
    """The same picture in a file without comments and foreign application data. Raises
    ImageFileError."""
    kept, seen, position = [data[:2]], set[int](), 2
    for marker, start, end in _jpeg_segments(data):
        meant = marker not in _APPLICATION and marker != _COMMENT
        if meant or (marker in (_JFIF, _ADOBE) and marker not in seen):
            kept.append(data[start - 2 : start])
            kept.append(data[start:end])
        if marker == _QUANTIZATION and end - start > _MAX_QUANTIZATION_BYTES:
            raise ImageFileError("a JPEG of more than four quantization tables in a segment")
        seen.add(marker)
        position = end
        if marker == _START_OF_SCAN:
            if data.count(b"\xff\xda", start) >= MAX_JPEG_SCANS:
                raise ImageFileError(f"a JPEG of more than {MAX_JPEG_SCANS} scans")
            return b"".join((*kept, data[position:]))
    raise ImageFileError("a JPEG without pixels")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, and from where to where its length and content reach, of each segment up to the first
    start of scan. Raises ImageFileError."""
    position = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[position : position + 1] != b"\xff" or len(data) < position + 4:
            raise ImageFileError("a JPEG that breaks off, or with bytes between its segments")
        marker = data[position + 1]
        if marker == _FILL:
            position += 1
            continue
        if marker in _BARE_MARKERS or marker == _END_OF_IMAGE:
            raise ImageFileError("a JPEG that ends before its pixels")
        start = position + 2
        position = start + max(2, int.from_bytes(data[start : start + 2]))
        yield marker, start, min(position, len(data))
        if marker == _START_OF_SCAN:
            return
    raise ImageFileError(f"a JPEG of more than {MAX_JPEG_SEGMENTS} segments before its pixels")
