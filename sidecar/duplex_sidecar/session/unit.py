"""One unit from its input to its sound, in the one order that there is.

    encode -> plan -> accept -> Thinker -> commit | Talker -> Code2Wav -> journal -> client

Nothing leaves before its unit is committed; commit and Talker run side by side. A stage that is
lost on the way is waited for and the unit is submitted again, recorded first, with the same seed.
`redo` and `respeak` enter the same way further down, from what the ledger holds.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from msgspec import structs

from duplex_api.window import WindowMode
from duplex_sidecar.framing.append import Append
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.media import UnitMedia
from duplex_sidecar.ledger.recovery import MAX_ATTEMPTS
from duplex_sidecar.model.minicpmo45.constants import INPUT_RATE_HZ
from duplex_sidecar.model.minicpmo45.decode import (
    AnswerFacts,
    UnitRules,
    answer_facts,
    encode_rules,
)
from duplex_sidecar.model.minicpmo45.handoff import HandoffError
from duplex_sidecar.model.minicpmo45.talker_context import TalkerContextError
from duplex_sidecar.protocol import events
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.session.announcing import announce
from duplex_sidecar.session.conversation import (
    Conversation,
    Speech,
    encode_conversation,
)
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionFacts, SessionOver
from duplex_sidecar.session.hearing import EncoderDriver
from duplex_sidecar.session.open_unit import OpenUnit, encode_open_unit
from duplex_sidecar.session.prompting import Prompter, plan_append, unit_input
from duplex_sidecar.session.recording import (
    Answered,
    accept_draft,
    commit_draft,
    conversation_after,
    trim_after,
    unit_seed,
)
from duplex_sidecar.session.rows import (
    RowsMissing,
    StoredRows,
    encode_rows,
    history_of,
    split_chunks,
)
from duplex_sidecar.session.speaking import Speaker
from duplex_sidecar.session.stages import StageSet, wait_ready
from duplex_sidecar.session.streams import LOST, ThinkerStream
from duplex_sidecar.stages.envelope import ThinkerAnswer, ThinkerPart
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import (
    RebuildCause as TracedCause,
)
from duplex_sidecar.telemetry.names import StageName, StepName, UnitDecision
from duplex_sidecar.telemetry.traces import SessionTrace, UnitTrace
from duplex_sidecar.window.render import RenderError
from duplex_sidecar.window.state import Extend, Overflow, Rebuild, RebuildCause, WindowState

Publish = Callable[[events.Event], None]


class BadInput(Exception):
    """The append cannot be encoded (a broken camera frame): it fails whole, nothing has changed."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass
class _Clock:
    """Milliseconds of a unit's steps."""

    started_s: float
    stage_ms: dict[str, float]
    rebuild_ms: float | None = None

    @property
    def wall_ms(self) -> float:
        return (time.perf_counter() - self.started_s) * 1000


@dataclass(frozen=True)
class _Thought:
    """An answer with the plan under which it was given."""

    answer: ThinkerAnswer
    rules: UnitRules
    plan: Extend | Rebuild
    window: WindowState


class UnitRunner:
    """Runs the units of one session, one after another. Holds no state of the conversation: it
    takes snapshots and returns the next ones."""

    def __init__(
        self,
        facts: SessionFacts,
        stages: StageSet,
        encoder: EncoderDriver,
        stream: ThinkerStream,
        prompter: Prompter,
        speaker: Speaker,
        durable: DurableSession,
        trace: SessionTrace,
        metrics: Metrics,
        publish: Publish,
    ) -> None:
        self._facts = facts
        self._stages = stages
        self._encoder = encoder
        self._stream = stream
        self._prompter = prompter
        self._speaker = speaker
        self._durable = durable
        self._trace = trace
        self._metrics = metrics
        self._publish = publish
        self.rebuild_cause: RebuildCause | None = None
        """Why the next append finds no live stream, when it is not an engine's restart."""

    # --- the ways in ------------------------------------------------------------------------------

    async def run(
        self, before: Conversation, speech: Speech, append: Append
    ) -> tuple[Conversation, Speech]:
        """A new unit. Raises BadInput (nothing has changed), SessionOver, LedgerError."""
        clock = _Clock(time.perf_counter(), {})
        audio_ms = append.new_samples * 1000 / INPUT_RATE_HZ
        with self._failures(), self._trace.unit(append.seq, speech.turn, audio_ms) as unit:
            with self._timed(unit, StepName.ENCODE, StageName.ENCODER, clock):
                rows, mark_samples = await self._encode(append, unit)
            self._prompter.retained.put_rows(append.seq, rows)
            plan, window = self._plan(before, append)
            open_unit = OpenUnit(
                append=structs.replace(append, pcm_s16le=b"", frames=()),
                encoder_mark_samples=mark_samples,
            )
            with self._timed(unit, StepName.ACCEPT, None, clock):
                await self._durable.accept(
                    accept_draft(self._facts, append, plan, speech, unit.traceparent),
                    UnitMedia(pcm=append.pcm_s16le, rows=encode_rows(rows)),
                    encode_open_unit(open_unit),
                )
            self._publish(
                events.InputAccepted(
                    append.seq, append.client_from_samples, append.client_to_samples
                )
            )
            return await self._answer(
                before, speech, open_unit, rows, (plan, window), unit, clock, attempt=1
            )

    async def redo(
        self,
        before: Conversation,
        speech: Speech,
        open_unit: OpenUnit,
        rows: StoredRows,
        attempt: int,
        traceparent: str,
    ) -> tuple[Conversation, Speech]:
        """An accepted unit that a lost replica did not commit: the same plan, the same seed."""
        append = open_unit.append
        clock = _Clock(time.perf_counter(), {})
        audio_ms = append.new_samples * 1000 / INPUT_RATE_HZ
        trace = self._trace.unit(append.seq, speech.turn, audio_ms, redo_of=traceparent)
        with self._failures(), trace as unit:
            self._prompter.retained.put_rows(append.seq, rows)
            await self._durable.redo(append.seq, attempt, RebuildCause.REPLICA_RESTART)
            planned = self._plan(before, append)
            return await self._answer(
                before, speech, open_unit, rows, planned, unit, clock, attempt
            )

    async def respeak(
        self, after: Conversation, speech: Speech, committed: records.Committed
    ) -> Speech:
        """A committed unit whose sound had not left: its tokens are forced through the Thinker
        again for their hidden rows, then spoken at a new epoch."""
        completed = after.completed
        if completed is None:
            raise SessionOver(ErrorCode.LEDGER_CORRUPT, "a committed unit without its answer")
        clock = _Clock(time.perf_counter(), {})
        cause = RebuildCause.REPLICA_RESTART
        rebuild = Rebuild(cause, 0, 0, None, after.window.previous_ids, after.window.prompt_tokens)
        rules = UnitRules(
            policy=after.policy,
            is_speech=False,
            force_listen=False,
            max_tokens=None,
            sampling=self._facts.sampling,
            seed=unit_seed(self._facts, committed.seq),
            forced_ids=committed.token_ids,
        )
        audio_ms = 1000.0
        with self._failures(), self._trace.unit(committed.seq, speech.turn, audio_ms) as unit:
            parts = await self._prompter.whole_prompt(after.window, completed.input)
            answer = await self._rebuild(
                committed.seq, rebuild, parts, encode_rules(rules), after, unit, clock
            )
            facts = answer_facts(answer.emitted_ids, self._facts.vocabulary)
            thought = _Thought(answer, rules, rebuild, after.window)
            return await self._speak(after, speech, thought, facts, unit, clock)

    async def close(self) -> None:
        """End all streams of the session."""
        await self._stream.close()
        await self._speaker.close()
        with suppress(StageError):
            await self._encoder.close()

    # --- the way ----------------------------------------------------------------------------------

    async def _answer(
        self,
        before: Conversation,
        speech: Speech,
        open_unit: OpenUnit,
        rows: StoredRows,
        planned: tuple[Extend | Rebuild, WindowState],
        unit: UnitTrace,
        clock: _Clock,
        attempt: int,
    ) -> tuple[Conversation, Speech]:
        append = open_unit.append
        thought = await self._think(before, append, planned, unit, clock, attempt)
        facts = answer_facts(thought.answer.emitted_ids, self._facts.vocabulary)
        after = conversation_after(
            self._facts,
            before,
            open_unit,
            history_of(append.seq, rows, facts.content_ids, facts.terminator),
            Answered(thought.rules, thought.answer, facts, thought.plan, thought.window),
            clock.rebuild_ms,
        )
        self._retain(after)
        unit.decided(
            UnitDecision(facts.decision),
            len(thought.answer.emitted_ids),
            after.window.prompt_tokens,
        )
        committing = asyncio.create_task(self._commit(append, speech, thought, facts, after, clock))
        try:
            speech = await self._speak(after, speech, thought, facts, unit, clock, committing)
        finally:
            if not committing.done():
                await asyncio.wait({committing})
        self._metrics.unit(UnitDecision(facts.decision), clock.wall_ms, 1000.0)
        return after, speech

    async def _encode(self, append: Append, unit: UnitTrace) -> tuple[StoredRows, int]:
        try:
            encoded = await self._encoder.feed(append)
        except StageError as error:
            unit.stage_fault(StageName.ENCODER, error.fault)
            if error.fault is StageFault.UNDECODABLE:
                raise BadInput(ErrorCode.INVALID_FRAME, error.reason) from error
            raise
        if encoded.encoder_reset:
            unit.encoder_reset()
        rows = split_chunks(encoded, append.chunks, append.reservation.blocks)
        return rows, encoded.reset_mark_samples

    def _plan(
        self, before: Conversation, append: Append, cause: RebuildCause | None = None
    ) -> tuple[Extend | Rebuild, WindowState]:
        if cause is None and append.seq > 1 and not self._stream.live:
            cause = self.rebuild_cause or RebuildCause.ENGINE_RESTART
        plan, window = plan_append(self._facts, before, append, cause)
        if isinstance(plan, Overflow):
            raise SessionOver(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"{plan.projected_tokens} tokens in a context of"
                f" {self._facts.limits.max_model_tokens}",
            )
        return plan, window

    async def _think(
        self,
        before: Conversation,
        append: Append,
        planned: tuple[Extend | Rebuild, WindowState],
        unit: UnitTrace,
        clock: _Clock,
        attempt: int,
    ) -> _Thought:
        rules = UnitRules(
            policy=before.policy,
            is_speech=append.is_speech,
            force_listen=append.force_listen,
            max_tokens=None,
            sampling=self._facts.sampling,
            seed=unit_seed(self._facts, append.seq),
        )
        encoded = encode_rules(rules)
        plan, window = planned
        while True:
            try:
                with self._timed(unit, StepName.THINKER, StageName.THINKER, clock):
                    answer = await self._submit(before, append, plan, window, encoded, unit, clock)
                return _Thought(answer, rules, plan, window)
            except StageError as error:
                unit.stage_fault(StageName.THINKER, error.fault)
                if error.fault not in LOST or attempt >= MAX_ATTEMPTS:
                    raise
            await wait_ready(self._stages.thinker, "thinker")
            attempt += 1
            await self._durable.redo(append.seq, attempt, RebuildCause.ENGINE_RESTART)
            plan, window = self._plan(before, append, RebuildCause.ENGINE_RESTART)

    async def _submit(
        self,
        before: Conversation,
        append: Append,
        plan: Extend | Rebuild,
        window: WindowState,
        rules: bytes,
        unit: UnitTrace,
        clock: _Clock,
    ) -> ThinkerAnswer:
        seq = append.seq
        if isinstance(plan, Extend) and self._stream.live:
            parts = self._prompter.extension(before, append)
            return await self._stream.extend(seq, plan.position_tokens, parts, rules)
        parts = await self._prompter.whole_prompt(window, unit_input(append))
        if isinstance(plan, Rebuild):
            return await self._rebuild(seq, plan, parts, rules, before, unit, clock)
        return await self._stream.rebuild(seq, parts, rules)

    async def _rebuild(
        self,
        seq: int,
        plan: Rebuild,
        parts: tuple[ThinkerPart, ...],
        rules: bytes,
        before: Conversation,
        unit: UnitTrace,
        clock: _Clock,
    ) -> ThinkerAnswer:
        predicted_ms = before.rebuild_ms_per_token * plan.replacement_tokens or None
        with self._trace.rebuild(
            seq,
            self._facts.policy.mode,
            TracedCause(plan.cause),
            plan.drop_units,
            plan.dropped_tokens,
            plan.replacement_tokens,
            predicted_ms,
            unit,
        ) as span:
            answer = await self._stream.rebuild(seq, parts, rules)
        clock.rebuild_ms = span.elapsed_ms
        self.rebuild_cause = None
        self._metrics.rebuild(TracedCause(plan.cause), span.elapsed_ms)
        return answer

    async def _commit(
        self,
        append: Append,
        speech: Speech,
        thought: _Thought,
        facts: AnswerFacts,
        after: Conversation,
        clock: _Clock,
    ) -> None:
        started = time.perf_counter()
        answered = Answered(thought.rules, thought.answer, facts, thought.plan, thought.window)
        draft = commit_draft(self._facts, append.seq, speech, answered)
        trim = trim_after(self._facts.policy.mode, after)
        await self._durable.commit(draft, encode_conversation(after), trim)
        clock.stage_ms["commit"] = (time.perf_counter() - started) * 1000

    async def _speak(
        self,
        after: Conversation,
        speech: Speech,
        thought: _Thought,
        facts: AnswerFacts,
        unit: UnitTrace,
        clock: _Clock,
        committing: "asyncio.Task[None] | None" = None,
    ) -> Speech:
        voiced = await self._speaker.voice(speech, after.seq, thought.answer, unit)
        clock.stage_ms["talker"] = voiced.talker_ms
        clock.stage_ms["code2wav"] = voiced.code2wav_ms
        unit.text(voiced.text)
        if committing is not None:
            with unit.step(StepName.COMMIT):
                await committing
        rebuilt = thought.plan if isinstance(thought.plan, Rebuild) else None
        done = events.UnitDone(
            unit=after.seq,
            turn=voiced.speech.turn,
            decision=events.Decision(facts.decision),
            tokens=len(thought.answer.emitted_ids),
            window_tokens=after.window.prompt_tokens,
            rebuild_cause=rebuilt.cause if rebuilt else None,
            rebuild_ms=round(clock.rebuild_ms, 3) if clock.rebuild_ms is not None else None,
            dropped_units=rebuilt.drop_units if rebuilt else 0,
            head=self._durable.head.index,
            epoch=voiced.speech.epoch,
            stage2_sequence=voiced.chunks[-1].chunk.sequence if voiced.chunks else None,
            audio_samples=sum(chunk.samples for chunk in voiced.chunks),
            wall_ms=round(clock.wall_ms, 3),
            stage_ms={name: round(ms, 3) for name, ms in clock.stage_ms.items()},
            replica=self._durable.replica,
        )
        batch, announced, next_speech = announce(speech, voiced, after.seq, done)
        await self._durable.journal(batch)
        for event in announced:
            self._publish(event)
        return next_speech

    def _retain(self, after: Conversation) -> None:
        """Keep at hand what a slide of the next append renders, and nothing else. Mode `off` plans
        no slide."""
        retained = self._prompter.retained
        if self._facts.policy.mode is WindowMode.OFF:
            retained.keep_only([])
            return
        if after.completed is not None:
            retained.complete(after.completed)
        retained.keep_only([*(unit.seq for unit in after.window.units), after.seq])

    # --- faults -----------------------------------------------------------------------------------

    @contextmanager
    def _timed(
        self, unit: UnitTrace, step: StepName, stage: StageName | None, clock: _Clock
    ) -> Generator[None]:
        with unit.step(step) as span:
            yield
        name = stage.value if stage is not None else step.value.rsplit(".", 1)[-1]
        clock.stage_ms[name] = span.elapsed_ms
        if stage is not None:
            self._metrics.stage_call(stage, span.elapsed_ms)

    @contextmanager
    def _failures(self) -> Generator[None]:
        """What no retry mends ends this session, by name; other sessions are not concerned."""
        try:
            yield
        except StageError as error:
            raise SessionOver(ErrorCode.UNIT_FAILED, f"{error.stage}: {error.fault}") from error
        except (HandoffError, TalkerContextError, RenderError, RowsMissing) as error:
            raise SessionOver(ErrorCode.UNIT_FAILED, f"{type(error).__name__}: {error}") from error
