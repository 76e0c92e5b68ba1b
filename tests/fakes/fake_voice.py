"""The Talker and the vocoder: codes are a hash of the prompt under the real end rules, samples a
hash of all codes of the epoch behind the real admission."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_stage import HIDDEN, FakeStage, hash_of, rows_in

from duplex_sidecar.model.minicpmo45 import consumer
from duplex_sidecar.model.minicpmo45.talker import (
    CODEC_EOS,
    EosRule,
    decode_rules,
    eos_rule,
)
from duplex_sidecar.stages.code2wav.config import MAX_CHUNK_CODES, MIN_CHUNK_CODES
from duplex_sidecar.stages.envelope import (
    Condition,
    Ids,
    TalkerAnswer,
    TalkerClose,
    TalkerFeed,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)
from duplex_sidecar.stages.errors import StageFault

SAMPLES_PER_CODE = 40
"""The real vocoder makes 960; nothing here depends on it."""


@dataclass
class _Prompt:
    hash: "hashlib.blake2b" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    positions: int = 0
    last_unit: int = -1

    def take(self, name: bytes) -> None:
        self.positions += 1
        self.hash.update(len(name).to_bytes(2, "little") + name)


class FakeTalker(FakeStage):
    def __init__(self, *, max_model_len: int = 4096 + 32, seats: int = 6) -> None:
        super().__init__("talker")
        self._max_model_len = max_model_len
        self._seats = seats
        self.streams: dict[str, _Prompt] = {}
        self.feeds: list[TalkerFeed] = []

    async def feed(self, request: TalkerFeed) -> TalkerAnswer:
        await self._enter(request.unit)
        rules = decode_rules(request.rules)
        prompt = self._admit(request, rules.budget.max_codes)
        for part in request.parts:
            if isinstance(part, Ids):
                for code in part.ids:
                    prompt.take(b"c%d" % code)
                continue
            for id_, row in zip(part.ids, rows_in(part.hidden), strict=True):
                prompt.take(b"t%d" % id_ + row)
            prompt.take(b"bos")
        codes: list[int] = []
        while True:
            state = prompt.hash.copy()
            state.update(request.rules)
            digest = state.digest()
            rule = eos_rule(rules.kind, len(codes))
            if rule is EosRule.FORCE or (rule is EosRule.FREE and digest[0] < 10):
                break
            codes.append(int.from_bytes(digest[1:5], "little") % CODEC_EOS)
            prompt.take(b"c%d" % codes[-1])
        prompt.last_unit = request.unit
        self.feeds.append(request)
        await self._leave(request.unit)
        return TalkerAnswer(request.session, request.stream, request.unit, tuple(codes), 0.0)

    async def close(self, request: TalkerClose) -> None:
        await self._enter()
        self.streams.pop(request.stream, None)

    def _admit(self, request: TalkerFeed, budget: int) -> _Prompt:
        prompt = self.streams.get(request.stream)
        if prompt is None and not request.opens:
            raise self.error(StageFault.UNKNOWN_STREAM, "no such stream")
        problem = self._problem(prompt, request, budget)
        if problem is not None:
            self.streams.pop(request.stream, None)
            raise self.error(StageFault.REFUSED, problem)
        return self.streams.setdefault(request.stream, prompt or _Prompt())

    def _problem(self, prompt: _Prompt | None, request: TalkerFeed, budget: int) -> str | None:
        new = 0
        for part in request.parts:
            new += len(part.ids) + (1 if isinstance(part, Condition) else 0)
            if isinstance(part, Condition) and part.hidden.shape != (len(part.ids), HIDDEN):
                return "condition rows"
            if isinstance(part, Ids) and not all(0 <= code < CODEC_EOS for code in part.ids):
                return "codes"
        if not request.parts or not isinstance(request.parts[-1], Condition):
            return "the parts must end with a condition"
        if request.position + new + budget > self._max_model_len:
            return "too long"
        if prompt is None:
            if request.position:
                return "a stream opens at position 0"
            return "no seat" if len(self.streams) >= self._seats else None
        if request.opens:
            return "a stream of this name is open"
        if request.position != prompt.positions:
            return f"the stream holds {prompt.positions} positions, not {request.position}"
        return None if request.unit > prompt.last_unit else f"unit {request.unit} again"

    def _forget_all(self) -> None:
        self.streams.clear()

    def drop_notes(self) -> None:
        self.feeds.clear()

    def _held(self) -> Sequence[str]:
        return tuple(self.streams)


@dataclass
class _Sound:
    voice: str
    admission: consumer.StreamState
    hash: bytes = b""
    quarantined: bool = False


class FakeCode2Wav(FakeStage):
    def __init__(self, *, codebook: int = 6561, max_sessions: int = 8) -> None:
        super().__init__("code2wav")
        self._codebook = codebook
        self._max_sessions = max_sessions
        self.sessions: dict[str, _Sound] = {}
        self.opened: list[tuple[str, int]] = []
        self.fed: list[WaveFeed] = []
        self.made: list[bytes] = []
        """Samples of each feed of `fed`, whether they left or not."""

    async def open(self, request: WaveOpen) -> None:
        await self._enter()
        held = self.sessions.get(request.session)
        if held is None and len(self.sessions) >= self._max_sessions:
            raise self.error(StageFault.REFUSED, "no room")
        if held is not None and held.voice != request.voice:
            raise self.error(StageFault.REFUSED, "another voice")
        before = held.admission if held else consumer.INITIAL_STREAM_STATE
        refusal, after = consumer.open_epoch(before, request.epoch, request.voice)
        if refusal is not None:
            raise self.error(StageFault.OUT_OF_ORDER, refusal)
        self.sessions[request.session] = _Sound(request.voice, after)
        self.opened.append((request.session, request.epoch))

    async def feed(self, request: WaveFeed) -> WaveSamples:
        await self._enter(request.unit)
        held = self.sessions.get(request.session)
        if held is None:
            raise self.error(StageFault.UNKNOWN_STREAM, "no epoch was opened here")
        if len(request.codes) > MAX_CHUNK_CODES or not all(
            0 <= code < self._codebook for code in request.codes
        ):
            raise self.error(StageFault.REFUSED, "codes")
        self._admit(held, request)
        codes = request.codes[: request.code_count]
        pcm = b""
        if codes or request.last_chunk:
            held.hash = hash_of(held.hash, repr(codes).encode(), request.seed.encode())
            count = SAMPLES_PER_CODE * (len(codes) - 3 + (2 if request.last_chunk else 0))
            pcm = (held.hash * (1 + max(0, count) // 8))[: 2 * max(0, count)]
        self.fed.append(request)
        self.made.append(pcm)
        await self._leave(request.unit)
        return WaveSamples(request.session, request.epoch, request.sequence, pcm, 0.0)

    async def close(self, request: WaveClose) -> None:
        await self._enter()
        self.sessions.pop(request.session, None)

    def _admit(self, held: _Sound, request: WaveFeed) -> None:
        newest = held.admission.epoch
        if newest is not None and request.epoch < newest:
            raise self.error(StageFault.OUT_OF_ORDER, consumer.Refusal.STALE_CACHE_EPOCH)
        if held.quarantined:
            raise self.error(StageFault.OUT_OF_ORDER, "quarantined")
        header = consumer.ChunkHeader(
            epoch=request.epoch,
            sequence=request.sequence,
            sent_codes=len(request.codes),
            code_count=request.code_count,
            last_chunk=request.last_chunk,
            unit_flush=True,
        )
        refusal, after = consumer.admit(held.admission, header)
        short = 0 < request.code_count < MIN_CHUNK_CODES and not request.last_chunk
        if refusal is not None or short:
            held.quarantined = True
            raise self.error(StageFault.OUT_OF_ORDER, refusal or "too short")
        held.admission = after

    def quarantine(self, session: str) -> None:
        """As after a violation on the way."""
        self.sessions[session].quarantined = True

    def _failed(self, unit: int, fault: StageFault) -> None:
        if fault is StageFault.OUT_OF_ORDER:
            for held in self.sessions.values():
                held.quarantined = True

    def _forget_all(self) -> None:
        self.sessions.clear()

    def drop_notes(self) -> None:
        for notes in (self.opened, self.fed, self.made):
            notes.clear()

    def _held(self) -> Sequence[str]:
        return tuple(self.sessions)
