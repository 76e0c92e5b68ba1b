"""What can be wrong with audio and frames. Doors map the code, people read the reason."""

from enum import StrEnum


class FramingErrorCode(StrEnum):
    """Reasons to refuse input. A refused push leaves no trace in any state."""

    AUDIO_RATE_UNSUPPORTED = "audio_rate_unsupported"
    AUDIO_RATE_CHANGED = "audio_rate_changed"
    """Another rate while samples of a unit are waiting: commit or clear first."""
    AUDIO_ODD_BYTES = "audio_odd_bytes"
    """The bytes are not a whole number of samples."""
    AUDIO_NOT_FINITE = "audio_not_finite"
    """NaN or infinity in float samples."""
    INPUT_OVERFLOW = "input_overflow"
    """More input is waiting than the session may hold."""
    TOO_MANY_FRAMES = "too_many_frames"
    """More than two frames at once."""
    FRAME_TOO_LARGE = "frame_too_large"
    """The image has too many bytes, or too many pixels."""
    FRAME_FORMAT_UNSUPPORTED = "frame_format_unsupported"
    """Neither JPEG nor PNG."""
    FRAME_UNREADABLE = "frame_unreadable"
    """The header of the image cannot be read."""
    FRAME_SHAPE_UNSUPPORTED = "frame_shape_unsupported"
    """The image is too long and narrow."""


class FramingError(ValueError):
    """Input that framing refuses. `code` is for decisions, `reason` for people."""

    def __init__(self, code: FramingErrorCode, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
