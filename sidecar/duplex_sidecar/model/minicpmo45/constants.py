"""Counts of MiniCPM-o 4.5 (contract section A). Control tokens: `vocabulary.ControlToken`.

Positions are places in the Thinker's context; samples are 16 kHz mono unless the name says
otherwise. Pure data: importing this costs nothing and pulls in nothing.
"""

from typing import Final

# --- the audio clock ----------------------------------------------------------------------------

INPUT_RATE_HZ: Final = 16_000
"""Rate of everything that the audio encoder hears."""
UNIT_SAMPLES: Final = 16_000
"""New samples of one unit: one second."""
SAMPLES_PER_POSITION: Final = 1_600
"""Samples behind one audio position of the Thinker."""
AUDIO_POSITIONS_PER_CHUNK: Final = 10
"""Audio positions that the encoder gives for one chunk (one unit)."""
FIRST_CHUNK_SAMPLES: Final = 16_560
"""Samples that the first chunk of a session consumes (1,035 ms); short input is left-padded."""

# --- positions of one append --------------------------------------------------------------------

UNIT_OPEN_POSITIONS: Final = 1
"""`<unit>`."""
INTERNAL_CLOSURE_POSITIONS: Final = 1
"""`</unit>` between two chunks of one append."""
CLOSURE_POSITIONS: Final = 2
"""The previous unit's terminator and `</unit>`, re-injected at the head of the next append."""
CHUNK_POSITIONS: Final = (
    UNIT_OPEN_POSITIONS + AUDIO_POSITIONS_PER_CHUNK + INTERNAL_CLOSURE_POSITIONS
)
"""A chunk inside an append: `<unit>`, 10 audio positions, `</unit>`: 12."""
UNIT_APPEND_POSITIONS: Final = CHUNK_POSITIONS + 1
"""A later append of one second without frames: 13 (also when it is final)."""

# --- camera frames ------------------------------------------------------------------------------

IMAGE_ROWS: Final = 64
"""Rows of one image block (queries of the resampler)."""
IMAGE_BLOCK_POSITIONS: Final = IMAGE_ROWS + 2
"""An image block with its opening and closing token: 66."""
MAX_FRAMES_PER_APPEND: Final = 2
TILE_SIDE_PIXELS: Final = 448
TILE_PIXELS: Final = TILE_SIDE_PIXELS * TILE_SIDE_PIXELS
"""A frame of at most so many pixels is one block, never cut."""
PATCH_PIXELS: Final = 14
PAIR_MAX_SLICES: Final = (2, 1)
"""Most slices of the first (base) and of the second (composite) frame of a pair."""
SINGLE_MAX_SLICES: Final = 1
"""A frame that comes alone is never cut."""

# --- reservation where the real length is not known (public implementation's table) --------------

INEXACT_EXTRA_POSITIONS: Final = 8
INEXACT_MIN_POSITIONS: Final = 16
INEXACT_MAX_POSITIONS: Final = 768
UNDECODABLE_POSITIONS: Final = 64
UNKNOWN_CONTEXT_POSITIONS: Final = 48
UNKNOWN_REFERENCE_EXTRA_POSITIONS: Final = 8

# --- session context ----------------------------------------------------------------------------

DEFAULT_INSTRUCTIONS: Final = "Streaming Omni Conversation."
PREVIOUS_MARKER: Final = "\n\nprevious: "
