"""What a replica has to do with a session it has just loaded. Pure: facts in, decision out.

Nothing was in flight (`CLEAN`), a unit was accepted but not answered (`REDO_ACCEPTED`: run it again
with its seed), or an answer was committed but not all of its audio was journaled
(`RESPEAK_COMMITTED`: run it again with its tokens forced and speak it; a unit's sound is journaled
whole or not at all). The last two can come together: first speak, then redo. How a turn's new epoch
is caught up follows from the marks and the speech beside them (`session.catching_up`).
"""

from enum import StrEnum

import msgspec

from duplex_sidecar.ledger.records import Accepted, Committed
from duplex_sidecar.ledger.session_view import LoadedSession, Phase

MAX_ATTEMPTS = 2
"""A unit is submitted once and redone once, a committed one run again twice for its sound: what
ends an engine each time costs two engines in the whole pool, and then its own session."""


class ResumeKind(StrEnum):
    CLEAN = "clean"
    REDO_ACCEPTED = "redo_accepted"
    RESPEAK_COMMITTED = "respeak_committed"


class Redo(msgspec.Struct, frozen=True):
    """Submit `unit` again with its plan, directive and seed; write note `attempt` first."""

    unit: Accepted
    attempt: int


class Respeak(msgspec.Struct, frozen=True):
    """Run `unit` again with its tokens forced: nothing of it sounded."""

    unit: Committed
    accepted: Accepted


class Resume(msgspec.Struct, frozen=True):
    """Go on. epoch: larger than any used before. next_event_seq: the journal's next number."""

    kind: ResumeKind
    epoch: int
    next_event_seq: int
    respeak: tuple[Respeak, ...]
    redo: Redo | None


class RefusalCode(StrEnum):
    ENDED = "ended"
    UNIT_FAILED = "unit_failed"
    """The open unit was submitted as often as allowed: end the session with this reason."""
    OTHER_CHECKPOINT = "other_checkpoint"
    TRIMMED_TOO_FAR = "trimmed_too_far"
    """The entries of a unit that would have to be spoken again are gone."""


class Refuse(msgspec.Struct, frozen=True):
    """This session cannot go on here; `reason` names the record. Nothing is deleted."""

    code: RefusalCode
    reason: str


def decide(loaded: LoadedSession, *, checkpoint: str) -> Resume | Refuse:
    """checkpoint: fingerprint of the one that runs here."""
    refusal = _refusal(loaded, checkpoint)
    if refusal is not None:
        return refusal
    units = {unit.seq: unit for unit in loaded.committed}
    inputs = {unit.seq: unit for unit in loaded.accepted}
    silent = range(loaded.meta.voiced_seq + 1, loaded.head.committed_seq + 1)
    missing = [seq for seq in silent if seq not in units or seq not in inputs]
    if missing:
        return Refuse(RefusalCode.TRIMMED_TOO_FAR, f"unit {missing[0]} is not kept")
    respeak = tuple(Respeak(units[seq], inputs[seq]) for seq in silent)
    opened = loaded.open_unit
    return Resume(
        kind=_kind(bool(respeak), opened is not None),
        epoch=next_epoch(loaded),
        next_event_seq=loaded.meta.events_last + 1,
        respeak=respeak,
        redo=None if opened is None else Redo(opened, loaded.attempts + 1),
    )


def next_epoch(loaded: LoadedSession) -> int:
    """One more than the largest epoch any record or mark names."""
    epochs = [unit.epoch for unit in (*loaded.accepted, *loaded.committed)]
    return max((*epochs, *(mark.epoch for mark in loaded.marks)), default=-1) + 1


def _refusal(loaded: LoadedSession, checkpoint: str) -> Refuse | None:
    if loaded.meta.phase is not Phase.OPEN or loaded.closed is not None:
        closed = loaded.closed
        reason = closed.reason if closed is not None else loaded.meta.reason
        return Refuse(RefusalCode.ENDED, reason)
    if loaded.opening.checkpoint != checkpoint:
        reason = f"opening names checkpoint {loaded.opening.checkpoint}, here runs {checkpoint}"
        return Refuse(RefusalCode.OTHER_CHECKPOINT, reason)
    if loaded.open_unit is not None and loaded.attempts >= MAX_ATTEMPTS:
        reason = f"unit {loaded.open_unit.seq} was submitted {loaded.attempts} times"
        return Refuse(RefusalCode.UNIT_FAILED, reason)
    return None


def _kind(respeaks: bool, redoes: bool) -> ResumeKind:
    if respeaks:
        return ResumeKind.RESPEAK_COMMITTED
    return ResumeKind.REDO_ACCEPTED if redoes else ResumeKind.CLEAN
