"""From a voiced unit to one journal batch: which events, in which order, with which numbers. Pure.

All of a unit's events go in one batch: after a crash either all of its sound is in the journal or
none, so nothing is said twice and nothing is missing.
"""

from collections.abc import Sequence

from msgspec import structs

from duplex_sidecar.ledger.journal import JournalBatch, VoiceMark
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    OPENING_STEPS,
    Audio,
    Sequenced,
    SequencedBody,
    Transcript,
    TurnMark,
    TurnStep,
    UnitDone,
    encode_sequenced,
)
from duplex_sidecar.session.conversation import (
    SENT_UNITS_KEPT,
    SentUnit,
    Speech,
    encode_speech,
)
from duplex_sidecar.session.speaking import SoundChunk, Voiced


def announce(
    before: Speech, voiced: Voiced, unit: int, done: UnitDone
) -> tuple[JournalBatch, list[Sequenced], Speech]:
    """The batch, its events, and the speech state after it."""
    audible = [sound for sound in voiced.chunks if sound.samples]
    bodies = _bodies(before, voiced, audible, unit, done)
    events = [
        Sequenced(number, body) for number, body in enumerate(bodies, before.last_sequence + 1)
    ]
    last_sequence, sent = events[-1].sequence, before.sent
    if voiced.chunks:
        position = _turn_position(before, voiced)
        samples = sum(sound.samples for sound in audible)
        newest = SentUnit(unit, voiced.speech.turn, position, position + samples, last_sequence)
        sent = (*sent, newest)[-SENT_UNITS_KEPT:]
    after = structs.replace(voiced.speech, last_sequence=last_sequence, sent=sent)
    batch = JournalBatch(
        unit=unit,
        first_seq=events[0].sequence,
        events=tuple(encode_sequenced(event) for event in events),
        mark=_mark(before, voiced, audible, unit) if audible else None,
        voiced_through=unit,
        voice_state=encode_speech(after),
    )
    return batch, events, after


def _bodies(
    before: Speech, voiced: Voiced, audible: Sequence[SoundChunk], unit: int, done: UnitDone
) -> list[SequencedBody]:
    after = voiced.speech
    bodies: list[SequencedBody] = []
    if voiced.turn_started:
        bodies += _turn_marks(OPENING_STEPS, after.turn, unit, 0, "")
    if voiced.text:
        bodies.append(Transcript(after.turn, unit, voiced.text))
    position = _turn_position(before, voiced)
    for sound in audible:
        chunk = sound.chunk
        bodies.append(
            Audio(after.turn, unit, chunk.epoch, chunk.sequence, position, sound.pcm_s16le)
        )
        position += sound.samples
    if voiced.turn_ended:
        bodies += _turn_marks(CLOSING_STEPS, after.turn, unit, after.turn_samples, after.turn_text)
    return [*bodies, done]


def _turn_position(before: Speech, voiced: Voiced) -> int:
    """24 kHz samples of the turn that were there before this unit."""
    return 0 if voiced.turn_started else before.turn_samples


def _turn_marks(
    steps: Sequence[TurnStep], turn: int, unit: int, samples: int, text: str
) -> list[SequencedBody]:
    return [TurnMark(step, turn, unit, samples, text) for step in steps]


def _mark(before: Speech, voiced: Voiced, audible: Sequence[SoundChunk], unit: int) -> VoiceMark:
    """One mark for all chunks of the unit: they are journaled together."""
    first = audible[0].chunk
    position = _turn_position(before, voiced)
    codes = [code for sound in audible for code in sound.chunk.codes[sound.chunk.left_context :]]
    return VoiceMark(
        epoch=first.epoch,
        sequence=first.sequence,
        turn=voiced.speech.turn,
        unit=unit,
        code_offset=0 if voiced.turn_started else before.turn_codes,
        codes=tuple(codes),
        from_samples=position,
        to_samples=position + sum(sound.samples for sound in audible),
    )
