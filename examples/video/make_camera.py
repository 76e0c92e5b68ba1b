"""Draw the camera clip: a table with a lamp, a book and a cup that wanders and is lifted.

    python examples/video/make_camera.py OUT.mp4

The file in this folder was made by exactly this; run it only to change the clip.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

SIDE_PIXELS = 448
"""One image tile of the model: such a frame is never cut."""
FRAMES_PER_SECOND = 10
LENGTH_S = 16
TABLE_TOP = 300

WALL, WALL_LIT = (198, 190, 176), (232, 222, 196)
TABLE, BOOK, PAGE, CUP, POST = (
    (122, 84, 52),
    (150, 40, 46),
    (240, 236, 224),
    (44, 92, 168),
    (60, 60, 64),
)
SHADE, SHADE_LIT = (130, 122, 100), (255, 236, 150)


def frame_at(time_s: float) -> Image.Image:
    """The picture at a time of the clip: the lamp changes every 4 s, the cup's way takes 16 s."""
    lit = int(time_s) // 4 % 2 == 1
    image = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), WALL_LIT if lit else WALL)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, TABLE_TOP, SIDE_PIXELS, SIDE_PIXELS), fill=TABLE)
    draw.rectangle((352, 150, 360, TABLE_TOP), fill=POST)
    draw.polygon(((320, 150), (392, 150), (374, 84), (338, 84)), fill=SHADE_LIT if lit else SHADE)
    draw.polygon(((60, 360), (190, 360), (206, 404), (44, 404)), fill=BOOK)
    draw.polygon(((66, 356), (122, 352), (122, 398), (52, 400)), fill=PAGE)
    draw.polygon(((126, 352), (184, 356), (198, 400), (128, 398)), fill=PAGE)
    turn = 2 * math.pi * time_s / LENGTH_S
    x = 224 + 90 * math.sin(turn)
    y = TABLE_TOP + 6 - 110 * max(0.0, math.sin(2 * turn - 1.0))
    draw.ellipse((x + 22, y - 52, x + 62, y - 14), outline=CUP, width=9)
    draw.rounded_rectangle((x - 36, y - 66, x + 36, y), radius=10, fill=CUP)
    draw.ellipse((x - 36, y - 76, x + 36, y - 56), fill=(70, 120, 198))
    return image


def frames() -> Iterator[av.VideoFrame]:
    for number in range(LENGTH_S * FRAMES_PER_SECOND):
        picture = np.asarray(frame_at(number / FRAMES_PER_SECOND))
        yield av.VideoFrame.from_ndarray(picture, format="rgb24")


def write_clip(path: Path) -> None:
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"crf": "26"})
        stream.width = stream.height = SIDE_PIXELS
        stream.pix_fmt = "yuv420p"
        # One thread and no clock: the same numbers each time.
        stream.codec_context.thread_count = 1
        for frame in frames():
            for packet in stream.encode(frame):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)


if __name__ == "__main__":
    write_clip(Path(sys.argv[1]))
