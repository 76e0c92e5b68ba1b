"""The one table of errors that a client can see: code, type, retryable, close code, sentence.

A code not in the table cannot be sent. `ends_session` codes end that one session and no other.
Close codes follow RFC 6455; 1011 is never used, since it tells a client nothing.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Public error codes (`error.code` on the wire)."""

    INVALID_JSON = "invalid_json"
    INVALID_EVENT = "invalid_event"
    UNKNOWN_EVENT = "unknown_event"
    UNSUPPORTED_EVENT = "unsupported_event"
    OUT_OF_ORDER_EVENT = "out_of_order_event"
    EVENT_TOO_LARGE = "event_too_large"
    INVALID_AUDIO = "invalid_audio"
    INVALID_SAMPLE_RATE = "invalid_sample_rate"
    UNSUPPORTED_AUDIO_FORMAT = "unsupported_audio_format"
    INVALID_FRAME = "invalid_frame"
    FRAME_TOO_LARGE = "frame_too_large"
    TOO_MANY_FRAMES = "too_many_frames"
    INPUT_OVERFLOW = "input_overflow"
    INPUT_AUDIO_BUFFER_COMMIT_EMPTY = "input_audio_buffer_commit_empty"
    """A name of the public API."""
    IMMUTABLE_SETTING = "immutable_setting"
    RESPONSE_CANCEL_NOT_ACTIVE = "response_cancel_not_active"
    PLAYBACK_ITEM_NOT_FOUND = "playback_item_not_found"
    PLAYBACK_ITEM_MISMATCH = "playback_item_mismatch"
    PLAYBACK_ACK_TOO_LATE = "playback_ack_too_late"
    INVALID_SLIDING_WINDOW_CONFIG = "invalid_sliding_window_config"
    SLIDING_WINDOW_UPDATE_UNSUPPORTED = "sliding_window_update_unsupported"
    UNAUTHORIZED = "unauthorized"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_ENDED = "session_ended"
    SESSION_TAKEN_OVER = "session_taken_over"
    SESSION_EXPIRED = "session_expired"
    PARKED = "parked"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    SLOW_CONSUMER = "slow_consumer"
    NOT_READY = "not_ready"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    LEDGER_CORRUPT = "ledger_corrupt"
    LEASE_LOST = "lease_lost"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNIT_FAILED = "unit_failed"
    STAGE_UNAVAILABLE = "stage_unavailable"


class ErrorType(StrEnum):
    """`error.type` on the wire, as the public realtime protocol has it."""

    INVALID_REQUEST = "invalid_request_error"
    AUTHENTICATION = "authentication_error"
    CAPACITY = "capacity_error"
    SERVER = "server_error"


@dataclass(frozen=True)
class ErrorEntry:
    """What a code means to a client."""

    type: ErrorType
    retryable: bool
    """The same request can succeed later, unchanged."""
    ends_session: bool
    close_code: int | None
    """WebSocket close code when the error closes the socket, else None: the socket stays open."""
    sentence: str


_BAD = ErrorType.INVALID_REQUEST
_AUTH = ErrorType.AUTHENTICATION
_FULL = ErrorType.CAPACITY
_SERVER = ErrorType.SERVER

ERRORS: dict[ErrorCode, ErrorEntry] = {
    ErrorCode.INVALID_JSON: ErrorEntry(_BAD, False, False, None, "The message is not JSON."),
    ErrorCode.INVALID_EVENT: ErrorEntry(_BAD, False, False, None, "The event is malformed."),
    ErrorCode.UNKNOWN_EVENT: ErrorEntry(
        _BAD, False, False, None, "No event of this type is known."
    ),
    ErrorCode.UNSUPPORTED_EVENT: ErrorEntry(
        _BAD, False, False, None, "The event is known but not served by a duplex session."
    ),
    ErrorCode.OUT_OF_ORDER_EVENT: ErrorEntry(
        _BAD, False, False, None, "The event is not allowed at this point of the session."
    ),
    ErrorCode.EVENT_TOO_LARGE: ErrorEntry(
        _BAD, False, False, 1009, "The message is larger than the limit."
    ),
    ErrorCode.INVALID_AUDIO: ErrorEntry(
        _BAD, False, False, None, "The audio bytes are not whole finite samples."
    ),
    ErrorCode.INVALID_SAMPLE_RATE: ErrorEntry(
        _BAD, False, False, None, "The sample rate is outside 8,000 to 192,000 Hz."
    ),
    ErrorCode.UNSUPPORTED_AUDIO_FORMAT: ErrorEntry(
        _BAD, False, False, None, "The audio format is not supported."
    ),
    ErrorCode.INVALID_FRAME: ErrorEntry(
        _BAD, False, False, None, "The camera frame is not a decodable JPEG or PNG."
    ),
    ErrorCode.FRAME_TOO_LARGE: ErrorEntry(
        _BAD, False, False, None, "The camera frame is larger than the limit."
    ),
    ErrorCode.TOO_MANY_FRAMES: ErrorEntry(
        _BAD, False, False, None, "An append carries at most two camera frames."
    ),
    ErrorCode.INPUT_OVERFLOW: ErrorEntry(
        _FULL, True, False, None, "More input is waiting than the session may hold."
    ),
    ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY: ErrorEntry(
        _BAD, False, False, None, "No audio was appended since the last commit."
    ),
    ErrorCode.IMMUTABLE_SETTING: ErrorEntry(
        _BAD, False, False, None, "This setting is fixed when the session opens."
    ),
    ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE: ErrorEntry(
        _BAD, False, False, None, "No such reply is under way."
    ),
    ErrorCode.PLAYBACK_ITEM_NOT_FOUND: ErrorEntry(
        _BAD, False, False, None, "The session has said no such item."
    ),
    ErrorCode.PLAYBACK_ITEM_MISMATCH: ErrorEntry(
        _BAD, False, False, None, "The item does not fit what was sent and acknowledged of it."
    ),
    ErrorCode.PLAYBACK_ACK_TOO_LATE: ErrorEntry(
        _BAD, False, False, None, "The model does not see that part of the reply any more."
    ),
    ErrorCode.INVALID_SLIDING_WINDOW_CONFIG: ErrorEntry(
        _BAD, False, False, None, "The window options are not valid."
    ),
    ErrorCode.SLIDING_WINDOW_UPDATE_UNSUPPORTED: ErrorEntry(
        _BAD, False, False, None, "The window policy is fixed when the session opens."
    ),
    ErrorCode.UNAUTHORIZED: ErrorEntry(
        _AUTH, False, False, 1008, "The token does not open this session."
    ),
    ErrorCode.SESSION_NOT_FOUND: ErrorEntry(
        _AUTH, False, False, 1008, "The token does not open this session."
    ),
    ErrorCode.SESSION_ENDED: ErrorEntry(_BAD, False, True, 1000, "The session has ended."),
    ErrorCode.SESSION_TAKEN_OVER: ErrorEntry(
        _BAD, False, False, 4001, "Another connection took the session over."
    ),
    ErrorCode.SESSION_EXPIRED: ErrorEntry(
        _BAD, False, True, 4002, "The session reached a life cycle limit."
    ),
    ErrorCode.PARKED: ErrorEntry(
        _SERVER, True, False, 4003, "The session is parked; dialling again wakes it."
    ),
    ErrorCode.RESOURCE_EXHAUSTED: ErrorEntry(
        _FULL, True, False, 1013, "No slot is free on this replica."
    ),
    ErrorCode.SLOW_CONSUMER: ErrorEntry(
        _FULL, True, False, 4008, "The client does not read; reconnect and resume."
    ),
    ErrorCode.NOT_READY: ErrorEntry(_SERVER, True, False, 1013, "The engine is not ready yet."),
    ErrorCode.LEDGER_UNAVAILABLE: ErrorEntry(
        _SERVER, True, False, None, "The ledger cannot be reached; input is not accepted."
    ),
    ErrorCode.LEDGER_CORRUPT: ErrorEntry(
        _SERVER, False, True, 4011, "The ledger of this session cannot be read."
    ),
    ErrorCode.LEASE_LOST: ErrorEntry(
        _SERVER, True, False, 1012, "Another replica runs this session now."
    ),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorEntry(
        _BAD, False, True, 4010, "The conversation no longer fits the model's context."
    ),
    ErrorCode.UNIT_FAILED: ErrorEntry(
        _SERVER, False, True, 4011, "A unit failed repeatedly; the session cannot go on."
    ),
    ErrorCode.STAGE_UNAVAILABLE: ErrorEntry(
        _SERVER, True, False, None, "An engine stage is restarting; the session waits for it."
    ),
}


class ClientError(Exception):
    """A client's mistake, or a state of the server that the client has to know."""

    def __init__(self, code: ErrorCode, detail: str = "", param: str | None = None) -> None:
        super().__init__(detail or ERRORS[code].sentence)
        self.code = code
        self.detail = detail or ERRORS[code].sentence
        self.param = param
