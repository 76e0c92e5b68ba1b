"""What a replica has to do with a session it has just loaded. Pure: facts in, decision out.

Nothing was in flight (`CLEAN`), a unit was accepted but not answered (`REDO_ACCEPTED`: run it again
with its seed), or an answer was committed but not all of its audio was journaled
(`RESPEAK_COMMITTED`: run it again with its tokens forced and speak it from the journaled sample
on). The last two can come together: first speak, then redo.
"""

from enum import StrEnum

import msgspec

from duplex_sidecar.ledger.journal import VoiceMark
from duplex_sidecar.ledger.records import Accepted, Committed
from duplex_sidecar.ledger.session_view import LoadedSession, Phase

MAX_ATTEMPTS = 3
"""A unit is submitted once and redone at most twice."""

FULL_CATCH_UP_CHUNKS = 8
"""Up to so many chunks of the turn, the new epoch is fed all of them, muted."""

SHORT_CATCH_UP_CHUNKS = 2
"""Beyond that it starts so many chunks back (an approximation: a vocoder's memory is short)."""


class ResumeKind(StrEnum):
    CLEAN = "clean"
    REDO_ACCEPTED = "redo_accepted"
    RESPEAK_COMMITTED = "respeak_committed"


class Redo(msgspec.Struct, frozen=True):
    """Submit `unit` again with its plan, directive and seed; write note `attempt` first."""

    unit: Accepted
    attempt: int


class Respeak(msgspec.Struct, frozen=True):
    """Run `unit` again with its tokens forced.

    sounded: marks of its chunks that are in the journal already. Their codes stand; what is made
    again of them is muted.
    """

    unit: Committed
    accepted: Accepted
    sounded: tuple[VoiceMark, ...]


class CatchUp(msgspec.Struct, frozen=True):
    """What to feed the new stage-2 epoch before it may sound.

    marks: chunks of the present turn, oldest first, fed muted from chunk 0 of `epoch`.
    exact: the marks reach back to the turn's first code. muted_to_samples: 24 kHz samples of the
    turn that the client has been sent.
    """

    epoch: int
    turn: int
    marks: tuple[VoiceMark, ...]
    exact: bool
    muted_to_samples: int


class Resume(msgspec.Struct, frozen=True):
    """Go on. epoch: larger than any used before. next_event_seq: the journal's next number.
    catch_up is None when no turn is being spoken."""

    kind: ResumeKind
    epoch: int
    next_event_seq: int
    respeak: tuple[Respeak, ...]
    redo: Redo | None
    catch_up: CatchUp | None


class RefusalCode(StrEnum):
    ENDED = "ended"
    UNIT_FAILED = "unit_failed"
    """The open unit was submitted as often as allowed: end the session with this reason."""
    OTHER_CHECKPOINT = "other_checkpoint"
    TRIMMED_TOO_FAR = "trimmed_too_far"
    """The entries of a unit that would have to be spoken again are gone."""
    LEDGER_REWOUND = "ledger_rewound"
    """The ledger ends before what was acknowledged to the client."""


class Refuse(msgspec.Struct, frozen=True):
    """This session cannot go on here; `reason` names the record. Nothing is deleted."""

    code: RefusalCode
    reason: str


def decide(loaded: LoadedSession, *, checkpoint: str, acknowledged_seq: int = 0) -> Resume | Refuse:
    """checkpoint: fingerprint of the one that runs here. acknowledged_seq: last unit that a client
    or gateway says was acknowledged, 0 if nobody says anything."""
    refusal = _refusal(loaded, checkpoint, acknowledged_seq)
    if refusal is not None:
        return refusal
    units = {unit.seq: unit for unit in loaded.committed}
    inputs = {unit.seq: unit for unit in loaded.accepted}
    silent = range(loaded.meta.voiced_seq + 1, loaded.head.committed_seq + 1)
    missing = [seq for seq in silent if seq not in units or seq not in inputs]
    if missing:
        return Refuse(RefusalCode.TRIMMED_TOO_FAR, f"unit {missing[0]} is not kept")
    respeak = tuple(
        Respeak(units[seq], inputs[seq], tuple(m for m in loaded.marks if m.unit == seq))
        for seq in silent
    )
    opened = loaded.open_unit
    epoch = next_epoch(loaded)
    return Resume(
        kind=_kind(bool(respeak), opened is not None),
        epoch=epoch,
        next_event_seq=loaded.meta.events_last + 1,
        respeak=respeak,
        redo=None if opened is None else Redo(opened, loaded.attempts + 1),
        catch_up=_catch_up(loaded, epoch, respeak),
    )


def next_epoch(loaded: LoadedSession) -> int:
    """One more than the largest epoch any record or mark names."""
    epochs = [unit.epoch for unit in (*loaded.accepted, *loaded.committed)]
    return max((*epochs, *(mark.epoch for mark in loaded.marks)), default=-1) + 1


def _refusal(loaded: LoadedSession, checkpoint: str, acknowledged_seq: int) -> Refuse | None:
    if loaded.meta.phase is not Phase.OPEN or loaded.closed is not None:
        closed = loaded.closed
        reason = closed.reason if closed is not None else loaded.meta.reason
        return Refuse(RefusalCode.ENDED, reason)
    if loaded.opening.checkpoint != checkpoint:
        reason = f"opening names checkpoint {loaded.opening.checkpoint}, here runs {checkpoint}"
        return Refuse(RefusalCode.OTHER_CHECKPOINT, reason)
    last = loaded.head.open_seq or loaded.head.committed_seq
    if acknowledged_seq > last:
        reason = f"unit {acknowledged_seq} was acknowledged, the ledger ends at {last}"
        return Refuse(RefusalCode.LEDGER_REWOUND, reason)
    if loaded.open_unit is not None and loaded.attempts >= MAX_ATTEMPTS:
        reason = f"unit {loaded.open_unit.seq} was submitted {loaded.attempts} times"
        return Refuse(RefusalCode.UNIT_FAILED, reason)
    return None


def _kind(respeaks: bool, redoes: bool) -> ResumeKind:
    if respeaks:
        return ResumeKind.RESPEAK_COMMITTED
    return ResumeKind.REDO_ACCEPTED if redoes else ResumeKind.CLEAN


def _catch_up(loaded: LoadedSession, epoch: int, respeak: tuple[Respeak, ...]) -> CatchUp | None:
    """The turn that sounded last, if it goes on: its end is not committed, or not yet spoken."""
    turn = loaded.meta.voice_turn
    if turn is None or not loaded.marks:
        return None
    last = loaded.committed[-1]
    ended = any(unit.turn == turn and unit.turn_end for unit in loaded.committed)
    goes_on = last.turn == turn and not ended
    if not goes_on and not any(one.unit.turn == turn for one in respeak):
        return None
    marks = loaded.marks
    if len(marks) > FULL_CATCH_UP_CHUNKS or marks[0].code_offset > 0:
        marks = marks[-SHORT_CATCH_UP_CHUNKS:]
    exact = marks[0].code_offset == 0
    return CatchUp(epoch, turn, marks, exact, loaded.meta.voice_samples)
