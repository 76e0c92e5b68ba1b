"""From the Talker's codes to numbered stage-2 chunks (contract section E, "Producer"). Pure.

An epoch is a generation of the vocoder's cache; its chunks are numbered 0, 1, 2, ... without a
gap. A new epoch begins after the last chunk of a turn, and when the source of the codes changes
(barge-in, recovery). A window rebuild changes neither.
"""

from typing import NamedTuple

import msgspec

CHUNK_CODES = 25
LEFT_CONTEXT_CODES = 3
SILENCE_CODE = 4218
MIN_AUDIBLE_CODES = 5
"""A unit that would give fewer codes than this holds them for the next one."""
MAX_RETIRED_SOURCES = 64
EMPTY_CODES = (0,)
"""Placeholder in a chunk without codes; its `code_count` of 0 is what counts."""


class ProducerRules(msgspec.Struct, frozen=True):
    """Sizes, and what ends a stream.

    native_duplex: False for a plain reply, whose every finished unit is a last chunk.
    """

    chunk_codes: int = CHUNK_CODES
    left_context_codes: int = LEFT_CONTEXT_CODES
    native_duplex: bool = True


DUPLEX_RULES = ProducerRules()


class CodeRecord(msgspec.Struct, frozen=True):
    """Codes as they come from the Talker.

    source: what generates them; a session changes it when codes of before must not be heard any
    more. turn: (session epoch, turn). finished: last record of the unit. text: the unit's text,
    the same in all of its records.
    """

    source: int
    turn: tuple[int, int]
    codes: tuple[int, ...]
    finished: bool
    turn_end: bool
    text: str
    aborted: bool = False


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """One numbered chunk: left context and new codes; `code_count` is the authoritative length.

    unit_flush: last chunk of its unit. text: what the unit says, in the unit's first audible chunk
    ("" in its later ones, None in a chunk without sound). turn_end: closes its turn.
    """

    epoch: int
    sequence: int
    codes: tuple[int, ...]
    code_count: int
    new_codes: int
    left_context: int
    last_chunk: bool
    unit_flush: bool
    turn_end: bool
    text: str | None


class ControlOnly(msgspec.Struct, frozen=True, tag="control"):
    """The end of a turn that was closed already: nothing to vocode, no sequence number."""


class ProducerState(msgspec.Struct, frozen=True):
    """Where the stream stands: `epoch` and `sequence` are those of the next chunk.

    pending_codes: not sent yet. context_codes: the codes that the next chunk takes its left context
    from, None while no code was sent in this epoch. held_text: text of units whose codes are held.
    text_sent: the present unit's text went out. closed_turn: last turn that was closed.
    retired: sources that emit nothing any more (the last `MAX_RETIRED_SOURCES`).
    """

    source: int | None = None
    epoch: int = 0
    sequence: int = 0
    pending_codes: tuple[int, ...] = ()
    context_codes: tuple[int, ...] | None = None
    held_text: str = ""
    text_sent: bool = False
    closed_turn: tuple[int, int] | None = None
    retired: tuple[int, ...] = ()


INITIAL_PRODUCER_STATE = ProducerState()


class Produced(NamedTuple):
    """What a record gives (None: nothing yet) and the state after it."""

    output: Chunk | ControlOnly | None
    state: ProducerState


class UnitChunks(NamedTuple):
    """What a whole unit gives, in order, and the state after it."""

    outputs: tuple[Chunk | ControlOnly, ...]
    state: ProducerState


def new_epoch(state: ProducerState) -> ProducerState:
    """Start a new epoch: pending codes and context are gone, the next sequence number is 0.

    Called for a violation of the stream and for a recovery; a change of source does it by itself.
    """
    return msgspec.structs.replace(
        state,
        epoch=state.epoch + 1,
        sequence=0,
        pending_codes=(),
        context_codes=None,
        held_text="",
        text_sent=False,
    )


def produce(
    state: ProducerState, record: CodeRecord, rules: ProducerRules = DUPLEX_RULES
) -> Produced:
    """Take one record; emits at most one chunk."""
    if record.source in state.retired:
        return Produced(None, state)
    if record.aborted:
        return Produced(None, _retire(state, record.source))
    state = _follow_source(state, record.source)
    pending = state.pending_codes + record.codes
    ends_turn = rules.native_duplex and record.finished and record.turn_end
    if ends_turn and not pending and state.closed_turn == record.turn:
        return Produced(ControlOnly(), state)
    state = msgspec.structs.replace(state, pending_codes=pending)
    if not record.finished and len(pending) < rules.chunk_codes:
        return Produced(None, state)
    last_chunk = record.finished and (ends_turn or not rules.native_duplex)
    if record.finished and not last_chunk and len(pending) < MIN_AUDIBLE_CODES:
        return _hold(state, record)
    return _send(state, record, rules, last_chunk=last_chunk)


def produce_unit(
    state: ProducerState, record: CodeRecord, rules: ProducerRules = DUPLEX_RULES
) -> UnitChunks:
    """Take a whole unit (`record.finished`) as if its codes came one by one, so that no chunk
    has more than `rules.chunk_codes` new codes."""
    if not record.finished:
        raise ValueError("a whole unit is finished")
    outputs: list[Chunk | ControlOnly] = []
    codes = record.codes
    held = len(state.pending_codes) if record.source == state.source else 0
    room = max(1, rules.chunk_codes - held)
    while len(codes) > room:
        part = msgspec.structs.replace(record, codes=codes[:room], finished=False)
        output, state = produce(state, part, rules)
        codes, room = codes[room:], rules.chunk_codes
        if output is not None:
            outputs.append(output)
    output, state = produce(state, msgspec.structs.replace(record, codes=codes), rules)
    if output is not None:
        outputs.append(output)
    return UnitChunks(tuple(outputs), state)


def _retire(state: ProducerState, source: int) -> ProducerState:
    retired = (*state.retired, source)[-MAX_RETIRED_SOURCES:]
    return msgspec.structs.replace(state, retired=retired)


def _follow_source(state: ProducerState, source: int) -> ProducerState:
    """Retire the source of before, if the record is the first of another one."""
    if state.source == source:
        return state
    if state.source is not None:
        state = new_epoch(_retire(state, state.source))
    return msgspec.structs.replace(state, source=source)


def _hold(state: ProducerState, record: CodeRecord) -> Produced:
    """End a unit with too few codes to be heard: they join the next unit, and so does its text."""
    chunk = Chunk(
        epoch=state.epoch,
        sequence=state.sequence,
        codes=EMPTY_CODES,
        code_count=0,
        new_codes=0,
        left_context=0,
        last_chunk=False,
        unit_flush=True,
        turn_end=False,
        text=None,
    )
    held_text = state.held_text if state.text_sent else state.held_text + record.text
    after = msgspec.structs.replace(
        state, sequence=state.sequence + 1, held_text=held_text, text_sent=False
    )
    return Produced(chunk, after)


def _send(
    state: ProducerState, record: CodeRecord, rules: ProducerRules, *, last_chunk: bool
) -> Produced:
    """Send a full chunk, or all that is pending at the end of a unit."""
    pending = state.pending_codes
    new = pending if record.finished else pending[: rules.chunk_codes]
    context = _left_context(state, rules, has_new_codes=bool(new))
    codes = context + new
    text: str | None = None
    if rules.native_duplex and codes:
        text = "" if state.text_sent else state.held_text + record.text
    chunk = Chunk(
        epoch=state.epoch,
        sequence=state.sequence,
        codes=codes,
        code_count=len(codes),
        new_codes=len(new),
        left_context=len(context),
        last_chunk=last_chunk,
        unit_flush=record.finished,
        turn_end=last_chunk and rules.native_duplex,
        text=text,
    )
    if chunk.turn_end:
        closed = new_epoch(state)
        return Produced(chunk, msgspec.structs.replace(closed, closed_turn=record.turn))
    after = msgspec.structs.replace(
        state,
        sequence=state.sequence + 1,
        pending_codes=pending[len(new) :],
        context_codes=_last(codes, rules.left_context_codes) if new else state.context_codes,
        held_text="",
        text_sent=not record.finished,
    )
    return Produced(chunk, after)


def _left_context(
    state: ProducerState, rules: ProducerRules, *, has_new_codes: bool
) -> tuple[int, ...]:
    """Codes before the new ones: silence where the epoch begins, none if nothing follows."""
    if state.context_codes is not None:
        return state.context_codes
    return (SILENCE_CODE,) * rules.left_context_codes if has_new_codes else ()


def _last(codes: tuple[int, ...], count: int) -> tuple[int, ...]:
    return codes[-count:] if count else ()
