"""What can go wrong with a stage, as the session sees it."""

from enum import StrEnum


class StageFault(StrEnum):
    """Kinds of stage failure. The session decides by the kind, never by the text."""

    GONE = "gone"
    """The process died or cannot be reached: its streams are lost, a restart is under way."""
    AWAY = "away"
    """It was lost and did not come back in time: `StageAway`."""
    TIMEOUT = "timeout"
    """No answer within the bound of the call."""
    REFUSED = "refused"
    """The request itself is wrong (shape, ids, length): only this session is concerned."""
    UNKNOWN_STREAM = "unknown_stream"
    """The stage holds no such stream (it restarted since): rebuild it."""
    OUT_OF_ORDER = "out_of_order"
    """A chunk violated epoch or sequence; `reason` names how. The stream is quarantined."""
    ROWS_LOST = "rows_lost"
    """Hidden rows of this unit are missing from the hand-off ring."""
    UNDECODABLE = "undecodable"
    """A camera frame could not be decoded."""
    INTERNAL = "internal"
    """An unexpected exception inside the stage, contained to this call."""


class StageError(Exception):
    """A stage call failed. `stage` and `fault` are for decisions, `reason` is for people."""

    def __init__(self, stage: str, fault: StageFault, reason: str) -> None:
        super().__init__(f"{stage}: {fault}: {reason}")
        self.stage = stage
        self.fault = fault
        self.reason = reason


class StageAway(StageError):
    """A stage that was lost did not come back in time. It says nothing of the unit that waited:
    another replica, or this one later, can go on with the session."""

    def __init__(self, stage: str, waited_s: float) -> None:
        super().__init__(stage, StageFault.AWAY, f"not back in {waited_s:g} s")
