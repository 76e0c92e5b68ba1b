"""Every span, event, attribute and metric name of the product, in one place.

Names start with `duplex.`. Values of enumerated attributes are the enums here, so that a dashboard
and a test read the same list. Nothing here carries content (text, audio).
"""

from enum import StrEnum
from typing import Final

# --- spans --------------------------------------------------------------------------------------

SPAN_SESSION: Final = "duplex.session"
"""Root of a trace segment: ends at once, so that a killed replica leaves a whole trace."""
SPAN_UNIT: Final = "duplex.unit"
SPAN_ENCODE: Final = "duplex.encode"
SPAN_ACCEPT: Final = "duplex.accept"
SPAN_THINKER: Final = "duplex.thinker"
SPAN_COMMIT: Final = "duplex.commit"
SPAN_TALKER: Final = "duplex.talker"
SPAN_CODE2WAV: Final = "duplex.code2wav"
SPAN_WINDOW_REBUILD: Final = "duplex.window.rebuild"
SPAN_STAGE2_OPEN: Final = "duplex.stage2.open"
"""Carries the epoch event when no unit is under way (recovery, barge-in between units)."""


class StepName(StrEnum):
    """Children of a unit's span, in the order of the unit's way."""

    ENCODE = SPAN_ENCODE
    ACCEPT = SPAN_ACCEPT
    THINKER = SPAN_THINKER
    COMMIT = SPAN_COMMIT
    TALKER = SPAN_TALKER
    CODE2WAV = SPAN_CODE2WAV


# --- events -------------------------------------------------------------------------------------

EVENT_STAGE2_EPOCH: Final = "duplex.stage2.epoch"
EVENT_STAGE_FAULT: Final = "duplex.stage.fault"
EVENT_ENCODER_RESET: Final = "duplex.encoder.reset"
EVENT_CONTENT_TEXT: Final = "duplex.content.text"
"""Only with the content setting on."""

# --- attributes ---------------------------------------------------------------------------------

SESSION_ID: Final = "duplex.session.id"
REPLICA: Final = "duplex.replica"
SEGMENT_REASON: Final = "duplex.segment.reason"
UNIT_SEQ: Final = "duplex.unit.seq"
UNIT_DECISION: Final = "duplex.unit.decision"
UNIT_TURN: Final = "duplex.unit.turn"
UNIT_AUDIO_MS: Final = "duplex.unit.audio_ms"
UNIT_TOKENS: Final = "duplex.unit.tokens"
UNIT_WINDOW_TOKENS: Final = "duplex.unit.window_tokens"
UNIT_REDO: Final = "duplex.unit.redo"
WINDOW_MODE: Final = "duplex.window.mode"
WINDOW_CAUSE: Final = "duplex.window.cause"
WINDOW_DROPPED_UNITS: Final = "duplex.window.dropped_units"
WINDOW_DROPPED_TOKENS: Final = "duplex.window.dropped_tokens"
WINDOW_REPLACEMENT_TOKENS: Final = "duplex.window.replacement_tokens"
REBUILD_PREDICTED_MS: Final = "duplex.rebuild.predicted_ms"
REBUILD_ACTUAL_MS: Final = "duplex.rebuild.actual_ms"
REBUILD_AHEAD: Final = "duplex.rebuild.ahead"
"""Made before its append came: no unit waited for all of it."""
STAGE2_EPOCH: Final = "duplex.stage2.epoch"
STAGE2_CAUSE: Final = "duplex.stage2.cause"
STAGE: Final = "duplex.stage"
STAGE_FAULT: Final = "duplex.stage.fault"
LEDGER_CALL: Final = "duplex.ledger.call"
ENVELOPE_REASON: Final = "duplex.envelope.reason"
CONTENT_TEXT: Final = "duplex.content.text"


class UnitDecision(StrEnum):
    """What the model decided for a unit."""

    LISTEN = "listen"
    SPEAK = "speak"


class RebuildCause(StrEnum):
    """Why the Thinker's prompt was replaced."""

    SLIDE = "slide"
    TRUNCATION = "truncation"
    EVICTION = "eviction"
    ENGINE_RESTART = "engine_restart"
    REPLICA_RESTART = "replica_restart"
    MOVE = "move"


class EpochCause(StrEnum):
    """Why stage 2 began a new epoch (never a window slide: contract section E)."""

    OPEN = "open"
    TURN_END = "turn_end"
    BARGE_IN = "barge_in"
    RECOVERY = "recovery"
    VIOLATION = "violation"


class SegmentReason(StrEnum):
    """Why a trace segment began."""

    OPENED = "opened"
    RESUMED = "resumed"
    CONTINUED = "continued"


class StageName(StrEnum):
    """Stage processes."""

    ENCODER = "encoder"
    THINKER = "thinker"
    TALKER = "talker"
    CODE2WAV = "code2wav"


class LedgerCall(StrEnum):
    """Round trips to the ledger that are timed."""

    ACQUIRE = "acquire"
    RENEW = "renew"
    LOAD = "load"
    ACCEPT = "accept"
    COMMIT = "commit"
    JOURNAL = "journal"
    NOTE = "note"
    CUT = "cut"
    CLIENT = "client"
    PARK = "park"
    HAND_OVER = "hand_over"
    ERASE = "erase"


# --- metrics ------------------------------------------------------------------------------------

METRIC_UNITS: Final = "duplex.units"
METRIC_UNIT_WALL: Final = "duplex.unit.wall"
METRIC_UNIT_PACE: Final = "duplex.unit.pace"
METRIC_UNITS_LATE: Final = "duplex.units.late"
METRIC_UNITS_OVERDUE: Final = "duplex.units.overdue"
METRIC_NEAR_REAL_TIME: Final = "duplex.units.near_real_time"
METRIC_REBUILDS: Final = "duplex.window.rebuilds"
METRIC_REBUILD_TIME: Final = "duplex.window.rebuild.time"
METRIC_STAGE_TIME: Final = "duplex.stage.time"
METRIC_LEDGER_REACHABLE: Final = "duplex.ledger.reachable"
METRIC_STAGE_RESTARTS: Final = "duplex.stage.restarts"
METRIC_SESSIONS_LIVE: Final = "duplex.sessions.live"
METRIC_LEDGER_TIME: Final = "duplex.ledger.time"
METRIC_STAGE2_EPOCHS: Final = "duplex.stage2.epochs"
METRIC_PREEMPTIONS: Final = "duplex.engine.preemptions"
METRIC_ENVELOPES_REFUSED: Final = "duplex.envelopes.refused"

# --- resource -----------------------------------------------------------------------------------

SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
