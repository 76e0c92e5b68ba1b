"""What was handed over, spoken and vocoded, in the schemas of hand-off, Talker and stage 2.

Measured at the stages: a hand-off is what the Talker got, its rows are found by their digests among
the rows that the Thinker gave, and a chunk's new codes by what the Talker had said and was not sent
yet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from duplex_sidecar.contract.recorder_session import TalkerUnit, TapedSession
from duplex_sidecar.contract.recorder_tape import ConditionOf, TalkerFed, WaveFed
from duplex_sidecar.contract.recorder_window import NotExpressible
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary

MAX_OUTPUT_IDS = 2_000
"""A hand-off session repeats all its ids with each output: a longer one is written as several, each
from the end of a turn on."""
CHUNK_CODES = 25
LEFT_CONTEXT_CODES = 3
EPOCH_BEGIN = (4218,) * LEFT_CONTEXT_CODES
"""Left context of an epoch's first chunk: silence."""
REFUSALS = frozenset(
    {
        "stale_cache_epoch",
        "new_epoch_requires_first_chunk",
        "stale_or_reordered_chunk",
        "missing_state_for_chunk",
        "negative_stream_position",
        "negative_seq_token_count",
        "seq_token_count_mismatch",
        "empty_nonfinal_chunk",
    }
)
_CODES = {"start": (26, 0), "mid": (26, 26), "end": (104, 0)}
"""Budget of each kind of Talker unit: greatest and least number of codes, the end code included."""


# --- hand-off -------------------------------------------------------------------------------------


def handoff_sessions(session: TapedSession, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """Lines of `handoff_sessions`."""
    audio_slot = vocabulary.find(ControlToken.AUDIO)
    closes = {wave.unit for wave in session.waves if wave is not None and wave.last_chunk}
    steps: list[dict[str, Any]] = []
    ids: list[int] = []
    condition, part, turn = 0, 0, 1
    for unit in session.units:
        emitted, hidden = unit.answer.emitted_ids, unit.answer.hidden
        ids += emitted
        first = unit.prompt_tokens
        step: dict[str, Any] = {
            "request": 0,
            "turn_id": turn,
            "output_ids": list(ids),
            "final_prompt_token": vocabulary.unit_end if audio_slot is None else audio_slot,
            "ledger_ids": list(emitted[:-1]),
            "ledger_positions": list(range(first, first + len(emitted) - 1)),
            "hidden_rows": len(hidden),
            "expected": {"outcome": "none"},
        }
        ends = unit.seq in closes
        spoken = session.spoken.get(unit.seq)
        if spoken is not None:
            expected = _handoff(spoken.fed, emitted, hidden, vocabulary)
            ends = expected["turn_end"]
            expected |= {"condition_seq": condition, "turn_id_after": turn + ends}
            step["expected"] = expected
            condition += 1
        steps.append(step)
        turn += ends
        if ends and len(ids) > MAX_OUTPUT_IDS:
            yield {"id": _part(session, part), "steps": steps}
            steps, ids, condition, part = [], [], 0, part + 1
    if steps:
        yield {"id": _part(session, part), "steps": steps}


def _handoff(
    fed: TalkerFed, emitted: Sequence[int], hidden: Sequence[str], vocabulary: Vocabulary
) -> dict[str, Any]:
    """What the Talker was handed, as a hand-off."""
    condition = _condition(fed)
    rows: list[int] = []
    for row in condition.rows:
        after = rows[-1] + 1 if rows else 0
        # Equal rows are told apart by their order.
        found = next((i for i in range(after, len(hidden)) if hidden[i] == row), -1)
        rows.append(found)
    ends = bool(condition.ids) and condition.ids[-1] == vocabulary.turn_eos
    behind = rows[-1] + 1 if rows else 0
    closed = behind < len(emitted) and emitted[behind] in (
        vocabulary.chunk_eos,
        vocabulary.chunk_tts_eos,
    )
    max_codes, min_codes = _CODES[fed.kind]
    starts = _starts_turn(fed)
    return {
        "outcome": "handoff",
        "ids": list(condition.ids),
        "hidden_rows": rows,
        "text": vocabulary.text(condition.ids),
        "turn_start": starts,
        "segment_end": closed and not ends,
        "turn_end": ends,
        "prompt_len": _length(condition),
        "generation_tokens": max_codes,
        "replace_prompt": starts,
        "max_codes": max_codes,
        "min_codes": min_codes,
    }


def _condition(fed: TalkerFed) -> ConditionOf:
    last = fed.parts[-1]
    return last if isinstance(last, ConditionOf) else ConditionOf((), ())


def _length(condition: ConditionOf) -> int:
    """Talker positions: one a token, and the row that closes them."""
    return len(condition.ids) + 1


def _starts_turn(fed: TalkerFed) -> bool:
    """As the Talker was told; for the end of a turn, which may be its start as well: a prompt of
    this condition alone, and nothing said before it that a penalty would need."""
    if fed.kind != "end":
        return fed.kind == "start"
    return fed.opens and len(fed.parts) == 1 and not fed.recent_codes


def _part(session: TapedSession, part: int) -> str:
    return session.opening.session + (f"#{part + 1}" if part else "")


# --- the Talker's prompt --------------------------------------------------------------------------


def talker_context_sessions(session: TapedSession) -> Iterator[dict[str, Any]]:
    """Lines of `talker_context_sessions`. The schema knows no lost stream: after one, the next
    reply begins another line."""
    case: dict[str, Any] | None = None
    part = 0
    before: TalkerUnit | None = None
    for unit in sorted(session.spoken):
        spoken = session.spoken[unit]
        fed, length = spoken.fed, _length(_condition(spoken.fed))
        starts = _starts_turn(fed)
        if case is not None and spoken.lost and not starts:
            yield case
            case, part = None, part + 1
        if case is not None and before is not None:
            case["steps"].append(
                {
                    "confirmed_codes": len(before.codes),
                    "condition_seq": len(case["steps"]) + 1,
                    "condition_len": length,
                    "reserve": _CODES[fed.kind][0],
                    "turn_start": starts,
                    "expected": {
                        "action": _action(fed),
                        "prompt_len_after": fed.position + _prompt_tokens(fed),
                    },
                }
            )
        elif starts:
            case = {
                "id": _part(session, part),
                "max_model_len": session.opening.max_talker_tokens,
                "opening_condition_len": length,
                "steps": [],
            }
        before = spoken
    if case is not None:
        yield case


def _action(fed: TalkerFed) -> str:
    if not fed.opens:
        return "extend"
    return "replace" if len(fed.parts) == 1 else "recompute"


def _prompt_tokens(fed: TalkerFed) -> int:
    return sum(_length(part) if isinstance(part, ConditionOf) else len(part) for part in fed.parts)


# --- stage 2: what was sent -----------------------------------------------------------------------


def producer_session(session: TapedSession, vocabulary: Vocabulary) -> dict[str, Any] | None:
    """One line of `producer_sessions`, of all chunks that were sent, whatever became of them; None
    for a session that never spoke. Raises NotExpressible."""
    producer = _ProducerTrace()
    by_unit: dict[int, list[WaveFed]] = {}
    for wave in session.waves:
        if wave is not None:
            by_unit.setdefault(wave.unit, []).append(wave)
    for unit in session.units:
        waves = by_unit.get(unit.seq, [])
        spoken = session.spoken.get(unit.seq)
        codes = () if spoken is None else spoken.codes
        if spoken is None:
            ends = vocabulary.turn_eos in unit.answer.emitted_ids and bool(waves)
        else:
            ends = _condition(spoken.fed).ids[-1:] == (vocabulary.turn_eos,)
        if waves:
            producer.unit(waves, codes, turn_end=ends)
    if not producer.steps:
        return None
    return {
        "id": session.opening.session,
        "native_duplex": True,
        "chunk_codes": CHUNK_CODES,
        "left_context": LEFT_CONTEXT_CODES,
        "ref_audio": False,
        "steps": producer.steps,
    }


@dataclass
class _ProducerTrace:
    """Cuts the codes of each unit into the records that its chunks answer to."""

    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    source: int = 0
    epoch: int | None = None
    closed: bool = False
    unsent: tuple[int, ...] = ()
    sounded: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """New codes of this turn's chunks so far, of units that are through."""

    def unit(self, waves: Sequence[WaveFed], codes: tuple[int, ...], *, turn_end: bool) -> None:
        """All chunks of one unit, in order. A new epoch inside of it has all of its codes again,
        behind those of the turn's earlier chunks. Raises NotExpressible."""
        epochs = sorted({wave.epoch for wave in waves})
        held, sent = self.unsent, list[tuple[int, ...]]()
        for epoch in epochs:
            # A turn that was closed in vain is closed again, which the schema cannot tell from one
            # that is closed twice.
            final = epoch == epochs[-1]
            chunks = [
                wave for wave in waves if wave.epoch == epoch and (final or not wave.last_chunk)
            ]
            rest = codes
            if self._enter(epoch):
                # Another source of codes: what waited unsent comes from it as well.
                chunks, rest = self._catch_up(chunks), held + codes
            sent = []
            for number, wave in enumerate(chunks):
                body = wave.codes[: max(0, wave.code_count)]
                new = _new_codes(body, self.unsent + rest)
                # One that was given up in the middle ends where the chunk that failed ends.
                last = number == len(chunks) - 1 and (
                    final or not body or new == len(self.unsent + rest)
                )
                taken = rest if last else rest[: max(0, new - len(self.unsent))]
                rest = rest[len(taken) :]
                self.unsent = (self.unsent + taken)[new:]
                self.steps.append(self._step(wave, taken, new, finished=last, turn_end=turn_end))
                self.closed = wave.last_chunk
                if new:
                    sent.append(body[len(body) - new :])
        self.sounded = [] if self.closed else [*self.sounded, *sent]

    def _enter(self, epoch: int) -> bool:
        """A turn's end begins an epoch; any other one comes from another source of codes, which is
        returned as true."""
        begins_again = self.epoch not in (None, epoch) and not self.closed
        if epoch != self.epoch:
            self.unsent = ()
        self.source += begins_again
        self.epoch, self.closed = epoch, False
        return begins_again

    def _catch_up(self, chunks: list[WaveFed]) -> list[WaveFed]:
        """The chunks behind those that only bring the new epoch to where the turn was."""
        count = 0
        for wave, known in zip(chunks, self.sounded, strict=False):
            if count == 0 and wave.codes[:LEFT_CONTEXT_CODES] != EPOCH_BEGIN:
                raise NotExpressible("the vocoder was caught up from the middle of a long turn")
            if wave.codes[LEFT_CONTEXT_CODES:] != known:
                break
            self.steps.append(self._step(wave, known, len(known), finished=True, turn_end=False))
            count += 1
        return chunks[count:]

    def _step(
        self, wave: WaveFed, codes: tuple[int, ...], new: int, *, finished: bool, turn_end: bool
    ) -> dict[str, Any]:
        return {
            "internal_id": self.source,
            "codes": list(codes),
            "finished": finished,
            "turn_end": turn_end,
            "aborted": False,
            "turn": [0, wave.turn],
            "text_len": 0,
            "expected": {
                "epoch": wave.epoch,
                "seq": wave.sequence,
                "codes": list(wave.codes),
                "code_count": wave.code_count,
                "new_codes": new,
                "left_context": wave.code_count - new,
                "last_chunk": wave.last_chunk,
                "unit_flush": finished,
                "turn_end": wave.last_chunk,
                "has_ref_audio": False,
                "text_len": 0 if wave.code_count else None,
            },
        }


def _new_codes(body: Sequence[int], available: Sequence[int]) -> int:
    """How many codes at the end of a chunk are the next ones that were not sent yet."""
    for count in range(min(len(body), len(available)), 0, -1):
        if tuple(body[len(body) - count :]) == tuple(available[:count]):
            return count
    return 0


# --- stage 2: what was taken ----------------------------------------------------------------------


class _Position(NamedTuple):
    epoch: int
    seq: int


def consumer_session(session: TapedSession) -> dict[str, Any] | None:
    """One line of `consumer_sessions`: the chunks that arrived, in order; None without any."""
    steps: list[dict[str, Any]] = []
    state: _Position | None = None
    units = [wave.unit for wave in session.waves if wave is not None]
    for index, wave in enumerate(session.waves):
        if wave is None:
            # The vocoder or its owner is another one: it knows nothing of the stream.
            state = None
            steps.append({"stream": 0, "finished_request": True, "expected": {"state": None}})
            continue
        reason = None if wave.fault is None else wave.fault.reason
        if wave.fault is not None and reason not in REFUSALS:
            continue  # lost on the way, or no verdict on the chunk itself
        if reason is None:
            state = None if wave.last_chunk else _Position(wave.epoch, wave.sequence)
        steps.append(
            {
                "stream": 0,
                "epoch": wave.epoch,
                "seq": wave.sequence,
                "tokens_sent": len(wave.codes),
                "code_count": wave.code_count,
                "last_chunk": wave.last_chunk,
                "unit_flush": _ends_unit(session.waves, index),
                "ref": None,
                "expected": {
                    "accepted": reason is None,
                    "reason": reason,
                    "codes_to_vocoder": wave.code_count if reason is None else 0,
                    "state": None if state is None else state._asdict(),
                },
            }
        )
    return {"id": session.opening.session, "steps": steps} if units else None


def _ends_unit(waves: Sequence[WaveFed | None], index: int) -> bool:
    """Whether no later chunk is of the same unit."""
    wave = waves[index]
    later = next((other for other in waves[index + 1 :] if other is not None), None)
    return wave is not None and (later is None or later.unit != wave.unit)
