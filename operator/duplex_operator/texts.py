"""Texts of others, cut to what may be sent on.

Kubernetes counts differently from place to place: what a CRD bounds (`maxLength`: conditions) is in
characters, what its own code bounds (an Event's note, reason and action) in bytes of UTF-8.
"""

MOST_NOTE_BYTES = 1024
MOST_WORD_BYTES = 128
"""Of an Event; a longer one is refused."""


def cut_bytes(text: str, most_bytes: int) -> str:
    """The longest beginning that has so many bytes at most; no character in part."""
    return text.encode(errors="replace")[:most_bytes].decode(errors="ignore")
