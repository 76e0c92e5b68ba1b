"""What the process keeps of memory that it has freed."""

import ctypes

M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
LARGE_BYTES = 128 * 1024


def give_large_blocks_back() -> bool:
    """Each TLS connection has a buffer of 256 KiB. glibc, once it has seen one freed, takes the
    next ones from the heap, where what lives longer lies between them: hundreds of connections that
    came and went would stay as holes. False: another C library, which does as it likes."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    return change is not None and change(M_MMAP_THRESHOLD, LARGE_BYTES) == 1
