"""The session's Thinker: plan an append, feed it, rebuild what was lost, get its answer.

A lost stream costs time, never a token: the unit is submitted again, recorded first, with the same
rules and so the same draws, as a whole prompt rendered from the same records.
"""

import asyncio
import logging
import time

from duplex_sidecar.framing.append import Append
from duplex_sidecar.ledger.recovery import MAX_ATTEMPTS
from duplex_sidecar.model.minicpmo45.constants import CLOSURE_POSITIONS
from duplex_sidecar.model.minicpmo45.decode import UnitRules, answer_facts, encode_rules
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.session.ahead import OpenedAhead, RebuildAhead
from duplex_sidecar.session.conversation import Conversation
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionFacts, SessionOver
from duplex_sidecar.session.prompting import Prompter, plan_append, unit_input
from duplex_sidecar.session.recording import (
    Answered,
    Planned,
    predicted_rebuild_ms,
    unit_seed,
)
from duplex_sidecar.session.stages import alone_at
from duplex_sidecar.session.streams import LOST, ThinkerStream
from duplex_sidecar.session.watching import UnitWatch
from duplex_sidecar.stages.envelope import ThinkerAnswer, ThinkerPart
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.interface import ThinkerStage
from duplex_sidecar.telemetry.names import RebuildCause as TracedCause
from duplex_sidecar.telemetry.names import StageName, StepName
from duplex_sidecar.telemetry.traces import SessionTrace
from duplex_sidecar.window.parts import UnitInput
from duplex_sidecar.window.state import Extend, Overflow, Rebuild, RebuildCause

log = logging.getLogger(__name__)

_MENDED = LOST | {StageFault.ROWS_LOST}
"""A unit whose hidden rows were lost gives the same tokens again, and its rows with them."""


class ThinkerDriver:
    """One session's stream in the Thinker, wherever its process stands."""

    def __init__(
        self,
        facts: SessionFacts,
        stage: ThinkerStage,
        stream: ThinkerStream,
        prompter: Prompter,
        durable: DurableSession,
        trace: SessionTrace,
        *,
        redo_gate: asyncio.Lock,
        no_stream_because: RebuildCause,
        rebuild_ahead: bool,
        taken_up: OpenedAhead | None = None,
    ) -> None:
        """redo_gate: see `RedoGates`. no_stream_because: why a first stream beyond unit 1 comes
        from a rebuild. rebuild_ahead: open the stream of a slide that is sure to come before its
        append does. taken_up: what the stream holds already, see `RebuildAhead`."""
        self._facts = facts
        self._stage = stage
        self._stream = stream
        self._prompter = prompter
        self._durable = durable
        self._trace = trace
        self._ahead = RebuildAhead(
            facts, stream, prompter, trace, enabled=rebuild_ahead, taken_up=taken_up
        )
        self._redo_gate = redo_gate
        self._no_stream_because = no_stream_because
        self._inherited = stream.live
        """The stream was filled by somebody else, and this driver has not fed it yet."""

    def plan(self, before: Conversation, append: Append) -> Planned:
        """How the append is to reach the Thinker. Raises SessionOver when it does not fit."""
        lost = append.seq > 1 and (not self._stream.live or self._ahead.holds_taken_up)
        cause = self._no_stream_because if lost else None
        if before.prompt_changed:
            cause = RebuildCause.TRUNCATION
        plan, window = plan_append(self._facts, before, append, cause)
        if isinstance(plan, Overflow):
            raise SessionOver(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"{plan.projected_tokens} tokens in a context of"
                f" {self._facts.limits.max_model_tokens}",
            )
        return Planned(plan, window)

    async def answer(
        self,
        before: Conversation,
        append: Append,
        planned: Planned,
        watch: UnitWatch,
        attempt: int,
    ) -> Answered:
        """Submit the append, again if its stream is lost. attempt: larger than 1 where another
        owner has submitted it. Raises StageError, RenderError, RowsMissing, LedgerError."""
        rules = UnitRules(
            policy=before.policy,
            is_speech=append.is_speech,
            force_listen=append.force_listen,
            max_tokens=None,
            sampling=self._facts.sampling,
            seed=unit_seed(self._facts, append.seq),
            bench_script=self._facts.scripted_ids(append.seq),
        )
        cause = RebuildCause.REPLICA_RESTART
        while True:
            try:
                if attempt > 1:
                    planned, answer = await self._resubmit(
                        before, append, rules, watch, attempt, cause
                    )
                    break
                if isinstance(planned.plan, Extend) and append.seq > 1 and not self._stream.live:
                    planned = self.plan(before, append)
                with watch.step(StepName.THINKER):
                    answer = await self._submit(before, append, planned, rules, watch)
                break
            except StageError as error:
                watch.trace.stage_fault(StageName.THINKER, error.fault)
                if error.fault is StageFault.REFUSED and self._inherited and attempt == 1:
                    # Nothing has run. What stands ready is not what everybody believed: that costs
                    # a rebuild, not the session.
                    log.warning("a stream that was made ready is of no use: %s", error.reason)
                    self._inherited = False
                    continue
                if error.fault not in _MENDED or attempt >= MAX_ATTEMPTS:
                    raise
            attempt, cause = attempt + 1, RebuildCause.ENGINE_RESTART
        self._inherited = False
        facts = answer_facts(answer.emitted_ids, self._facts.vocabulary)
        return Answered(rules, answer, facts, planned.plan, planned.window)

    def committed(self, after: Conversation) -> None:
        """The unit of `after` is durable: what the next one is sure to need may be made now."""
        self._ahead.start(after)

    async def prompt_changed(self, after: Conversation) -> None:
        """Units that the stream holds were cut: what was made ahead of the next append is of no
        use, and that append rebuilds; ahead of it where that is possible."""
        await self._ahead.close()
        self._ahead.start(after)

    async def repeat(
        self, after: Conversation, pending: UnitInput, token_ids: tuple[int, ...], watch: UnitWatch
    ) -> Answered:
        """A committed unit once more, its tokens forced: what counts is their hidden rows, and a
        stream that can be extended. Raises as `answer` does."""
        rules = UnitRules(
            policy=after.policy,
            is_speech=False,
            force_listen=False,
            max_tokens=None,
            sampling=self._facts.sampling,
            seed=unit_seed(self._facts, after.seq),
            forced_ids=token_ids,
        )
        window = after.window
        await self._ahead.close()  # what the stream may hold ends one unit too far for this
        while True:
            rebuild = Rebuild(
                self._no_stream_because, 0, 0, None, window.previous_ids, window.prompt_tokens
            )
            parts = await self._prompter.whole_prompt(window, pending)
            try:
                async with alone_at(self._stage, StageName.THINKER, self._redo_gate):
                    await self._count_respeak(after.seq)
                    with watch.step(StepName.THINKER):
                        answer = await self._rebuild(after.seq, rebuild, parts, rules, after, watch)
                break
            except StageError as error:
                watch.trace.stage_fault(StageName.THINKER, error.fault)
                if error.fault not in _MENDED:
                    raise
        facts = answer_facts(answer.emitted_ids, self._facts.vocabulary)
        return Answered(rules, answer, facts, rebuild, window)

    async def _resubmit(
        self,
        before: Conversation,
        append: Append,
        rules: UnitRules,
        watch: UnitWatch,
        attempt: int,
        cause: RebuildCause,
    ) -> tuple[Planned, ThinkerAnswer]:
        """Counted before it is submitted, to an engine that stands."""
        async with alone_at(self._stage, StageName.THINKER, self._redo_gate):
            await self._durable.redo(append.seq, attempt, cause)
            planned = self.plan(before, append)
            with watch.step(StepName.THINKER):
                return planned, await self._submit(before, append, planned, rules, watch)

    async def _count_respeak(self, seq: int) -> None:
        """The same for a committed unit. Raises SessionOver when it was tried often enough."""
        if await self._durable.respeak(seq) > MAX_ATTEMPTS:
            raise SessionOver(
                ErrorCode.UNIT_FAILED, f"unit {seq} could not be spoken in {MAX_ATTEMPTS} attempts"
            )

    async def part(self) -> tuple[ThinkerStream, OpenedAhead | None]:
        """The stream, for whoever takes the session up here again, and what it holds: None where it
        has answered the newest unit itself. This driver is not used any more."""
        return self._stream, await self._ahead.part()

    async def close(self) -> None:
        await self._ahead.close()
        await self._stream.close()

    async def _submit(
        self,
        before: Conversation,
        append: Append,
        planned: Planned,
        rules: UnitRules,
        watch: UnitWatch,
    ) -> ThinkerAnswer:
        plan, slots = planned.plan, append.reservation.slots
        waits_since = time.perf_counter()
        ahead = await self._ahead.opened()
        if ahead is not None and self._stream.live and ahead.foreseen.fits(planned, slots):
            watch.rebuilt_ahead((time.perf_counter() - waits_since) * 1000, ahead.elapsed_ms)
            watch.metrics.rebuild(TracedCause(ahead.foreseen.rebuild.cause), ahead.elapsed_ms)
            parts = self._prompter.extension(append, None, slots - CLOSURE_POSITIONS)
            position = ahead.foreseen.history_tokens
            answer = await self._stream.extend(append.seq, position, parts, encode_rules(rules))
            self._no_stream_because = RebuildCause.ENGINE_RESTART
            return answer
        if ahead is None and isinstance(plan, Extend) and self._stream.live:
            parts = self._prompter.extension(append, before.completed, slots)
            return await self._stream.extend(
                append.seq, plan.position_tokens, parts, encode_rules(rules)
            )
        parts = await self._prompter.whole_prompt(planned.window, unit_input(append))
        if isinstance(plan, Rebuild):
            return await self._rebuild(append.seq, plan, parts, rules, before, watch)
        answer = await self._stream.rebuild(append.seq, parts, encode_rules(rules))
        self._no_stream_because = RebuildCause.ENGINE_RESTART
        return answer

    async def _rebuild(
        self,
        seq: int,
        plan: Rebuild,
        parts: tuple[ThinkerPart, ...],
        rules: UnitRules,
        known: Conversation,
        watch: UnitWatch,
    ) -> ThinkerAnswer:
        with self._trace.rebuild(
            seq,
            self._facts.policy.mode,
            TracedCause(plan.cause),
            plan.drop_units,
            plan.dropped_tokens,
            plan.replacement_tokens,
            predicted_rebuild_ms(known, plan.replacement_tokens),
            watch.trace,
        ) as span:
            answer = await self._stream.rebuild(seq, parts, encode_rules(rules))
        self._no_stream_because = RebuildCause.ENGINE_RESTART
        watch.rebuilt(span.elapsed_ms)
        watch.metrics.rebuild(TracedCause(plan.cause), span.elapsed_ms)
        return answer
