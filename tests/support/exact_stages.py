"""Stages for the proofs: the real Thinker's process and the real encoder, both on tape; a Talker
and a vocoder that say nothing, since what is said is decided before them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from support.exact_defects import Defect, spoil
from support.exact_layout import Position, Script

from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.encoder.process import EncoderService
from duplex_sidecar.stages.encoder.process import load as load_encoder
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import (
    ELEMENT_BYTES,
    ElementType,
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    EncoderRows,
    HealthReport,
    Ids,
    ReferenceRows,
    Rows,
    TalkerAnswer,
    TalkerClose,
    TalkerFeed,
    Tensor,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
    ThinkerPart,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)
from duplex_sidecar.stages.interface import EncoderStage, ThinkerStage

MAX_SESSIONS = 32


# --- what is on tape ------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeardRows:
    """What the encoder made of one append: rows per audio chunk and per image block."""

    chunks: tuple[tuple[bytes, ...], ...]
    images: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True)
class Said:
    """One answer of the Thinker. rebuilt: the first one of its stream. context: all that the stream
    held when it was decided. decision: the state of the last of these positions; rows: of the
    answer's tokens but the last."""

    unit: int
    rebuilt: bool
    context: tuple[Position, ...]
    emitted: tuple[int, ...]
    sampled: tuple[int, ...]
    decision: bytes
    rows: bytes


@dataclass
class Tape:
    """One session. answers: every one, in order; a unit that was submitted twice has two. ahead:
    streams that were opened before the append that they are for. spoilt: what was answered to a
    unit's context with a defect in it."""

    heard: dict[int, HeardRows] = field(default_factory=dict)
    answers: list[Said] = field(default_factory=list)
    ahead: int = 0
    spoilt: dict[tuple[int, Defect], Said] = field(default_factory=dict)

    def last(self, unit: int) -> Said:
        return [said for said in self.answers if said.unit == unit][-1]


Tapes = dict[str, Tape]


# --- the Thinker ----------------------------------------------------------------------------------


@dataclass
class _Stream:
    """What a stream of the session holds, as the session was told. is_new: no unit was answered
    yet. name, offset: where it really is, once a defect has taken its place."""

    held: list[Position]
    name: str
    is_new: bool = True
    offset: int = 0


class TapedThinker:
    """A Thinker whose feeds and answers are kept. It can evict a session's stream, put a context
    with a defect beside a true one (`shadowed`), or in its place (`spoils`)."""

    def __init__(
        self,
        stage: ThinkerStage,
        tapes: Tapes,
        script_of: Callable[[str], Script],
        shadowed: Callable[[str, int], bool] = lambda session, unit: False,
        spoils: Mapping[tuple[str, int], Defect] | None = None,
    ) -> None:
        self._stage = stage
        self._tapes = tapes
        self._script_of = script_of
        self._shadowed = shadowed
        self._spoils = spoils or {}
        self._streams: dict[str, _Stream] = {}
        self._newest: dict[str, str] = {}

    @property
    def generation(self) -> int:
        return self._stage.generation

    async def health(self) -> HealthReport:
        return await self._stage.health()

    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer:
        before = [] if request.opens else self._streams[request.stream].held
        context = (*before, *positions_of(request.parts))
        tape = self._tapes.setdefault(request.session, Tape())
        if request.opens:
            self._streams[request.stream] = _Stream([], request.stream)
        stream = self._streams[request.stream]
        if context[-1] == self._script_of(request.session).named["</unit>"]:
            # Closed units alone: the append comes later, and this answer counts for nothing.
            answer = await self._stage.feed(request)
            self._newest[request.session] = stream.name
            stream.held = list(context)
            tape.ahead += 1
        else:
            sent = await self._spoilt(request, stream, context, tape)
            self._newest[request.session] = stream.name
            answer = await self._stage.feed(sent)
            # The last token has no place yet: the next feed brings it along.
            stream.held = [*context, *answer.emitted_ids[:-1]]
            tape.answers.append(_said(request, context, answer, rebuilt=stream.is_new))
            stream.is_new = False
        return answer

    async def _spoilt(
        self, request: ThinkerFeed, stream: _Stream, context: Sequence[Position], tape: Tape
    ) -> ThinkerFeed:
        """What is really sent; defects are put beside it or in its place as the test wants."""
        if self._shadowed(request.session, request.unit):
            for defect in Defect:
                if (request.unit, defect) not in tape.spoilt:
                    tape.spoilt[request.unit, defect] = await self._shadow(request, context, defect)
        sent = msgspec.structs.replace(
            request, stream=stream.name, position=request.position + stream.offset
        )
        defect = self._spoils.get((request.session, request.unit))
        if defect is not None:
            wrong = spoil(context, defect, self._script_of(request.session))
            sent = _opening(request, f"{request.stream}~", wrong)
            if not request.opens:
                await self._stage.close(ThinkerClose(stream.name))
            stream.name, stream.offset = sent.stream, len(wrong) - len(context)
        return sent

    async def close(self, request: ThinkerClose) -> None:
        stream = self._streams.pop(request.stream, None)
        await self._stage.close(ThinkerClose(stream.name if stream else request.stream))

    async def evict(self, session: str) -> bool:
        """The engine lets go of the session's stream; the session has not been asked. False when it
        has none here yet."""
        stream = self._newest.get(session)
        if stream is not None:
            await self._stage.close(ThinkerClose(stream))
        return stream is not None

    async def _shadow(
        self, request: ThinkerFeed, context: Sequence[Position], defect: Defect
    ) -> Said:
        wrong = spoil(context, defect, self._script_of(request.session))
        name = f"{request.stream}~{request.unit}~{defect}"
        answer = await self._stage.feed(_opening(request, name, wrong))
        await self._stage.close(ThinkerClose(name))
        return _said(request, context, answer, rebuilt=True)


def _said(
    request: ThinkerFeed, context: Sequence[Position], answer: ThinkerAnswer, *, rebuilt: bool
) -> Said:
    assert answer.decision_row is not None, "a Thinker that hands out decision rows"
    return Said(
        unit=request.unit,
        rebuilt=rebuilt,
        context=tuple(context),
        emitted=answer.emitted_ids,
        sampled=answer.sampled_ids,
        decision=answer.decision_row.data,
        rows=answer.hidden.data,
    )


def _opening(request: ThinkerFeed, stream: str, context: Sequence[Position]) -> ThinkerFeed:
    rows = [part.rows for part in request.parts if isinstance(part, Rows)]
    return msgspec.structs.replace(
        request,
        stream=stream,
        opens=True,
        position=0,
        parts=parts_of(context, rows[0].element_type),
    )


def positions_of(parts: Sequence[ThinkerPart]) -> list[Position]:
    """One entry a position."""
    placed: list[Position] = []
    for part in parts:
        placed += part.ids if isinstance(part, Ids) else rows_of(part.rows)
    return placed


def rows_of(tensor: Tensor) -> list[bytes]:
    """The rows of a [n, hidden] tensor."""
    count, width = tensor.shape
    size = width * ELEMENT_BYTES[tensor.element_type]
    return [tensor.data[index * size : (index + 1) * size] for index in range(count)]


def parts_of(context: Sequence[Position], element_type: ElementType) -> tuple[ThinkerPart, ...]:
    """Parts with these positions; neighbours of a kind share one."""
    parts: list[ThinkerPart] = []
    start = 0
    for end in range(1, len(context) + 1):
        is_row = isinstance(context[start], bytes)
        if end < len(context) and isinstance(context[end], bytes) == is_row:
            continue
        run = context[start:end]
        if is_row:
            rows = [place for place in run if isinstance(place, bytes)]
            width = len(rows[0]) // ELEMENT_BYTES[element_type]
            parts.append(Rows(Tensor(element_type, (len(rows), width), b"".join(rows))))
        else:
            parts.append(Ids(tuple(place for place in run if isinstance(place, int))))
        start = end
    return tuple(parts)


# --- the encoder ----------------------------------------------------------------------------------


class TapedEncoder:
    """The real encoder in this process. One object is one life of its process."""

    generation = 1

    def __init__(self, service: EncoderService, tapes: Tapes) -> None:
        self._service = service
        self._tapes = tapes

    async def health(self) -> HealthReport:
        return HealthReport("encoder", {}, ())

    async def open(self, request: EncoderOpen) -> None:
        await self._service.handle(request)

    async def feed(self, request: EncoderFeed) -> EncoderRows:
        rows = await self._service.handle(request)
        assert isinstance(rows, EncoderRows)
        if not request.discard:
            audio = rows_of(rows.audio)
            self._tapes.setdefault(request.session, Tape()).heard[request.unit] = HeardRows(
                tuple(tuple(audio[at : at + 10]) for at in range(0, len(audio), 10)),
                tuple(tuple(rows_of(block)) for block in rows.vision),
            )
        return rows

    async def reference(self, request: EncoderReference) -> ReferenceRows:
        rows = await self._service.handle(request)
        assert isinstance(rows, ReferenceRows)
        return rows

    async def close(self, request: EncoderClose) -> None:
        await self._service.handle(request)

    async def end(self) -> None:
        await self._service.close()


async def start_encoder(
    checkpoint: Path, tapes: Tapes, element_type: ElementType = ElementType.FLOAT32
) -> TapedEncoder:
    settings = EncoderSettings(
        checkpoint=str(checkpoint),
        device=Device.CPU,
        element_type=element_type,
        max_sessions=MAX_SESSIONS,
    )
    return TapedEncoder(await load_encoder(msgspec.json.encode(settings)), tapes)


# --- those that say nothing -----------------------------------------------------------------------


class SilentTalker:
    """Answers every condition without a code."""

    generation = 1

    async def health(self) -> HealthReport:
        return HealthReport("talker", {}, ())

    async def feed(self, request: TalkerFeed) -> TalkerAnswer:
        await asyncio.sleep(0)
        return TalkerAnswer(request.session, request.stream, request.unit, (), 0.0)

    async def close(self, request: TalkerClose) -> None:
        await asyncio.sleep(0)


class SilentCode2Wav:
    generation = 1

    async def health(self) -> HealthReport:
        return HealthReport("code2wav", {}, ())

    async def open(self, request: WaveOpen) -> None:
        await asyncio.sleep(0)

    async def feed(self, request: WaveFeed) -> WaveSamples:
        await asyncio.sleep(0)
        return WaveSamples(request.session, request.epoch, request.sequence, b"", 0.0)

    async def close(self, request: WaveClose) -> None:
        await asyncio.sleep(0)


# --- those whose sound has a length alone ---------------------------------------------------------

EVEN_CODES, EVEN_SAMPLES = 25, 24_000


class EvenTalker(SilentTalker):
    """Answers every condition with a second of codes."""

    async def feed(self, request: TalkerFeed) -> TalkerAnswer:
        await asyncio.sleep(0)
        codes = tuple(range(EVEN_CODES))
        return TalkerAnswer(request.session, request.stream, request.unit, codes, 0.0)


class EvenCode2Wav(SilentCode2Wav):
    """Every chunk with codes is a second of silence."""

    async def feed(self, request: WaveFeed) -> WaveSamples:
        await asyncio.sleep(0)
        pcm = bytes(2 * EVEN_SAMPLES) if request.code_count else b""
        return WaveSamples(request.session, request.epoch, request.sequence, pcm, 0.0)


_: tuple[type[EncoderStage], type[ThinkerStage]] = (TapedEncoder, TapedThinker)
