"""What the admin API says of a session: numbers and states, never content."""

from typing import Any

from duplex_api.admin import RESUME
from duplex_sidecar.session.actor import Phase, SessionActor
from duplex_sidecar.session.ending import Ending
from duplex_sidecar.session.roster import Departed

GONE = "gone"
"""Phase of a session that no longer runs here and is neither parked nor over: another replica may
have it, or nobody yet."""
UNDERSTANDS = (RESUME,)
"""Fields of requests that the first release did not know, and refused: an operator sends them only
where the feed's hello names them."""
ENDED_CODES = frozenset({"session_ended"})


def session_view(actor: SessionActor) -> dict[str, Any]:
    """Status of one running session."""
    conversation, speech = actor.conversation, actor.speech
    under_way_ms = actor.runner.lateness.under_way_ms
    return {
        "session": actor.session,
        "phase": actor.phase,
        "fence": actor.lease.fence,
        "attached": actor.attached,
        "units": conversation.seq,
        "windowTokens": conversation.window.prompt_tokens,
        "retainedUnits": len(conversation.window.units),
        "retainedRowBytes": actor.runner.retained_row_bytes,
        "epoch": speech.epoch,
        "turn": speech.turn,
        "unitUnderWayMs": None if under_way_ms is None else round(under_way_ms),
        "lastEventSequence": speech.last_sequence,
        "acknowledgedSample": conversation.framing.received_samples,
        **_quality(actor),
    }


def feed_line(actor: SessionActor) -> dict[str, Any]:
    """A running session as the feed has it. One that is recovering, or about to leave, counts as
    running: what becomes of it is told when it has become so."""
    phase = Phase.ACTIVE if actor.conversation.seq else Phase.READY
    return {
        "kind": "session",
        "session": actor.session,
        "phase": phase,
        "reason": "",
        "fence": actor.lease.fence,
        "attached": actor.attached,
        "units": actor.conversation.seq,
        "epoch": actor.speech.epoch,
        "windowTokens": actor.conversation.window.prompt_tokens,
        **_quality(actor),
    }


def departed_line(session: str, departed: Departed) -> dict[str, Any]:
    return {
        "kind": "session",
        "session": session,
        "phase": departed_phase(departed.ending),
        "reason": departed.ending.word,
        "fence": departed.fence,
        "attached": False,
        "units": departed.units,
        "epoch": departed.epoch,
    }


def departed_phase(ending: Ending) -> str:
    if ending.parks is not None:
        return "parked"
    return "ended" if ending.for_good or ending.code in ENDED_CODES else GONE


def _quality(actor: SessionActor) -> dict[str, Any]:
    quality = actor.quality
    last = quality.last_rebuild
    return {
        "rebuilds": quality.rebuilds,
        "lastRebuild": None
        if last is None
        else {"cause": last.cause, "costMs": last.cost_ms, "traceID": last.trace_id},
        "audio": {"underruns": quality.underruns, "longestGapMs": quality.longest_gap_ms},
        "keepingPace": actor.keeping_pace,
        "ledgerDurable": actor.ledger_answers,
        "ledgerRewound": quality.ledger_rewound,
    }
