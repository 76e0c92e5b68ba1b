"""The Thinker: keeps every position of a stream's prompt; its logits are a hash of all of them and
of the unit's rules, run through the real decode policy."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_stage import HIDDEN, FakeStage, rows, rows_in

from duplex_sidecar.model.minicpmo45.decode import (
    SampledStep,
    UnitRules,
    decode_rules,
    emit,
    next_step,
)
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.stages.envelope import (
    ElementType,
    Ids,
    Tensor,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
)
from duplex_sidecar.stages.errors import StageFault

Position = int | bytes
"""An id, or the bytes of a row."""


@dataclass(frozen=True)
class Submission:
    """One feed that was answered. prompt: all positions of the stream before the answer. opened:
    the first one of its stream with an append in it. ahead: it held no append at all."""

    session: str
    stream: str
    unit: int
    opened: bool
    prompt: tuple[Position, ...]
    rules: UnitRules
    emitted: tuple[int, ...]
    ahead: bool = False


@dataclass
class _Stream:
    session: str
    positions: list[Position] = field(default_factory=list)
    hash: "hashlib.blake2b" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    last_unit: int = -1
    busy: bool = False
    answered: bool = False

    def take(self, position: Position) -> None:
        self.positions.append(position)
        name = b"i%d" % position if isinstance(position, int) else b"r" + position
        self.hash.update(len(name).to_bytes(2, "little") + name)


class FakeThinker(FakeStage):
    """words: ids of spoken text. max_model_len: what the engine itself can hold."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: Sequence[int],
        *,
        max_model_len: int = 8192 + 32,
        seats: int = 6,
    ) -> None:
        super().__init__("thinker")
        self._vocabulary = vocabulary
        self._words = words
        self._max_model_len = max_model_len
        self._seats = seats
        self.streams: dict[str, _Stream] = {}
        self.submissions: list[Submission] = []
        self.opened_ahead: list[Submission] = []
        """Streams that were given closed units and no append yet."""

    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer:
        await self._enter(request.unit)
        rules = decode_rules(request.rules, self._vocabulary)
        stream = self._admit(request, rules)
        stream.busy = True
        for part in request.parts:
            for position in part.ids if isinstance(part, Ids) else rows_in(part.rows):
                stream.take(position)
        prompt = tuple(stream.positions)
        sampled, emitted, hidden = self._answer(stream, rules, request.rules)
        stream.last_unit = request.unit
        stream.busy = False
        await self._leave(request.unit)
        # An append ends with its audio rows.
        ahead = isinstance(request.parts[-1], Ids)
        submission = Submission(
            request.session,
            request.stream,
            request.unit,
            not ahead and not stream.answered,
            prompt,
            rules,
            tuple(emitted),
            ahead,
        )
        (self.opened_ahead if ahead else self.submissions).append(submission)
        stream.answered = not ahead
        return ThinkerAnswer(
            session=request.session,
            stream=request.stream,
            unit=request.unit,
            emitted_ids=tuple(emitted),
            sampled_ids=tuple(sampled),
            hidden=hidden,
            engine_ms=0.0,
        )

    async def close(self, request: ThinkerClose) -> None:
        await self._enter()
        self.streams.pop(request.stream, None)

    def _admit(self, request: ThinkerFeed, rules: UnitRules) -> _Stream:
        stream = self.streams.get(request.stream)
        if stream is None and not request.opens:
            raise self.error(StageFault.UNKNOWN_STREAM, "no such stream")
        problem = self._problem(stream, request, rules)
        if problem is not None:
            self.streams.pop(request.stream, None)
            raise self.error(StageFault.REFUSED, problem)
        return self.streams.setdefault(request.stream, stream or _Stream(request.session))

    def _problem(
        self, stream: _Stream | None, request: ThinkerFeed, rules: UnitRules
    ) -> str | None:
        new = 0
        for part in request.parts:
            if isinstance(part, Ids):
                new += len(part.ids)
                if not part.ids or not all(0 <= id_ < self._vocabulary.size for id_ in part.ids):
                    return "ids"
            else:
                new += part.rows.shape[0]
                if part.rows.shape[1:] != (HIDDEN,) or not part.rows.shape[0]:
                    return "rows"
        if new < 1 or request.position + new + rules.token_limit > self._max_model_len:
            return f"{request.position} + {new} positions"
        if stream is None:
            if request.position != 0:
                return "a stream opens at position 0"
            return "no seat" if len(self.streams) >= self._seats else None
        if request.opens:
            return "a stream of this name is open"
        if stream.busy:
            return "busy"
        if request.position != len(stream.positions):
            return f"the stream holds {len(stream.positions)} positions, not {request.position}"
        return None if request.unit > stream.last_unit else f"unit {request.unit} again"

    def _answer(
        self, stream: _Stream, rules: UnitRules, encoded: bytes
    ) -> tuple[list[int], list[int], Tensor]:
        sampled: list[int] = []
        emitted: list[int] = []
        names: list[bytes] = []
        while len(emitted) < rules.token_limit:
            step = next_step(rules, sampled, emitted, self._vocabulary)
            if isinstance(step, SampledStep):
                state = stream.hash.copy()
                state.update(encoded)
                id_ = self._sample(state.digest(), step)
                sampled.append(id_)
                emitted.append(emit(step, id_, self._vocabulary))
            else:
                sampled.append(step)
                emitted.append(step)
            done = emitted[-1] in self._vocabulary.terminators and not rules.scripted_ids
            if done or len(emitted) == rules.token_limit:
                break
            # The last token is not fed: it has neither a position nor a row.
            stream.take(emitted[-1])
            names.append(stream.hash.copy().digest())
        hidden = rows(*names) if names else Tensor(ElementType.FLOAT32, (0, HIDDEN), b"")
        return sampled, emitted, hidden

    def _sample(self, digest: bytes, step: SampledStep) -> int:
        """Odds under which a conversation has all that can happen."""
        v = self._vocabulary
        draw, rest = digest[0] % 100, int.from_bytes(digest[1:9], "little")
        word = self._words[rest % len(self._words)]
        if step.token_index == 0:
            if step.turn_open:
                odds = ((60, v.speak), (75, v.listen), (85, v.turn_eos), (100, v.chunk_eos))
            else:
                odds = ((40, v.listen), (90, v.speak), (100, v.tts_bos))
        else:
            odds = (
                (75, word),
                (86, v.turn_eos),
                (95, v.chunk_eos),
                (97, v.chunk_tts_eos),
                (100, v.listen),
            )
        return next(id_ for limit, id_ in odds if draw < limit)

    def _failed(self, unit: int, fault: StageFault) -> None:
        if fault in (StageFault.UNKNOWN_STREAM, StageFault.TIMEOUT, StageFault.ROWS_LOST):
            for name, held in list(self.streams.items()):
                if held.last_unit in (unit, unit - 1):
                    del self.streams[name]

    def _forget_all(self) -> None:
        self.streams.clear()

    def drop_notes(self) -> None:
        for notes in (self.submissions, self.opened_ahead):
            notes.clear()

    def _held(self) -> Sequence[str]:
        return tuple(self.streams)
