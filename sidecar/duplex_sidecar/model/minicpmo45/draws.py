"""Random draws by counter: one number per (seed, draw number), the same on every device and replay.

Engines keep the first request's generator for a resumed stream, so their own seeds cannot name a
unit. These can: a redone unit draws the same numbers.
"""

import hashlib
from collections.abc import Callable

Uniform = Callable[[str, int], float]
"""(seed, draw number) -> number in [0, 1)."""


def counter_uniform(seed: str, number: int) -> float:
    """A uniform number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
