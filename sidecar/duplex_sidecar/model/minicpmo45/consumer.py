"""Admission of chunks to a vocoder stream (contract section E, "Consumer" and "Design it out").

A session's stream is opened explicitly at an epoch, with its voice; after that the epoch takes
exactly the sequence numbers 0, 1, 2, ... up to its last chunk. Whatever else arrives is refused by
name, and a refused message leaves the state as it was: its owner quarantines that stream, other
streams never notice. Nothing has a default: a chunk whose epoch was not opened is refused, not
taken for the first one.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Refusal(StrEnum):
    """Why a message was not accepted. The first ones are the public implementation's names."""

    STALE_CACHE_EPOCH = "stale_cache_epoch"
    NEW_EPOCH_REQUIRES_FIRST_CHUNK = "new_epoch_requires_first_chunk"
    STALE_OR_REORDERED_CHUNK = "stale_or_reordered_chunk"
    MISSING_STATE_FOR_CHUNK = "missing_state_for_chunk"
    NEGATIVE_STREAM_POSITION = "negative_stream_position"
    NEGATIVE_SEQ_TOKEN_COUNT = "negative_seq_token_count"
    SEQ_TOKEN_COUNT_MISMATCH = "seq_token_count_mismatch"
    EMPTY_NONFINAL_CHUNK = "empty_nonfinal_chunk"
    PROMPT_CHANGED_MIDSTREAM = "prompt_changed_midstream"
    INVALID_REF_AUDIO_SAMPLE_RATE = "invalid_ref_audio_sample_rate"
    EMPTY_REF_AUDIO = "empty_ref_audio"
    NON_FINITE_REF_AUDIO = "non_finite_ref_audio"
    EPOCH_NOT_OPENED = "epoch_not_opened"
    """A first chunk of an epoch that no `open` announced."""
    EPOCH_CLOSED = "epoch_closed"
    """A first chunk again after the last one. The public implementation accepts it; that is how a
    late message of an old turn could be heard."""
    EPOCH_ALREADY_STARTED = "epoch_already_started"
    """An `open` of an epoch that has taken chunks: it may not begin again."""


class StreamState(msgspec.Struct, frozen=True):
    """One session's stream.

    epoch: the newest one opened, None before the first. voice: name of the reference voice.
    next_sequence: the only sequence number that can be admitted. closed: the epoch had its last
    chunk.
    """

    epoch: int | None = None
    voice: str | None = None
    next_sequence: int = 0
    closed: bool = False

    @property
    def position(self) -> tuple[int, int] | None:
        """(epoch, last admitted sequence) while the epoch holds a vocoder state, else None."""
        if self.epoch is None or self.closed or self.next_sequence == 0:
            return None
        return self.epoch, self.next_sequence - 1


INITIAL_STREAM_STATE = StreamState()


class ChunkHeader(msgspec.Struct, frozen=True):
    """What admission needs to know of a chunk.

    sent_codes: codes in the message; code_count: how many of them count. A chunk without codes is
    valid as the end of a unit (unit_flush) or of the epoch (last_chunk).
    """

    epoch: int
    sequence: int
    sent_codes: int
    code_count: int
    last_chunk: bool
    unit_flush: bool


class Admission(NamedTuple):
    """Verdict on one message: with a refusal, `state` is the state of before."""

    refusal: Refusal | None
    state: StreamState


def open_epoch(state: StreamState, epoch: int, voice: str | None) -> Admission:
    """Announce an epoch and the voice it speaks with.

    Idempotent until its first chunk, so that it can be sent again as long as no answer came.
    """
    if epoch < 0:
        return Admission(Refusal.NEGATIVE_STREAM_POSITION, state)
    if state.epoch is not None:
        if epoch < state.epoch:
            return Admission(Refusal.STALE_CACHE_EPOCH, state)
        if epoch == state.epoch:
            if state.next_sequence or state.closed:
                return Admission(Refusal.EPOCH_ALREADY_STARTED, state)
            if voice != state.voice:
                return Admission(Refusal.PROMPT_CHANGED_MIDSTREAM, state)
            return Admission(None, state)
    return Admission(None, StreamState(epoch=epoch, voice=voice))


def admit(state: StreamState, chunk: ChunkHeader) -> Admission:
    """Take one chunk; its `code_count` codes go to the vocoder when there is no refusal."""
    refusal = _position_refusal(state, chunk.epoch, chunk.sequence) or _count_refusal(chunk)
    if refusal is None and state.closed:
        refusal = Refusal.EPOCH_CLOSED
    if refusal is not None:
        return Admission(refusal, state)
    after = msgspec.structs.replace(
        state, next_sequence=chunk.sequence + 1, closed=chunk.last_chunk
    )
    return Admission(None, after)


def _position_refusal(state: StreamState, epoch: int, sequence: int) -> Refusal | None:
    if epoch < 0 or sequence < 0:
        return Refusal.NEGATIVE_STREAM_POSITION
    if sequence and state.position is None:
        # Nothing to continue: not opened, opened without a first chunk yet, or closed.
        return Refusal.MISSING_STATE_FOR_CHUNK
    if state.epoch is None:
        return Refusal.EPOCH_NOT_OPENED
    if epoch > state.epoch:
        return Refusal.NEW_EPOCH_REQUIRES_FIRST_CHUNK if sequence else Refusal.EPOCH_NOT_OPENED
    if state.closed:
        return None  # refused as a closed epoch, once nothing else is wrong
    if epoch < state.epoch:
        return Refusal.STALE_CACHE_EPOCH
    return None if sequence == state.next_sequence else Refusal.STALE_OR_REORDERED_CHUNK


def _count_refusal(chunk: ChunkHeader) -> Refusal | None:
    if chunk.code_count < 0:
        return Refusal.NEGATIVE_SEQ_TOKEN_COUNT
    if chunk.code_count > chunk.sent_codes:
        return Refusal.SEQ_TOKEN_COUNT_MISMATCH
    if chunk.code_count == 0 and not (chunk.last_chunk or chunk.unit_flush):
        return Refusal.EMPTY_NONFINAL_CHUNK
    return None


def reference_refusal(sample_rate_hz: int, samples: Sequence[float]) -> Refusal | None:
    """Whether reference audio can become a voice: a positive rate, and finite samples."""
    if sample_rate_hz <= 0:
        return Refusal.INVALID_REF_AUDIO_SAMPLE_RATE
    if not samples:
        return Refusal.EMPTY_REF_AUDIO
    if not all(math.isfinite(sample) for sample in samples):
        return Refusal.NON_FINITE_REF_AUDIO
    return None
