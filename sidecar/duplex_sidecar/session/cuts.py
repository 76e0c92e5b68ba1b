"""What a client's word makes of a reply: stopped, or taken back from where it was not heard. Pure.

The ledger's entries say what was said and what of it was taken back before; `Speech.sent` says
where each unit's sound lies in its turn. The write and the streams are `session.cutting`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from duplex_api.window import WindowBoundary
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.records import Accepted, Committed, Entry
from duplex_sidecar.model.minicpmo45.context import MEDIA_LENGTHS
from duplex_sidecar.model.minicpmo45.decode import answer_facts
from duplex_sidecar.model.minicpmo45.handoff import next_turn
from duplex_sidecar.model.minicpmo45.producer import new_epoch
from duplex_sidecar.model.minicpmo45.truncation import (
    SaidUnit,
    heard_tokens,
    left_of,
    policy_after_cut,
    turn_over,
)
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import CLOSING_STEPS, SequencedBody, TurnMark, TurnTruncated
from duplex_sidecar.session.conversation import Conversation, SentUnit, Speech
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.window.parts import HistoryUnit
from duplex_sidecar.window.restate import restate

OUTPUT_SAMPLES_PER_MS = 24


@dataclass(frozen=True)
class CutReply:
    """A command carried out: its entry, the states after it, what the client is told. changed:
    units that are rendered otherwise from now on. stops: the reply was under way."""

    draft: records.CutDraft
    conversation: Conversation
    speech: Speech
    bodies: tuple[SequencedBody, ...]
    changed: tuple[HistoryUnit, ...]
    stops: bool


@dataclass(frozen=True)
class Taken:
    """What is to be taken back. units: of the turn, as far as they are known. kept: content ids
    that are left, by unit, of those with less than before; never empty units before it."""

    units: tuple[SentUnit, ...]
    kept: dict[int, int]
    said: tuple[SaidUnit, ...]

    @property
    def first(self) -> int | None:
        """The oldest unit that changes."""
        return min(self.kept, default=None)


def cancelled(known: Conversation, speech: Speech, turn: int | None) -> CutReply:
    """The reply under way ends behind the last unit. Raises ClientError when there is none."""
    if not speech.turn_open or turn not in (None, speech.turn):
        raise ClientError(ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE, param="response_id")
    conversation = structs.replace(
        known,
        policy=turn_over(known.policy),
        completed_ends=WindowBoundary.TURN,
        listens_next=True,
    )
    draft = records.CancelledDraft(seq=known.seq, turn=speech.turn)
    marks = closing_marks(speech, known.seq)
    return CutReply(draft, conversation, stopped(speech), marks, (), stops=True)


def stopped(speech: Speech) -> Speech:
    """The turn is over. Codes that wait and what the vocoder holds back are never heard: the next
    turn has a new epoch, if this one had sound in its own."""
    producer = speech.producer
    return structs.replace(
        speech,
        turn_open=False,
        turn_text_rest=b"",
        handoff=next_turn(speech.handoff),
        codes=(),
        recent_codes=(),
        producer=new_epoch(producer) if producer.sequence else producer,
    )


def closing_marks(speech: Speech, unit: int) -> tuple[SequencedBody, ...]:
    """The last events of a turn that was stopped behind `unit`."""
    return tuple(
        TurnMark(step, speech.turn, unit, speech.turn_samples, speech.turn_text, cancelled=True)
        for step in CLOSING_STEPS
    )


def units_of(speech: Speech, turn: int) -> tuple[SentUnit, ...]:
    """The units of a turn that has sounded. Raises ClientError."""
    units = tuple(sent for sent in speech.sent if sent.turn == turn)
    if units:
        return units
    if turn > speech.turn:
        raise ClientError(ErrorCode.PLAYBACK_ITEM_NOT_FOUND, param="item_id")
    raise ClientError(ErrorCode.PLAYBACK_ACK_TOO_LATE, param="item_id")


def said_units(entries: Sequence[Entry]) -> tuple[SaidUnit, ...]:
    """The committed units of the chain, with what was taken back of them."""
    kept, stops = records.kept_tokens(entries), records.stopped_units(entries)
    inputs = {
        one.record.seq: one.record.input for one in entries if isinstance(one.record, Accepted)
    }
    return tuple(
        SaidUnit(
            seq=record.seq,
            sampled_ids=record.sampled_ids,
            emitted_ids=record.token_ids,
            is_speech=bool(inputs[record.seq].is_speech),
            force_listen=inputs[record.seq].force_listen,
            kept_tokens=kept.get(record.seq),
            cancelled=record.seq in stops,
        )
        for record in (entry.record for entry in entries)
        if isinstance(record, Committed) and record.seq in inputs
    )


def taken_back(
    units: tuple[SentUnit, ...],
    said: Sequence[SaidUnit],
    heard_ms: int,
    final_prompt_token: int,
    vocabulary: Vocabulary,
) -> Taken:
    """What of a turn was not heard and is still there. Raises ClientError when more was heard than
    was sent, or it is too long ago."""
    heard = heard_ms * OUTPUT_SAMPLES_PER_MS
    if heard >= units[-1].to_samples + OUTPUT_SAMPLES_PER_MS:
        detail = f"{units[-1].to_samples // OUTPUT_SAMPLES_PER_MS} ms of it were sent"
        raise ClientError(ErrorCode.PLAYBACK_ITEM_MISMATCH, detail, "audio_end_ms")
    if heard < units[0].from_samples:
        raise ClientError(ErrorCode.PLAYBACK_ACK_TOO_LATE, param="audio_end_ms")
    answers = {unit.seq: unit for unit in said}
    if units[-1].unit not in answers:
        raise ClientError(ErrorCode.PLAYBACK_ACK_TOO_LATE, param="audio_end_ms")
    kept: dict[int, int] = {}
    for sent in units:
        if sent.to_samples <= heard:
            continue
        answer = answers.get(sent.unit)
        if answer is None:
            raise ClientError(ErrorCode.PLAYBACK_ACK_TOO_LATE, param="audio_end_ms")
        tokens = heard_tokens(
            answer.emitted_ids,
            heard - sent.from_samples,
            sent.to_samples - sent.from_samples,
            final_prompt_token,
            vocabulary,
        )
        if tokens < _left(answer, vocabulary):
            kept[sent.unit] = tokens
    return Taken(units, kept, tuple(said))


def truncated(
    facts: SessionFacts,
    known: Conversation,
    speech: Speech,
    heard_ms: int,
    taken: Taken,
    closed: Sequence[HistoryUnit],
) -> CutReply:
    """The conversation without what was taken back. closed: the units before the last one that its
    next prompt shows (mode `off`: all), as they are rendered now. A reply that is under way is over
    with it."""
    completed = known.completed
    if completed is None:
        raise ValueError("nothing was said yet")
    turn, vocabulary = taken.units[0].turn, facts.vocabulary
    stops = speech.turn_open and speech.turn == turn
    said = [
        structs.replace(
            unit,
            kept_tokens=taken.kept.get(unit.seq, unit.kept_tokens),
            cancelled=unit.cancelled or (stops and unit.seq == known.seq),
        )
        for unit in taken.said
    ]
    before = (*closed, completed)
    after = tuple(_without(unit, taken.kept.get(unit.input.seq), vocabulary) for unit in before)
    changed = tuple(new for new, old in zip(after, before, strict=True) if new != old)
    policy = policy_after_cut(
        said,
        taken.units[0].unit,
        vocabulary,
        begins_there=taken.units[0].from_samples == 0,
    )
    conversation = structs.replace(
        known,
        policy=structs.replace(policy, pending_terminator=after[-1].terminator),
        window=restate(
            known.window,
            facts.policy,
            facts.layout,
            after[:-1],
            completed.input,
            facts.layout_ids,
            MEDIA_LENGTHS,
        ),
        completed=after[-1],
        completed_ends=WindowBoundary.TURN
        if stops or after[-1] != completed
        else known.completed_ends,
        listens_next=known.listens_next or stops,
        prompt_changed=known.prompt_changed or bool(changed),
    )
    tokens = sum(len(unit.ids) for unit in before) - sum(len(unit.ids) for unit in after)
    told = TurnTruncated(turn, known.seq, heard_ms, tokens)
    return CutReply(
        draft=_draft(known.seq, turn, heard_ms, taken, vocabulary, stops=stops),
        conversation=conversation,
        speech=stopped(speech) if stops else speech,
        bodies=(*closing_marks(speech, known.seq), told) if stops else (told,),
        changed=changed,
        stops=stops,
    )


def _draft(
    seq: int, turn: int, heard_ms: int, taken: Taken, vocabulary: Vocabulary, *, stops: bool
) -> records.TruncatedDraft:
    """Where nothing is taken back, the mark stands behind what was said."""
    through = taken.units[-1].unit
    first = taken.first
    if first is None:
        last = next(unit for unit in taken.said if unit.seq == through)
        first, tokens = through, _left(last, vocabulary)
    else:
        tokens = taken.kept[first]
    return records.TruncatedDraft(
        seq=seq,
        turn=turn,
        unit=first,
        token_index=tokens,
        through=through,
        played_ms=heard_ms,
        ends_turn=stops,
    )


def _left(unit: SaidUnit, vocabulary: Vocabulary) -> int:
    """Content ids that are there now."""
    content = len(answer_facts(unit.emitted_ids, vocabulary).content_ids)
    return content if unit.kept_tokens is None else min(content, unit.kept_tokens)


def _without(unit: HistoryUnit, kept: int | None, vocabulary: Vocabulary) -> HistoryUnit:
    left = left_of(unit.ids, unit.terminator, kept, vocabulary)
    return HistoryUnit(unit.input, left.ids, left.terminator)
