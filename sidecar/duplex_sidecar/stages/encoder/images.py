"""Camera frames as received -> pixel blocks. The only place that parses image files."""

import io
import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from duplex_sidecar.framing.image_files import bare_jpeg, bare_png, is_jpeg, is_png
from duplex_sidecar.model.minicpmo45.constants import MAX_FRAMES_PER_APPEND
from duplex_sidecar.model.minicpmo45.framing import FrameSize, ImageBlock, image_blocks

MAX_FRAME_BYTES = 4 * 1024 * 1024
MAX_FRAME_SIDE_PIXELS = 8192
MAX_FRAME_PIXELS = 4096 * 4096
"""Decoded, 48 MiB. Both limits are checked on the header, before a pixel is decoded."""

_FORMATS = ("JPEG", "PNG")

Pixels = NDArray[np.float32]
"""[3, height, width], -1 to 1; height and width are whole patches."""


class FrameError(Exception):
    """A frame is no JPEG or PNG image within the limits."""


def frame_blocks(frames: Sequence[bytes], *, high_resolution: bool = True) -> list[Pixels]:
    """The image blocks of an append's frames in KV order, as `model.minicpmo45.framing` cuts them.

    Raises FrameError: too many frames, too large, or undecodable."""
    if len(frames) > MAX_FRAMES_PER_APPEND:
        raise FrameError(f"{len(frames)} frames, at most {MAX_FRAMES_PER_APPEND}")
    images = [_decoded(index, data) for index, data in enumerate(frames)]
    sizes = [FrameSize(image.width, image.height) for image in images]
    cuts = image_blocks(sizes, high_resolution=high_resolution)
    return [
        block for image, blocks in zip(images, cuts, strict=True) for block in _cut(image, blocks)
    ]


def _decoded(index: int, data: bytes) -> Image.Image:
    """The frame's pixels as RGB. Raises FrameError."""
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"frame {index}: {len(data)} bytes, at most {MAX_FRAME_BYTES}")
    try:
        with warnings.catch_warnings():
            # Pillow warns about sizes that are refused here anyway.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(_bare(data)), formats=_FORMATS)
        width, height = image.size
        if max(width, height) <= MAX_FRAME_SIDE_PIXELS and width * height <= MAX_FRAME_PIXELS:
            return image.convert("RGB")
    except Exception as error:
        # The decoders raise anything from SyntaxError to struct.error on damaged input.
        raise FrameError(f"frame {index}: {type(error).__name__}: {error}") from None
    raise FrameError(f"frame {index}: {width} x {height} pixels are too many")


def _bare(data: bytes) -> bytes:
    """The picture alone: Pillow reads, and inflates, whatever else stands in a file, and this
    process serves all sessions. Raises ImageFileError."""
    if is_png(data):
        return bare_png(data)
    return bare_jpeg(data) if is_jpeg(data) else data


def _cut(image: Image.Image, blocks: Sequence[ImageBlock]) -> list[Pixels]:
    resized: dict[tuple[int, int], Image.Image] = {}
    pixels: list[Pixels] = []
    for block in blocks:
        size = (block.resize_width, block.resize_height)
        if size not in resized:
            resized[size] = image.resize(size, Image.Resampling.BICUBIC)
        pixels.append(
            _pixels(resized[size].crop((block.left, block.top, block.right, block.bottom)))
        )
    return pixels


def _pixels(image: Image.Image) -> Pixels:
    scaled = (np.asarray(image, dtype=np.float32) / 255.0 - 0.5) / 0.5
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))
