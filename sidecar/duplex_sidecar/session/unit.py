"""One unit from its input to its sound, in the one order that there is.

    encode -> plan -> accept -> Thinker -> commit | Talker -> Code2Wav -> journal -> client

Nothing leaves before its unit is committed; commit and Talker run side by side. A stage that is
lost on the way is waited for and the unit is submitted again, recorded first, with the same seed.
`redo` and `respeak` enter the same way further down, from what the ledger holds.
"""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from msgspec import structs

from duplex_api.window import WindowMode
from duplex_sidecar.framing.append import Append
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.media import UnitMedia
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
from duplex_sidecar.session.lateness import Lateness
from duplex_sidecar.session.open_unit import OpenUnit, encode_open_unit
from duplex_sidecar.session.recording import (
    Answered,
    Planned,
    accept_draft,
    commit_draft,
    conversation_after,
    trim_after,
)
from duplex_sidecar.session.rows import (
    RetainedUnits,
    RowsMismatch,
    RowsMissing,
    StoredRows,
    encode_rows,
    history_of,
    split_chunks,
)
from duplex_sidecar.session.speaking import Speaker
from duplex_sidecar.session.thinking import ThinkerDriver
from duplex_sidecar.session.warming import WarmStreams
from duplex_sidecar.session.watching import UNIT_MS, UnitWatch
from duplex_sidecar.stages.errors import StageAway, StageError, StageFault
from duplex_sidecar.telemetry.logs import log_context
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import StageName, StepName, UnitDecision
from duplex_sidecar.telemetry.traces import SessionTrace
from duplex_sidecar.window.render import RenderError
from duplex_sidecar.window.state import Rebuild

log = logging.getLogger(__name__)

Publish = Callable[[events.Event], None]

_UNMENDABLE = (HandoffError, TalkerContextError, RenderError, RowsMismatch, RowsMissing)


class BadInput(Exception):
    """The append cannot be encoded (a broken camera frame): it fails whole, nothing has changed."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class UnitRunner:
    """Runs the units of one session, one after another. Holds no state of the conversation: it
    takes snapshots and returns the next ones."""

    def __init__(
        self,
        facts: SessionFacts,
        encoder: EncoderDriver,
        thinker: ThinkerDriver,
        speaker: Speaker,
        retained: RetainedUnits,
        durable: DurableSession,
        trace: SessionTrace,
        metrics: Metrics,
        publish: Publish,
    ) -> None:
        self._facts = facts
        self._encoder = encoder
        self._thinker = thinker
        self._speaker = speaker
        self._retained = retained
        self._durable = durable
        self._trace = trace
        self._metrics = metrics
        self._publish = publish
        self.lateness = Lateness(metrics)

    @property
    def retained_row_bytes(self) -> int:
        """Memory of the rows that are kept for slides to come."""
        return self._retained.held_bytes

    # --- the ways in ------------------------------------------------------------------------------

    async def run(
        self, before: Conversation, speech: Speech, append: Append
    ) -> tuple[Conversation, Speech]:
        """A new unit. Raises BadInput (nothing has changed), SessionOver, LedgerError."""
        if before.listens_next:
            append = structs.replace(append, force_listen=True)
        with self._unit(append.seq, speech) as watch:
            with watch.step(StepName.ENCODE):
                rows, mark_samples = await self._encode(append, watch)
            self._retained.put_rows(append.seq, rows)
            planned = self._thinker.plan(before, append)
            open_unit = OpenUnit(
                append=structs.replace(append, pcm_s16le=b"", frames=()),
                encoder_mark_samples=mark_samples,
            )
            with watch.step(StepName.ACCEPT):
                await self._durable.accept(
                    accept_draft(
                        self._facts, append, planned.plan, speech, watch.trace.traceparent
                    ),
                    UnitMedia(pcm=append.pcm_s16le, rows=encode_rows(rows)),
                    encode_open_unit(open_unit),
                )
            self._publish(
                events.InputAccepted(
                    append.seq, append.client_from_samples, append.client_to_samples
                )
            )
            return await self._answer(before, speech, open_unit, rows, planned, watch, attempt=1)

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
        with self._unit(append.seq, speech, redo_of=traceparent) as watch:
            self._retained.put_rows(append.seq, rows)
            planned = self._thinker.plan(before, append)
            return await self._answer(before, speech, open_unit, rows, planned, watch, attempt)

    async def respeak(
        self, after: Conversation, speech: Speech, committed: records.Committed
    ) -> Speech:
        """A committed unit whose sound had not left: its tokens are forced through the Thinker
        again for their hidden rows, then spoken at a new epoch."""
        completed = after.completed
        if completed is None or after.seq != committed.seq:
            raise SessionOver(ErrorCode.LEDGER_CORRUPT, "a committed unit without its answer")
        with self._unit(committed.seq, speech) as watch:
            answered = await self._thinker.repeat(
                after, completed.input, committed.token_ids, watch
            )
            speech = await self._speak(after, speech, answered, watch)
            self._retain(after)
            return speech

    def catch_up(self, speech: Speech) -> None:
        """Make the vocoder ready for the turn that another owner began; returns at once."""
        self._speaker.catch_up(speech, self._metrics)

    async def part(self) -> WarmStreams:
        """What another runner of this session can go on with here. Of this one only `close_voice`
        or `close` is called from now on."""
        stream, ahead = await self._thinker.part()
        return WarmStreams(self._encoder, stream, ahead)

    async def close_voice(self) -> None:
        """End the streams of Talker and Code2Wav alone."""
        await self._speaker.close()

    async def close(self) -> None:
        """End all streams of the session."""
        await self._thinker.close()
        await self._speaker.close()
        with suppress(StageError):
            await self._encoder.close()

    # --- the way ----------------------------------------------------------------------------------

    async def _encode(self, append: Append, watch: UnitWatch) -> tuple[StoredRows, int]:
        try:
            encoded = await self._encoder.feed(append)
        except StageError as error:
            watch.trace.stage_fault(StageName.ENCODER, error.fault)
            if error.fault is StageFault.UNDECODABLE:
                raise BadInput(ErrorCode.INVALID_FRAME, error.reason) from error
            raise
        if encoded.encoder_reset:
            watch.trace.encoder_reset()
        rows = split_chunks(encoded, append.chunks, append.reservation.blocks)
        return rows, encoded.reset_mark_samples

    async def _answer(
        self,
        before: Conversation,
        speech: Speech,
        open_unit: OpenUnit,
        rows: StoredRows,
        planned: Planned,
        watch: UnitWatch,
        attempt: int,
    ) -> tuple[Conversation, Speech]:
        append = open_unit.append
        answered = await self._thinker.answer(before, append, planned, watch, attempt)
        facts = answered.facts
        completed = history_of(append.seq, rows, facts.content_ids, facts.terminator)
        after = conversation_after(
            self._facts, before, open_unit, completed, answered, watch.rebuild_cost_ms
        )
        self._retain(after)
        watch.trace.decided(
            UnitDecision(facts.decision),
            len(answered.answer.emitted_ids),
            after.window.prompt_tokens,
        )
        committing = asyncio.create_task(self._commit(speech, answered, after, watch))
        try:
            speech = await self._speak(after, speech, answered, watch, committing)
        except asyncio.CancelledError:
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            raise
        except Exception:
            # The answer counts all the same, even if it cannot be spoken.
            await asyncio.gather(committing, return_exceptions=True)
            raise
        self._metrics.unit(UnitDecision(facts.decision), watch.wall_ms, UNIT_MS)
        return after, speech

    async def _commit(
        self, speech: Speech, answered: Answered, after: Conversation, watch: UnitWatch
    ) -> None:
        with watch.step(StepName.COMMIT):
            await self._durable.commit(
                commit_draft(self._facts, after.seq, speech, answered),
                encode_conversation(after),
                trim_after(self._facts.policy.mode, after),
            )
        self._thinker.committed(after)

    async def _speak(
        self,
        after: Conversation,
        speech: Speech,
        answered: Answered,
        watch: UnitWatch,
        committing: "asyncio.Task[None] | None" = None,
    ) -> Speech:
        voiced = await self._speaker.voice(speech, after.seq, answered.answer, watch)
        watch.trace.text(voiced.text)
        if committing is not None:
            await committing
        rebuilt = answered.plan if isinstance(answered.plan, Rebuild) else None
        done = events.UnitDone(
            unit=after.seq,
            turn=voiced.speech.turn,
            decision=events.Decision(answered.facts.decision),
            tokens=len(answered.answer.emitted_ids),
            window_tokens=after.window.prompt_tokens,
            rebuild_cause=rebuilt.cause if rebuilt else None,
            rebuild_ms=None if watch.rebuild_ms is None else round(watch.rebuild_ms, 3),
            dropped_units=rebuilt.drop_units if rebuilt else 0,
            head=self._durable.head.index,
            epoch=voiced.speech.epoch,
            stage2_sequence=voiced.chunks[-1].chunk.sequence if voiced.chunks else None,
            audio_samples=sum(chunk.samples for chunk in voiced.chunks),
            wall_ms=round(watch.wall_ms, 3),
            stage_ms={name: round(ms, 3) for name, ms in watch.stage_ms.items()},
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
        if self._facts.policy.mode is WindowMode.OFF:
            self._retained.keep_only([])
            return
        if after.completed is not None:
            self._retained.complete(after.completed)
        self._retained.keep_only([*(unit.seq for unit in after.window.units), after.seq])

    # --- around a unit ----------------------------------------------------------------------------

    @contextmanager
    def _unit(self, seq: int, speech: Speech, redo_of: str | None = None) -> Generator[UnitWatch]:
        """The span of a unit, and its number in the log. What no retry mends ends this session, by
        name; other sessions are not concerned."""
        span = self._trace.unit(seq, speech.turn, UNIT_MS, redo_of=redo_of)
        with span as trace, log_context(unit=seq):
            try:
                watch = UnitWatch(trace, self._metrics)
                with self.lateness.watched(seq, watch):
                    yield watch
            except SessionOver as over:
                log.warning("unit failed: %s", over.code)
                raise
            except StageAway as away:
                log.error("unit not done: %s", away)
                raise
            except StageError as error:
                detail = f"{error.stage}: {error.fault}"
                log.error("unit failed: %s", detail)
                raise SessionOver(ErrorCode.UNIT_FAILED, detail) from error
            except _UNMENDABLE as error:
                detail = f"{type(error).__name__}: {error}"
                log.error("unit failed: %s", detail)
                raise SessionOver(ErrorCode.UNIT_FAILED, detail) from error
