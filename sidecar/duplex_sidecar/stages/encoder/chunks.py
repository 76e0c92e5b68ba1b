"""What a session's PCM is cut into: one chunk a second, the first one 35 ms longer.

Pure counting, shared by the mel front end and the audio encoder (contract sections A and G).
"""

from enum import StrEnum

from duplex_sidecar.model.minicpmo45.constants import FIRST_CHUNK_SAMPLES, UNIT_SAMPLES

CNN_FRAMES_PER_CHUNK = 50
"""Frames of 20 ms that enter the transformer and its cache."""

CONTEXT_CNN_FRAMES = 2
"""Frames that the CNN makes of its extra mel context, one on each side, and that are cut off."""

MAX_FEED_CHUNKS = 64
"""More than the longest replay: a full position table and the mel buffer at its reset (58 s)."""


class PcmFault(StrEnum):
    """Why the PCM of a feed cannot be cut into whole chunks."""

    ODD_BYTES = "pcm_s16le has an odd number of bytes"
    EMPTY = "pcm_s16le is empty"
    NOT_WHOLE = "pcm_s16le is not a whole number of chunks"
    TOO_LONG = "pcm_s16le holds more than 64 chunks"


def cut(pcm_s16le: bytes, first: bool) -> tuple[bytes, ...] | PcmFault:
    """The chunks of one feed. `first`: nothing was fed since the state was opened."""
    if len(pcm_s16le) % 2:
        return PcmFault.ODD_BYTES
    if not pcm_s16le:
        return PcmFault.EMPTY
    extra_bytes = 2 * (FIRST_CHUNK_SAMPLES - UNIT_SAMPLES) if first else 0
    count, rest = divmod(len(pcm_s16le) - extra_bytes, 2 * UNIT_SAMPLES)
    if rest or count < 1:
        return PcmFault.NOT_WHOLE
    if count > MAX_FEED_CHUNKS:
        return PcmFault.TOO_LONG
    ends = [extra_bytes + 2 * UNIT_SAMPLES * (index + 1) for index in range(count)]
    return tuple(pcm_s16le[start:end] for start, end in zip([0, *ends], ends, strict=False))


def chunks_per_cache(positions: int) -> int:
    """Chunks after which the cache is dropped whole, for a table of `positions` rows.

    The public rule compares cached + current with the table, where current still counts the
    context frames: 1,500 positions hold 29 chunks (contract section G).
    """
    current = CNN_FRAMES_PER_CHUNK + CONTEXT_CNN_FRAMES
    return max(1, -(-(positions - current) // CNN_FRAMES_PER_CHUNK))
