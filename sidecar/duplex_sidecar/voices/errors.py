"""Why a clip did not become a voice."""

from enum import StrEnum


class VoiceFault(StrEnum):
    """Callers decide by the kind, never by the text."""

    UNREADABLE = "clip_unreadable"
    """Missing, no sound in it, or nothing that can be decoded."""
    RATE = "clip_rate"
    """Fewer samples a second than speech needs, or more than anything records."""
    TOO_SHORT = "clip_too_short"
    TOO_LONG = "clip_too_long"
    SILENT = "clip_silent"
    """Nobody speaks in the part that the voice would be made of."""
    NO_FRONT_END = "no_front_end"
    """The checkpoint lacks one of the two models."""
    NO_RUNTIME = "no_runtime"
    """onnxruntime is not installed."""
    FRONT_END_FAILED = "front_end_failed"
    """A model did not run, or gave what cannot be a voice."""


class VoiceError(Exception):
    """No voice was made. `fault` and `subject` (a path) are for decisions, `reason` for people."""

    def __init__(self, fault: VoiceFault, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {fault}: {reason}")
        self.fault = fault
        self.subject = subject
        self.reason = reason
