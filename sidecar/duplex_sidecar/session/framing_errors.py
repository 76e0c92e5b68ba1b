"""Framing's reasons to refuse input, in the words of the protocol."""

from duplex_sidecar.framing.errors import FramingErrorCode
from duplex_sidecar.protocol.errors import ErrorCode

_CODES = {
    FramingErrorCode.AUDIO_RATE_UNSUPPORTED: ErrorCode.INVALID_SAMPLE_RATE,
    FramingErrorCode.AUDIO_RATE_CHANGED: ErrorCode.OUT_OF_ORDER_EVENT,
    FramingErrorCode.AUDIO_ODD_BYTES: ErrorCode.INVALID_AUDIO,
    FramingErrorCode.AUDIO_NOT_FINITE: ErrorCode.INVALID_AUDIO,
    FramingErrorCode.INPUT_OVERFLOW: ErrorCode.INPUT_OVERFLOW,
    FramingErrorCode.TOO_MANY_FRAMES: ErrorCode.TOO_MANY_FRAMES,
    FramingErrorCode.FRAME_TOO_LARGE: ErrorCode.FRAME_TOO_LARGE,
    FramingErrorCode.FRAME_FORMAT_UNSUPPORTED: ErrorCode.INVALID_FRAME,
    FramingErrorCode.FRAME_UNREADABLE: ErrorCode.INVALID_FRAME,
    FramingErrorCode.FRAME_SHAPE_UNSUPPORTED: ErrorCode.INVALID_FRAME,
}


def framing_code(code: FramingErrorCode) -> ErrorCode:
    """Every framing code has its protocol code."""
    return _CODES[code]
