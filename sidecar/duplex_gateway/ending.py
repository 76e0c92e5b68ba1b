"""How a call ends."""

from collections.abc import Sequence

from duplex_gateway.metrics import CallEnd
from duplex_gateway.wire import error_event
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

SERVICE_RESTART = 1012
TRY_AGAIN_LATER = 1013
REFUSED = 1008


class Ended(Exception):
    """The call is over. close_code: None when the client has left already. messages: its last."""

    def __init__(
        self,
        end: CallEnd,
        close_code: int | None = None,
        reason: str = "",
        messages: Sequence[bytes] = (),
    ) -> None:
        super().__init__(f"{end}: {close_code} {reason}")
        self.end = end
        self.close_code = close_code
        self.reason = reason
        self.messages = messages

    @classmethod
    def because(
        cls, end: CallEnd, code: ErrorCode, detail: str = "", close_code: int | None = None
    ) -> "Ended":
        """With the error that says why. Never 1011."""
        entry = ERRORS[code]
        fitting = entry.close_code or (TRY_AGAIN_LATER if entry.retryable else REFUSED)
        return cls(end, close_code or fitting, code, (error_event(code, detail),))
