"""What a replica decides to do with what it loaded."""

import msgspec
import pytest

from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.journal import VoiceMark
from duplex_sidecar.ledger.recovery import (
    RefusalCode,
    Refuse,
    Resume,
    ResumeKind,
    decide,
    next_epoch,
)
from duplex_sidecar.ledger.session_view import LoadedSession, Phase, parse_meta

pytestmark = pytest.mark.unit


COMMON = {"schema": 1, "replica": "a", "at_ms": 5, "prev_hash": ""}
PLAN = records.PlanFacts(records.PlanAction.EXTEND, "off", None, 0, 0, 0, 10)
EMPTY = msgspec.Raw(b"{}")
META = {
    "fence": "1", "nonce": "n", "replica": "a", "until": "0", "index": "0", "head": "",
    "opening_hash": "", "floor_hash": "", "records_first": "1", "window_floor": "1",
    "pcm_floor": "1", "bytes": "0", "events_first": "1", "events_last": "9", "token": "",
    "token_offered": "",
}  # fmt: skip


def opening() -> records.Opening:
    return records.Opening(
        session="s",
        checkpoint="c",
        parts=(),
        voice="v",
        window=EMPTY,
        sampling=EMPTY,
        output=EMPTY,
        limits=EMPTY,
        seed=1,
        traceparent="",
        rows=(),
        state_sha256="",
        **COMMON,
    )


def accepted(seq: int, epoch: int, turn: int) -> records.Accepted:
    return records.Accepted(
        seq=seq,
        epoch=epoch,
        turn=turn,
        input=records.UnitInput(16_000, 1, 0, 16_000, None, False, False),
        plan=PLAN,
        directive="",
        strategy="reprefill",
        seed=1,
        traceparent="",
        media=records.MediaRefs(None, None, ()),
        state_sha256=None,
        attempts=1,
        **COMMON,
    )


def committed(seq: int, epoch: int, turn: int, turn_end: bool) -> records.Committed:
    return records.Committed(
        seq=seq,
        epoch=epoch,
        turn=turn,
        token_ids=(1,),
        sampled_ids=(1,),
        terminator="turn_eos" if turn_end else "chunk_eos",
        decision="speak",
        turn_end=turn_end,
        plan=PLAN,
        state_sha256="",
        **COMMON,
    )


class Story:
    """Builds the loaded session of a conversation that got so far."""

    def __init__(self) -> None:
        self._records: list[records.Record] = []
        self._fields = {"phase": "open", "reason": ""}
        self._marks: list[VoiceMark] = []
        self._committed, self._open, self._voiced = 0, "", 0

    def accept(self, seq: int, *, epoch: int = 0, turn: int = 1) -> "Story":
        self._records.append(accepted(seq, epoch, turn))
        self._open = str(seq)
        return self

    def commit(self, seq: int, *, epoch: int = 0, turn: int = 1, turn_end: bool = False) -> "Story":
        self._records.append(committed(seq, epoch, turn, turn_end))
        self._committed, self._open = seq, ""
        return self

    def redo(self, seq: int, attempt: int) -> "Story":
        draft = records.RedoDraft(seq=seq, attempt=attempt, cause="engine_restart")
        self._add(draft)
        return self

    def close(self, reason: str) -> "Story":
        self._add(records.ClosedDraft(seq=self._committed, reason=reason))
        return self

    def sound(self, seq: int, *, done: bool = True, turn: int = 1, epoch: int = 0) -> "Story":
        chunk = len([mark for mark in self._marks if mark.turn == turn])
        self._marks = [mark for mark in self._marks if mark.turn == turn]
        mark = VoiceMark(
            epoch, chunk, turn, seq, 25 * chunk, (7,) * 25, 24_000 * chunk, 24_000 * (chunk + 1)
        )
        self._marks.append(mark)
        self._voiced = seq if done else self._voiced
        return self

    def listened(self, seq: int) -> "Story":
        self._voiced = seq
        return self

    def ended(self) -> "Story":
        self._fields["phase"], self._fields["reason"] = "ended", "client_closed"
        return self

    def _add(self, draft: records.NoteDraft) -> None:
        self._records.append(
            records.note(draft, state_sha256=None, replica="a", at_ms=1, prev_hash="")
        )

    def loaded(self) -> LoadedSession:
        last = self._marks[-1] if self._marks else None
        fields = {
            **META,
            **self._fields,
            "committed": str(self._committed),
            "open": self._open,
            "voiced": str(self._voiced),
            "voice_turn": str(last.turn) if last else "",
            "voice_samples": str(last.to_samples) if last else "0",
        }
        meta = parse_meta("s", {k.encode(): v.encode() for k, v in fields.items()})
        start = opening()
        entries = [records.Entry(i, "", r, b"") for i, r in enumerate(self._records, 1)]
        return LoadedSession(
            session="s",
            meta=meta,
            opening=start,
            opening_entry=records.Entry(0, "", start, b""),
            reference_rows=(),
            entries=tuple(entries),
            state=b"",
            accepted_state=None,
            media={},
            marks=tuple(self._marks),
            voice_state=None,
            voice_unit=self._voiced,
        )


def resume(story: Story) -> Resume:
    decision = decide(story.loaded(), checkpoint="c")
    assert isinstance(decision, Resume)
    return decision


def refuse(story: Story, checkpoint: str = "c") -> Refuse:
    loaded = story.loaded()
    decision = decide(loaded, checkpoint=checkpoint)
    assert isinstance(decision, Refuse)
    return decision


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_session_without_units_is_clean(story: Story) -> None:
    decision = resume(story)
    assert (decision.kind, decision.epoch, decision.next_event_seq) == (ResumeKind.CLEAN, 0, 10)


def test_everything_voiced_is_clean_and_starts_a_new_epoch(story: Story) -> None:
    decision = resume(story.accept(1).commit(1, turn_end=True).sound(1))
    assert (decision.kind, decision.epoch) == (ResumeKind.CLEAN, 1)


def test_an_accepted_unit_is_redone(story: Story) -> None:
    decision = resume(story.accept(1).commit(1, turn_end=True).sound(1).accept(2))
    assert decision.kind is ResumeKind.REDO_ACCEPTED
    assert decision.redo is not None
    assert (decision.redo.unit.seq, decision.redo.attempt) == (2, 2)


def test_a_unit_is_redone_once_and_then_has_failed(story: Story) -> None:
    redo = resume(story.accept(1)).redo
    assert redo is not None
    assert redo.attempt == 2
    refusal = refuse(story.redo(1, 2))
    assert refusal.code is RefusalCode.UNIT_FAILED
    assert "unit 1" in refusal.reason


def test_attempts_of_an_earlier_unit_do_not_count(story: Story) -> None:
    story.accept(1).redo(1, 2).commit(1, turn_end=True).sound(1).accept(2)
    redo = resume(story).redo
    assert redo is not None
    assert redo.attempt == 2


def test_a_committed_unit_that_did_not_sound_is_spoken_again(story: Story) -> None:
    decision = resume(story.accept(1).commit(1).sound(1).accept(2).commit(2))
    assert decision.kind is ResumeKind.RESPEAK_COMMITTED
    assert [one.unit.seq for one in decision.respeak] == [2]


def test_respeaking_and_redoing_come_together(story: Story) -> None:
    decision = resume(story.accept(1).commit(1).accept(2))
    assert decision.kind is ResumeKind.RESPEAK_COMMITTED
    assert decision.redo is not None


def test_the_epoch_is_larger_than_any_used(story: Story) -> None:
    story.accept(1, epoch=3).commit(1, epoch=3).sound(1, epoch=5)
    assert next_epoch(story.loaded()) == 6


def test_another_checkpoint_is_refused_by_name(story: Story) -> None:
    refusal = refuse(story, checkpoint="other")
    assert refusal.code is RefusalCode.OTHER_CHECKPOINT
    assert "checkpoint c" in refusal.reason


def test_an_ended_or_closed_session_is_not_resumed() -> None:
    assert refuse(Story().ended()).reason == "client_closed"
    closed = refuse(Story().accept(1).commit(1).sound(1).close("expired"))
    assert (closed.code, closed.reason) == (RefusalCode.ENDED, "expired")


def test_a_tombstone_parses_to_its_phase() -> None:
    assert parse_meta("s", {b"phase": b"erased", b"erased_at": b"1"}).phase is Phase.ERASED


def test_head_is_what_meta_says(story: Story) -> None:
    head = story.accept(1).loaded().head
    assert head == Head(index=0, hash="", committed_seq=0, open_seq=1)
