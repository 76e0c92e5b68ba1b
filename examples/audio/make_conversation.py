"""Make the recording: a spoken script of three made-up voices with pauses for the answers.

    python examples/audio/make_conversation.py OUT.flac        (needs espeak-ng on the PATH)

The file in this folder was made by exactly this; run it only to change the recording.
"""

import io
import subprocess
import sys
import wave
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import soxr
from numpy.typing import NDArray

RATE_HZ = 16_000
PEAK = 0.5
KEPT_BITS = 12
"""Of 16: the lowest bits of a synthetic voice are of no use, and FLAC leaves constant ones out."""


@dataclass(frozen=True)
class Line:
    """One utterance. Starts are chosen so that no breath inside an utterance falls on the end of a
    second, where the model decides whether somebody speaks."""

    start_s: float
    voice: str
    words_per_minute: int
    text: str


ADA, BEN, CLEO = "en-gb+f3", "en-us+m3", "en-gb-scotland+f5"
LENGTH_S = 74
SCRIPT = (
    Line(1.2, ADA, 150, "Hello there. Can you hear me well? I am calling from the garden."),
    Line(8.35, BEN, 155, "Good morning. What time does the next train to the sea leave?"),
    Line(15.3, ADA, 150, "Please tell me a short story about a small boat on a wide river."),
    Line(22.35, CLEO, 145, "And did the small boat ever get home again?"),
    Line(28.1, BEN, 160, "Is it going to rain this afternoon, or can I leave my coat here?"),
    Line(35.25, ADA, 150, "How many apples are left in the basket on the table?"),
    Line(41.05, CLEO, 150, "Wait, I think somebody is at the door. Let me look who it is."),
    Line(48.0, CLEO, 145, "It was only the neighbour. Where were we?"),
    Line(53.45, BEN, 155, "What was the name of the song that we heard last night?"),
    Line(60.05, CLEO, 150, "I would like two rolls and a cup of tea, please."),
    Line(66.0, ADA, 150, "Thank you, that was all for today. Good night, and sleep well."),
)


def speak(line: Line) -> NDArray[np.float64]:
    """One utterance at 16 kHz, silence trimmed at both ends."""
    command = ["espeak-ng", "-v", line.voice, "-s", str(line.words_per_minute), "--stdout"]
    spoken = subprocess.run([*command, line.text], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(spoken)) as file:
        rate_hz = file.getframerate()
        # espeak-ng streams, so the length in its header is not to be trusted.
        data = file.readframes(min(file.getnframes(), len(spoken) // 2))
    samples = np.frombuffer(data, dtype="<i2").astype(np.float64)
    loud = np.flatnonzero(np.abs(samples) > 200)
    samples = samples[loud[0] : loud[-1] + 1]
    resampled = soxr.resample(samples, rate_hz, RATE_HZ, quality="VHQ")
    return resampled * (PEAK / np.abs(resampled).max())


def conversation() -> NDArray[np.int16]:
    """All utterances in their places, silence (digital zero) between them."""
    samples = np.zeros(LENGTH_S * RATE_HZ)
    for line in SCRIPT:
        spoken = speak(line)
        start = round(line.start_s * RATE_HZ)
        samples[start : start + len(spoken)] = spoken
    step = 2 ** (16 - KEPT_BITS)
    return (np.round(samples * 32767 / step) * step).astype(np.int16)


def write_flac(samples: NDArray[np.int16], path: Path) -> None:
    with av.open(str(path), "w", format="flac") as file:
        stream = file.add_stream("flac", rate=RATE_HZ, layout="mono")
        stream.codec_context.options = {"compression_level": "12"}
        stream.codec_context.format = "s16"
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = RATE_HZ
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)


if __name__ == "__main__":
    write_flac(conversation(), Path(sys.argv[1]))
