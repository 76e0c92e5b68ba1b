"""What a session's status says, given what is known. Pure; the only builder of conditions."""

import re
from collections.abc import Iterator
from typing import Any

from duplex_api.metadata import Condition, ConditionStatus
from duplex_api.session import (
    AudioQuality,
    LastRebuild,
    Placement,
    SessionPhase,
    SessionStatus,
)
from duplex_operator.decide.acceptance import Accepted, Refused
from duplex_operator.decide.facts import SessionFacts
from duplex_operator.feed import FeedSession
from duplex_operator.objects import timestamp, timestamp_ms

ACCEPTED = "Accepted"
PLACED = "Placed"
READY = "Ready"
CONNECTED = "Connected"
LEDGER_DURABLE = "LedgerDurable"
KEEPING_PACE = "KeepingPace"
WINDOW_HEALTHY = "WindowHealthy"
LEDGER_REWOUND = "LedgerRewound"
"""Only there once it has happened, and then for good: what was lost does not come back."""
ENDED = "Ended"

RUNNING_PHASES = frozenset((SessionPhase.READY, SessionPhase.ACTIVE))
SLOW_REBUILD_MS = 1_000
"""A rebuild that takes longer than a unit is heard as a pause."""
_LEAVING = ("drain", "stop", "evict", "shutdown", "sigterm", "upgrade", "moved")
"""Words of a sidecar that parked a session for the pod's sake, not for the client's."""
_MESSAGE_LENGTH = 1_024
_COUNTERS = frozenset(("units", "rebuilds", "lastRebuild", "epoch", "audio"))

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def build_status(
    facts: SessionFacts,
    phase: SessionPhase,
    reason: str,
    sentence: str,
    *,
    placement: Placement | None,
    queue_position: int | None = None,
) -> SessionStatus:
    """The whole status. `placement` None: it has no slot; where it was stays as last placement."""
    before = facts.session.status
    said = facts.said if phase in RUNNING_PHASES or phase is SessionPhase.ENDED else None
    window = facts.verdict.window if isinstance(facts.verdict, Accepted) else before.window
    moved = before.placement is not None and before.placement != placement
    counters: dict[str, Any] = {}
    if phase is SessionPhase.PARKED and facts.said is not None and facts.said.units:
        # Before they were due as counters, maybe: whether it has a history is seen by them.
        counters = {"units": facts.said.units}
    if said is not None:
        rebuilt = said.last_rebuild
        counters = {
            "units": said.units,
            "rebuilds": said.rebuilds,
            "epoch": said.epoch,
            "audio": AudioQuality(
                underruns=said.audio.underruns, longest_gap_ms=said.audio.longest_gap_ms
            ),
            "last_rebuild": before.last_rebuild
            if rebuilt is None
            else LastRebuild(
                cause=rebuilt.cause[:63],
                cost_ms=float(max(rebuilt.cost_ms, 0.0)),
                trace_id=None if rebuilt.trace_id is None else rebuilt.trace_id[:32],
            ),
        }
    return before.model_copy(
        update={
            "observed_generation": facts.session.meta.generation,
            "phase": phase,
            "reason": reason[:_MESSAGE_LENGTH],
            "message": sentence[:_MESSAGE_LENGTH],
            "placement": placement,
            "last_placement": before.placement if moved else before.last_placement,
            "ledger_id": facts.session.meta.uid,
            "endpoint": facts.endpoint or None,
            "token_secret": before.token_secret if facts.token is None else facts.token.secret,
            "queue_position": queue_position,
            "window": window if placement is not None else before.window,
            "conditions": tuple(_conditions(facts, phase, reason, sentence, placement)),
            **counters,
        }
    )


def status_patch(before: SessionStatus, after: SessionStatus) -> dict[str, Any]:
    """The JSON merge patch between two statuses; empty when they are equal."""
    old = before.model_dump(mode="json", by_alias=True, exclude_none=True)
    new = after.model_dump(mode="json", by_alias=True, exclude_none=True)
    return _merge_patch(old, new)


def only_counters(patch: dict[str, Any]) -> bool:
    """Whether nothing changed that somebody waits for."""
    return set(patch) <= _COUNTERS


def is_news(before: FeedSession, said: FeedSession) -> bool:
    """Whether a pod's word on a session says more than that its counters moved on."""
    return _words(before) != _words(said)


def condition_of(status: SessionStatus, name: str) -> Condition | None:
    return next((found for found in status.conditions or () if found.type == name), None)


def since_ms(status: SessionStatus, name: str) -> int | None:
    """When a condition took its present value, in ms since 1970."""
    found = condition_of(status, name)
    return None if found is None else timestamp_ms(found.last_transition_time)


def camel_reason(word: str, otherwise: str) -> str:
    """A sidecar's word ("client_away") as a condition's reason ("ClientAway")."""
    parts = re.findall(r"[A-Za-z0-9]+", word)
    return "".join(part[0].upper() + part[1:] for part in parts)[:128] or otherwise


def is_leaving(reason: str) -> bool:
    """Whether a session was parked for its pod's sake, not for its client's: by the sidecar's word,
    or by the condition's reason that was made of it."""
    return any(word in reason.lower() for word in _LEAVING)


def phase_for_clients(status: SessionStatus) -> SessionPhase:
    """What the gateways are told. A session that its pod parked because the pod goes is moving for
    a client that waits for it, even one that says nothing: only a client's gateway wakes it, so
    nobody's session takes no slot."""
    phase = status.phase or SessionPhase.PENDING
    if phase is SessionPhase.PARKED and is_leaving(status.reason or ""):
        return SessionPhase.MOVING
    return phase


def _merge_patch(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        known = old.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            inner = _merge_patch(known, value)
            if inner:
                patch[name] = inner
        elif value != known:
            patch[name] = value
    return patch


def _conditions(
    facts: SessionFacts,
    phase: SessionPhase,
    reason: str,
    sentence: str,
    placement: Placement | None,
) -> Iterator[Condition]:
    """The conditions in a fixed order. Messages hold no numbers that move with every unit."""
    running = phase in RUNNING_PHASES
    for name, status, why, text in (
        _accepted(facts),
        (
            (PLACED, _TRUE, "Placed", f"on pod {placement.pod} with fence {placement.fence}")
            if placement is not None
            else (PLACED, _FALSE, reason, sentence)
        ),
        (READY, _TRUE if running else _FALSE, "SessionReady" if running else reason, sentence),
        *_running_conditions(facts, running, str(phase)),
        *((_REWOUND,) if _is_rewound(facts) else ()),
        *(((ENDED, _TRUE, reason, sentence),) if phase is SessionPhase.ENDED else ()),
    ):
        before = condition_of(facts.session.status, name)
        same = before is not None and before.status is status
        yield Condition(
            type=name,
            status=status,
            reason=why[:_MESSAGE_LENGTH] or "Unknown",
            message=text[:_MESSAGE_LENGTH],
            last_transition_time=before.last_transition_time
            if same and before is not None
            else timestamp(facts.now_ms),
            observed_generation=facts.session.meta.generation,
        )


def _words(said: FeedSession) -> tuple[object, ...]:
    """What phase and conditions are made of."""
    return (
        said.phase,
        said.reason,
        said.fence,
        said.attached,
        said.keeping_pace,
        said.ledger_durable,
        said.ledger_rewound,
        _is_slow(said),
    )


def _is_slow(said: FeedSession) -> bool:
    return said.last_rebuild is not None and said.last_rebuild.cost_ms > SLOW_REBUILD_MS


_Row = tuple[str, ConditionStatus, str, str]
REWOUND_SENTENCE = "the ledger lost what a client had seen; the conversation goes on from the rest"
_REWOUND: _Row = (LEDGER_REWOUND, _TRUE, "EventsLost", REWOUND_SENTENCE)


def _is_rewound(facts: SessionFacts) -> bool:
    said = facts.said is not None and facts.said.ledger_rewound
    return said or condition_of(facts.session.status, LEDGER_REWOUND) is not None


def _accepted(facts: SessionFacts) -> _Row:
    if isinstance(facts.verdict, Refused) and facts.placement is None:
        return ACCEPTED, _FALSE, facts.verdict.reason, facts.verdict.sentence
    return ACCEPTED, _TRUE, "Accepted", f"pool {facts.session.pool_key} takes it"


def _running_conditions(facts: SessionFacts, running: bool, phase: str) -> Iterator[_Row]:
    said = facts.said
    if said is None or not running:
        for name in (CONNECTED, LEDGER_DURABLE, KEEPING_PACE, WINDOW_HEALTHY):
            status = _FALSE if name == CONNECTED else _UNKNOWN
            yield name, status, "NotRunning", f"the session is {phase}"
        return
    if said.attached:
        yield CONNECTED, _TRUE, "ClientAttached", "a client is attached"
    else:
        yield CONNECTED, _FALSE, "NoClient", "no client is attached"
    if said.ledger_durable:
        yield LEDGER_DURABLE, _TRUE, "LeaseHeld", "the pod holds the lease and writes the ledger"
    else:
        yield LEDGER_DURABLE, _FALSE, "LedgerUnavailable", "the ledger does not answer the pod"
    if said.keeping_pace:
        yield KEEPING_PACE, _TRUE, "OnTime", "audio comes before it has to be played"
    else:
        yield KEEPING_PACE, _FALSE, "AudioLate", "audio comes later than it has to be played"
    if _is_slow(said):
        yield WINDOW_HEALTHY, _FALSE, "RebuildSlow", "the last rebuild took longer than a unit"
    else:
        yield WINDOW_HEALTHY, _TRUE, "RebuildsInTime", "rebuilds take less than a unit"
