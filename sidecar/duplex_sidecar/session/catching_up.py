"""What a new vocoder epoch hears first, muted, when one is lost in mid-turn. Pure.

A fresh epoch that is fed the turn's chunks from the first one is in the state of the lost one: it
holds back the same samples, draws the same noise, and its next chunk sounds as it would have. Their
samples are in the journal already and are dropped, so none is missing and none comes twice. A long
turn is not fed whole: then the epoch starts two chunks back, on the same boundaries, so that its
samples still follow the journaled ones; what they sound like is an approximation.
"""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import structs

from duplex_sidecar.ledger.journal import VoiceMark
from duplex_sidecar.model.minicpmo45.producer import (
    CHUNK_CODES,
    LEFT_CONTEXT_CODES,
    SILENCE_CODE,
    Chunk,
    ProducerState,
)

FULL_CHUNKS = 8
"""Turns of so many chunks are caught up from their first one."""
SHORT_CHUNKS = 2
"""Longer ones from so many chunks back."""


class SoundedCodes(msgspec.Struct, frozen=True):
    """New codes of the chunks of the present turn whose sound is out, oldest first.

    context: the codes before chunks[0], as its left context. exact: chunks[0] is the turn's first.
    """

    chunks: tuple[tuple[int, ...], ...] = ()
    context: tuple[int, ...] = (SILENCE_CODE,) * LEFT_CONTEXT_CODES
    exact: bool = True

    def then(self, chunks: Iterable[tuple[int, ...]]) -> "SoundedCodes":
        """With the turn's next chunks; keeps no more than a catch-up feeds."""
        heard = (*self.chunks, *chunks)
        if self.exact and len(heard) <= FULL_CHUNKS:
            return SoundedCodes(heard, self.context, exact=True)
        codes = (*self.context, *(code for chunk in heard[:-SHORT_CHUNKS] for code in chunk))
        return SoundedCodes(heard[-SHORT_CHUNKS:], codes[-LEFT_CONTEXT_CODES:], exact=False)


NOTHING_SOUNDED = SoundedCodes()


def sounded_of(marks: Sequence[VoiceMark], turn: int) -> SoundedCodes:
    """The same out of the ledger's marks, one a unit, of the last turn that sounded."""
    marks = [mark for mark in marks if mark.turn == turn]
    if not marks:
        return NOTHING_SOUNDED
    sounded = SoundedCodes(exact=marks[0].code_offset == 0)
    return sounded.then(chunk for mark in marks for chunk in _chunks_of(mark.codes))


def begin_again(
    producer: ProducerState, sounded: SoundedCodes
) -> tuple[tuple[Chunk, ...], ProducerState]:
    """The chunks to feed muted to the next epoch, and the state from which the turn goes on in it.
    Codes that wait for the next unit wait on: they never sounded."""
    epoch, context = producer.epoch + 1, sounded.context
    chunks: list[Chunk] = []
    for sequence, new in enumerate(sounded.chunks):
        codes = context + new
        chunks.append(
            Chunk(
                epoch=epoch,
                sequence=sequence,
                codes=codes,
                code_count=len(codes),
                new_codes=len(new),
                left_context=len(context),
                last_chunk=False,
                unit_flush=True,
                turn_end=False,
                text=None,
            )
        )
        context = codes[-LEFT_CONTEXT_CODES:]
    return tuple(chunks), structs.replace(producer, epoch=epoch, sequence=len(chunks))


def _chunks_of(codes: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """The chunks in which a unit's codes were sent: full ones, then what was left."""
    return (codes[start : start + CHUNK_CODES] for start in range(0, len(codes), CHUNK_CODES))
