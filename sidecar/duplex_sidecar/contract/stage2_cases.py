"""Runs recorded stage-2 streams (`producer_sessions`, `consumer_sessions`) through ours."""

import math
from typing import NamedTuple

import msgspec

from duplex_sidecar.contract.types import CaseResult, Comparison, ContractFileError
from duplex_sidecar.model.minicpmo45.consumer import (
    INITIAL_STREAM_STATE,
    Admission,
    ChunkHeader,
    Refusal,
    StreamState,
    admit,
    open_epoch,
    reference_refusal,
)
from duplex_sidecar.model.minicpmo45.producer import (
    INITIAL_PRODUCER_STATE,
    Chunk,
    CodeRecord,
    ControlOnly,
    ProducerRules,
    produce,
)


class _ExpectedChunk(msgspec.Struct):
    """`control_only` alone, or all the others."""

    control_only: bool = False
    epoch: int | None = None
    seq: int | None = None
    codes: list[int] | None = None
    code_count: int | None = None
    new_codes: int | None = None
    left_context: int | None = None
    last_chunk: bool | None = None
    unit_flush: bool | None = None
    turn_end: bool | None = None
    has_ref_audio: bool | None = None
    text_len: int | None = None
    upstream_quirk: str | None = None


class _Record(msgspec.Struct):
    internal_id: int
    codes: list[int]
    finished: bool
    turn_end: bool
    aborted: bool
    turn: tuple[int, int]
    text_len: int
    expected: _ExpectedChunk | None


class ProducerSession(msgspec.Struct):
    id: int | str
    native_duplex: bool
    chunk_codes: int
    left_context: int
    ref_audio: bool
    steps: list[_Record]


def check_producer_session(session: ProducerSession) -> CaseResult:
    """One session of `producer_sessions`."""
    compare = Comparison(session.id)
    rules = ProducerRules(session.chunk_codes, session.left_context, session.native_duplex)
    state = INITIAL_PRODUCER_STATE
    for index, given in enumerate(session.steps):
        expected = given.expected
        if expected is not None and expected.upstream_quirk is not None:
            compare.skip(len(session.steps) - index)
            break
        record = CodeRecord(
            source=given.internal_id,
            turn=given.turn,
            codes=tuple(given.codes),
            finished=given.finished,
            turn_end=given.turn_end,
            text="x" * given.text_len,
            aborted=given.aborted,
        )
        output, state = produce(state, record, rules)
        _compare_output(compare, f"record {index}", expected, _as_recorded(output, session))
    return compare.result()


def _compare_output(
    compare: Comparison, where: str, expected: _ExpectedChunk | None, got: _ExpectedChunk | None
) -> None:
    if expected is None or got is None:
        compare.same(where, expected, got)
        return
    for name in expected.__struct_fields__:
        compare.same(f"{where} {name}", getattr(expected, name), getattr(got, name))


def _as_recorded(
    output: Chunk | ControlOnly | None, session: ProducerSession
) -> _ExpectedChunk | None:
    if output is None:
        return None
    if isinstance(output, ControlOnly):
        return _ExpectedChunk(control_only=True)
    return _ExpectedChunk(
        epoch=output.epoch,
        seq=output.sequence,
        codes=list(output.codes),
        code_count=output.code_count,
        new_codes=output.new_codes,
        left_context=output.left_context,
        last_chunk=output.last_chunk,
        unit_flush=output.unit_flush,
        turn_end=output.turn_end,
        # The product binds the voice when it opens the epoch; the record has it in chunk (0, 0).
        has_ref_audio=session.ref_audio and (output.epoch, output.sequence) == (0, 0),
        text_len=None if output.text is None else len(output.text),
    )


class _Position(msgspec.Struct):
    epoch: int
    seq: int


class _ExpectedAdmission(msgspec.Struct):
    state: _Position | None
    accepted: bool | None = None
    reason: str | None = None
    codes_to_vocoder: int | None = None
    upstream_quirk: str | None = None


class _Message(msgspec.Struct):
    stream: int
    expected: _ExpectedAdmission
    finished_request: bool = False
    epoch: int | None = None
    seq: int | None = None
    tokens_sent: int = 0
    code_count: int = 0
    last_chunk: bool = False
    unit_flush: bool = False
    ref: str | None = None


class ConsumerSession(msgspec.Struct):
    id: int | str
    steps: list[_Message]


class _Reference(NamedTuple):
    """Reference audio that a recorded message carries."""

    sample_rate_hz: int
    samples: tuple[float, ...]


_AFTER_REFERENCE = (None, Refusal.EMPTY_NONFINAL_CHUNK, Refusal.EPOCH_CLOSED)
"""Verdicts that a fault of the reference goes before."""
_REFERENCE_RATE_HZ = 24_000
_FAULTY_REFERENCES = {
    "bad_rate": _Reference(0, (0.5,)),
    "empty": _Reference(_REFERENCE_RATE_HZ, ()),
    "nan": _Reference(_REFERENCE_RATE_HZ, (math.nan,)),
}


def check_consumer_session(session: ConsumerSession) -> CaseResult:
    """One session of `consumer_sessions`: messages of interleaved streams."""
    compare = Comparison(session.id)
    streams: dict[int, StreamState] = {}
    for index, message in enumerate(session.steps):
        expected = message.expected
        if expected.upstream_quirk is not None:
            compare.skip(len(session.steps) - index)
            break
        where = f"message {index}"
        before = streams.get(message.stream, INITIAL_STREAM_STATE)
        if message.finished_request:
            after = streams[message.stream] = INITIAL_STREAM_STATE
        else:
            header = _header(message)
            refusal, after = _take(before, header, message.ref)
            streams[message.stream] = after
            accepted = refusal is None
            compare.same(f"{where} accepted", expected.accepted, accepted)
            compare.same(f"{where} reason", expected.reason, None if accepted else str(refusal))
            heard = header.code_count if accepted else 0
            compare.same(f"{where} codes_to_vocoder", expected.codes_to_vocoder, heard)
            if not accepted:
                compare.same(f"{where} untouched", True, after is before)
        position = None if expected.state is None else (expected.state.epoch, expected.state.seq)
        compare.same(f"{where} state", position, after.position)
    return compare.result()


def _header(message: _Message) -> ChunkHeader:
    if message.epoch is None or message.seq is None:
        raise ContractFileError("a message without epoch and seq")
    return ChunkHeader(
        epoch=message.epoch,
        sequence=message.seq,
        sent_codes=message.tokens_sent,
        code_count=message.code_count,
        last_chunk=message.last_chunk,
        unit_flush=message.unit_flush,
    )


def _take(before: StreamState, chunk: ChunkHeader, reference: str | None) -> Admission:
    """Open and admit in one: a recorded first chunk announces its epoch and may carry the voice."""
    state = before
    if chunk.sequence == 0 and (state.epoch is None or chunk.epoch > state.epoch):
        # A refused announcement leaves no epoch open; the admission below then names the reason.
        state = open_epoch(state, chunk.epoch, reference or state.voice).state
    refusal, after = admit(state, chunk)
    if reference is not None and refusal in _AFTER_REFERENCE:
        refusal = _voice_refusal(state, chunk, reference) or refusal
    return Admission(None, after) if refusal is None else Admission(refusal, before)


def _voice_refusal(state: StreamState, chunk: ChunkHeader, reference: str) -> Refusal | None:
    faulty = _FAULTY_REFERENCES.get(reference)
    if faulty is not None:
        return reference_refusal(faulty.sample_rate_hz, faulty.samples)
    if chunk.sequence and reference != state.voice:
        return Refusal.PROMPT_CHANGED_MIDSTREAM
    return None
