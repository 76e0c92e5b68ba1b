"""Voices that come with a session, out of a Secret or ConfigMap: what operator and sidecar call
them."""

import hashlib

GIVEN_VOICE_PREFIX = "given-"
"""Of no other voice's name: a manifest that names one must bring its file along."""
MAX_GIVEN_VOICE_BYTES = 900 * 1024
"""What fits a Secret or ConfigMap with room for the rest of it."""
_DIGITS = 48


def given_voice_name(content: bytes) -> str:
    """Equal for equal files: a session keeps its voice wherever it goes, and a changed file is
    another voice."""
    return GIVEN_VOICE_PREFIX + hashlib.sha256(content).hexdigest()[:_DIGITS]


def is_given(name: str) -> bool:
    return name.startswith(GIVEN_VOICE_PREFIX)
