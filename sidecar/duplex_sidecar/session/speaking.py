"""From a unit's answer to samples: hand-off, Talker, Code2Wav. Decides nothing of what is said.

Works on `Speech` snapshots: `voice` returns the next one and keeps only what can be lost (streams,
the last condition's rows). A lost Talker stream is rebuilt from the previous condition and its
codes where they are still at hand, else from the present condition alone: that changes how it
sounds, never what is said. A lost or refused vocoder stream starts a new epoch that first hears
what sounded of the turn, muted (`session.catching_up`).
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from msgspec import structs

from duplex_sidecar.model.minicpmo45 import talker as talker_rules
from duplex_sidecar.model.minicpmo45.decode import Sampling
from duplex_sidecar.model.minicpmo45.handoff import Handoff, select
from duplex_sidecar.model.minicpmo45.producer import (
    Chunk,
    CodeRecord,
    ProducerState,
    produce_unit,
)
from duplex_sidecar.model.minicpmo45.talker_context import PromptAction, plan_condition
from duplex_sidecar.model.minicpmo45.vocabulary import TextPiece, Vocabulary
from duplex_sidecar.session.catching_up import NOTHING_SOUNDED, SoundedCodes, begin_again
from duplex_sidecar.session.conversation import Speech
from duplex_sidecar.session.stages import StageSet, alone_at
from duplex_sidecar.session.streams import LOST, TalkerStream
from duplex_sidecar.session.watching import UnitWatch
from duplex_sidecar.stages.envelope import (
    ELEMENT_BYTES,
    Condition,
    Ids,
    Tensor,
    ThinkerAnswer,
    WaveClose,
    WaveFeed,
    WaveOpen,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import EpochCause, StageName, StepName
from duplex_sidecar.telemetry.traces import SessionTrace

log = logging.getLogger(__name__)

SOURCE = 1
"""The one generator of a session's codes. Nothing retires it: recoveries start an epoch instead."""
_RESTARTABLE = frozenset(
    {
        StageFault.GONE,
        StageFault.TIMEOUT,
        StageFault.UNKNOWN_STREAM,
        StageFault.OUT_OF_ORDER,
    }
)


@dataclass(frozen=True)
class SoundChunk:
    """Samples of one stage-2 chunk."""

    chunk: Chunk
    pcm_s16le: bytes

    @property
    def samples(self) -> int:
        return len(self.pcm_s16le) // 2

    @property
    def new_codes(self) -> int:
        """Codes beyond the left context; a re-sent left context at a turn's end has none."""
        return len(self.chunk.codes) - self.chunk.left_context


@dataclass(frozen=True)
class Voiced:
    """What a unit brought to sound, and the state after it. turn_started, turn_ended: marks to
    send before and after the sound. text: what is spoken in it."""

    speech: Speech
    turn_started: bool
    turn_ended: bool
    text: str
    chunks: tuple[SoundChunk, ...]


@dataclass(frozen=True)
class VoiceSettings:
    """Fixed for the session. seed names all its random draws."""

    session: str
    voice: str
    seed: int
    sampling: Sampling
    talker_limit: int
    final_prompt_token: int
    """Id at the last position of an append: the audio slot."""


class Speaker:
    """The Talker and vocoder streams of one session."""

    def __init__(
        self,
        stages: StageSet,
        stream: TalkerStream,
        settings: VoiceSettings,
        vocabulary: Vocabulary,
        trace: SessionTrace,
        sounded: SoundedCodes = NOTHING_SOUNDED,
    ) -> None:
        """sounded: of the present turn, where another owner began it."""
        self._stages = stages
        self._stream = stream
        self._settings = settings
        self._vocabulary = vocabulary
        self._trace = trace
        self._sounded = sounded
        self._last_condition: Condition | None = None
        self._opened: tuple[int, int] | None = None
        """(stage generation, epoch) that Code2Wav has open for this session."""
        self._stopped = False
        """The client stopped the last reply: what the vocoder held back of it is dropped."""
        self._again: tuple[ProducerState, asyncio.Task[ProducerState]] | None = None
        """A catch-up under way, and the state that it began from."""

    def catch_up(self, speech: Speech, metrics: Metrics) -> None:
        """Let the vocoder hear from now on what another owner made of the present turn: else the
        next sound waits for that. Returns at once."""
        producer = speech.producer
        if speech.turn_open and producer.sequence and not self._is_open(producer.epoch):
            hearing = asyncio.create_task(self._hear_again(speech, metrics))
            self._again = (producer, hearing)

    def stop(self) -> None:
        """The reply under way is over, without a last chunk; see `cuts.stopped`."""
        self._sounded, self._stopped = NOTHING_SOUNDED, True

    async def voice(
        self, speech: Speech, unit: int, answer: ThinkerAnswer, watch: UnitWatch
    ) -> Voiced:
        """Run a committed unit's answer through Talker and Code2Wav. Raises StageError for what
        cannot be mended by a rebuilt stream or a new epoch, HandoffError for missing rows."""
        handoff, handoff_state, turn_ended = select(
            speech.handoff,
            answer.emitted_ids,
            self._settings.final_prompt_token,
            self._vocabulary,
        )
        codes: tuple[int, ...] = ()
        turn_started = handoff is not None and not speech.turn_open
        turn = speech.turn + 1 if turn_started else speech.turn
        after = speech
        if handoff is not None:
            with watch.step(StepName.TALKER):
                after, codes = await self._talk(speech, unit, handoff, answer.hidden, watch)
        chunks: tuple[SoundChunk, ...] = ()
        producer = after.producer
        if handoff is not None or turn_ended:
            record = CodeRecord(
                source=SOURCE,
                turn=(0, speech.handoff.turn),
                codes=codes,
                finished=True,
                turn_end=turn_ended,
                text=handoff.text if handoff else "",
            )
            with watch.step(StepName.CODE2WAV):
                chunks, producer = await self._vocode(producer, record, turn, unit, watch)
        text, rest = self._spoken_text(handoff, b"" if turn_started else speech.turn_text_rest)
        samples = sum(chunk.samples for chunk in chunks)
        new_codes = sum(sound.new_codes for sound in chunks if sound.samples)
        after = structs.replace(
            after,
            unit=unit,
            turn=turn,
            turn_open=(speech.turn_open or turn_started) and not turn_ended,
            turn_text=text if turn_started else speech.turn_text + text,
            turn_text_rest=rest,
            turn_samples=samples if turn_started else speech.turn_samples + samples,
            turn_codes=new_codes if turn_started else speech.turn_codes + new_codes,
            handoff=handoff_state,
            producer=producer,
            epoch=chunks[-1].chunk.epoch if chunks else speech.epoch,
            stage2_sequence=chunks[-1].chunk.sequence if chunks else speech.stage2_sequence,
        )
        ended = turn_ended and (speech.turn_open or turn_started)
        return Voiced(after, turn_started, ended, text, chunks)

    def _spoken_text(self, handoff: Handoff | None, rest: bytes) -> TextPiece:
        """What a unit says as far as its characters are complete; a turn's end completes them."""
        if handoff is None:
            return TextPiece("", rest)
        piece = self._vocabulary.text_piece(handoff.ids, rest)
        if handoff.turn_end and piece.pending:
            return TextPiece(piece.text + piece.pending.decode(errors="replace"), b"")
        return piece

    # --- Talker -----------------------------------------------------------------------------------

    async def _talk(
        self, speech: Speech, unit: int, handoff: Handoff, hidden: Tensor, watch: UnitWatch
    ) -> tuple[Speech, tuple[int, ...]]:
        condition = Condition(handoff.ids, rows_of(hidden, handoff.row_indices))
        recent = () if handoff.turn_start else speech.recent_codes
        rules = talker_rules.encode_rules(
            talker_rules.UnitRules(
                kind=handoff.kind,
                recent_codes=recent,
                sampling=self._settings.sampling,
                seed=f"{self._settings.seed}:talker:{unit}",
            )
        )
        try:
            speech, codes = await self._feed_condition(speech, unit, handoff, condition, rules)
        except StageError as error:
            watch.trace.stage_fault(StageName.TALKER, error.fault)
            if error.fault not in LOST:
                raise
            gate = self._stages.redo_gates.talker
            async with alone_at(self._stages.talker, StageName.TALKER, gate):
                speech, codes = await self._feed_condition(speech, unit, handoff, condition, rules)
        self._last_condition = condition
        return (
            structs.replace(
                speech, codes=codes, recent_codes=talker_rules.recent_codes(recent, codes)
            ),
            codes,
        )

    async def _feed_condition(
        self, speech: Speech, unit: int, handoff: Handoff, condition: Condition, rules: bytes
    ) -> tuple[Speech, tuple[int, ...]]:
        lost = not self._stream.live
        # Without the previous condition's rows a lost prompt cannot be recomputed: the condition
        # then stands alone, as at a turn start.
        alone = handoff.turn_start or (lost and self._last_condition is None)
        plan = plan_condition(
            speech.talker,
            condition_seq=handoff.condition_seq,
            condition_len=handoff.condition_len,
            confirmed_codes=len(speech.codes),
            reserve=handoff.budget.max_codes,
            turn_start=alone,
            limit=self._settings.talker_limit,
            stream_lost=lost,
        )
        if plan.action is PromptAction.EXTEND:
            position = plan.after.prompt_len - plan.after.condition_len
            answer = await self._stream.extend(unit, position, (condition,), rules)
        elif plan.action is PromptAction.RECOMPUTE and self._last_condition is not None:
            parts = (self._last_condition, Ids(speech.codes), condition)
            answer = await self._stream.rebuild(unit, parts, rules)
        else:
            answer = await self._stream.rebuild(unit, (condition,), rules)
        return structs.replace(speech, talker=plan.after), answer.codes

    # --- Code2Wav ---------------------------------------------------------------------------------

    async def _vocode(
        self,
        producer: ProducerState,
        record: CodeRecord,
        turn: int,
        unit: int,
        watch: UnitWatch,
    ) -> tuple[tuple[SoundChunk, ...], ProducerState]:
        producer = await self._caught_up(producer)
        muted: tuple[Chunk, ...] = ()
        cause = EpochCause.BARGE_IN if self._stopped else EpochCause.TURN_END
        if producer.epoch == 0:
            cause = EpochCause.OPEN
        if producer.sequence and not self._is_open(producer.epoch):
            muted, producer = begin_again(producer, self._sounded)
            cause = EpochCause.RECOVERY
        try:
            return await self._chunks(muted, producer, record, turn, unit, cause, watch)
        except StageError as error:
            if error.fault not in _RESTARTABLE:
                raise
            self._opened = None
            cause = EpochCause.RECOVERY
            if error.fault is StageFault.OUT_OF_ORDER:
                cause = EpochCause.VIOLATION
                watch.metrics.envelope_refused(error.fault)
        muted, producer = begin_again(producer, self._sounded)
        gate = self._stages.redo_gates.code2wav
        async with alone_at(self._stages.code2wav, StageName.CODE2WAV, gate):
            return await self._chunks(muted, producer, record, turn, unit, cause, watch)

    async def _chunks(
        self,
        muted: tuple[Chunk, ...],
        producer: ProducerState,
        record: CodeRecord,
        turn: int,
        unit: int,
        cause: EpochCause,
        watch: UnitWatch,
    ) -> tuple[tuple[SoundChunk, ...], ProducerState]:
        outputs, after = produce_unit(producer, record)
        try:
            for chunk in muted:
                await self._sound(chunk, record, turn, unit, cause, watch)
            sound = [
                await self._sound(output, record, turn, unit, cause, watch)
                for output in outputs
                if isinstance(output, Chunk)
            ]
        except StageError as error:
            watch.trace.stage_fault(StageName.CODE2WAV, error.fault)
            raise
        self._remember(record, sound)
        return tuple(sound), after

    def _remember(self, record: CodeRecord, sound: list[SoundChunk]) -> None:
        """What a new epoch of this turn would have to hear first."""
        if record.turn_end:
            self._sounded = NOTHING_SOUNDED
            return
        new = (one.chunk.codes[one.chunk.left_context :] for one in sound if one.samples)
        self._sounded = self._sounded.then(new)

    async def _hear_again(self, speech: Speech, metrics: Metrics) -> ProducerState:
        muted, producer = begin_again(speech.producer, self._sounded)
        try:
            for chunk in muted:
                if chunk.sequence == 0:
                    await self._open(chunk.epoch)
                    self._trace.stage2_epoch(chunk.epoch, EpochCause.RECOVERY)
                    metrics.epoch(EpochCause.RECOVERY)
                await self._feed(chunk, speech.handoff.turn, speech.turn, speech.unit)
        except StageError as error:
            # The next sound begins another epoch, and meets the trouble if it is still there.
            log.info("not caught up: %s: %s", error.stage, error.fault)
            self._opened = None
        return producer

    async def _caught_up(self, producer: ProducerState) -> ProducerState:
        if self._again is None:
            return producer
        (before, hearing), self._again = self._again, None
        after = await hearing
        if producer == before:
            return after
        # The reply was stopped meanwhile: its next epoch comes behind the one that was opened.
        epoch = after.epoch + (producer.sequence == 0)
        return structs.replace(producer, epoch=max(producer.epoch, epoch))

    def _is_open(self, epoch: int) -> bool:
        return self._opened == (self._stages.code2wav.generation, epoch)

    async def _sound(
        self,
        chunk: Chunk,
        record: CodeRecord,
        turn: int,
        unit: int,
        cause: EpochCause,
        watch: UnitWatch,
    ) -> SoundChunk:
        if chunk.sequence == 0:
            await self._open(chunk.epoch)
            self._stopped = False
            self._trace.stage2_epoch(chunk.epoch, cause, watch.trace)
            watch.metrics.epoch(cause)
        return await self._feed(chunk, record.turn[1], turn, unit)

    async def _open(self, epoch: int) -> None:
        stage = self._stages.code2wav
        generation = stage.generation
        await stage.open(WaveOpen(self._settings.session, epoch, self._settings.voice))
        self._opened = (generation, epoch)

    async def _feed(self, chunk: Chunk, handoff_turn: int, turn: int, unit: int) -> SoundChunk:
        samples = await self._stages.code2wav.feed(
            WaveFeed(
                session=self._settings.session,
                epoch=chunk.epoch,
                sequence=chunk.sequence,
                turn=turn,
                unit=unit,
                codes=chunk.codes,
                code_count=chunk.code_count,
                last_chunk=chunk.last_chunk,
                seed=f"{self._settings.seed}:wave:{handoff_turn}",
            )
        )
        return SoundChunk(chunk, samples.pcm_s16le)

    async def close(self) -> None:
        if self._again is not None:
            self._again[1].cancel()
            await asyncio.gather(self._again[1], return_exceptions=True)
        await self._stream.close()
        if self._opened is not None and self._opened[0] == self._stages.code2wav.generation:
            # A vocoder that is gone holds nothing of ours.
            with contextlib.suppress(StageError):
                await self._stages.code2wav.close(WaveClose(self._settings.session))


def rows_of(hidden: Tensor, indices: tuple[int, ...]) -> Tensor:
    """The rows of a [n, width] tensor at `indices`, in that order."""
    _, width = hidden.shape
    size = width * ELEMENT_BYTES[hidden.element_type]
    data = b"".join(hidden.data[index * size : (index + 1) * size] for index in indices)
    return Tensor(hidden.element_type, (len(indices), width), data)
