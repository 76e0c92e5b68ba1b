"""Puts the parts of one session together: new, or recovered from its ledger."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from duplex_api.window import ResolvedWindow, WindowMode
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.client_record import ClientRecord
from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.lease import Lease, LeaseKeeper
from duplex_sidecar.ledger.records import Opening, OpeningDraft
from duplex_sidecar.ledger.recovery import Resume
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.model.minicpmo45.talker import TALKER_SAMPLING
from duplex_sidecar.protocol.events import Event
from duplex_sidecar.session.actor import Recover, SessionActor
from duplex_sidecar.session.catching_up import NOTHING_SOUNDED, SoundedCodes, sounded_of
from duplex_sidecar.session.client_commands import CommandDesk
from duplex_sidecar.session.conversation import (
    Conversation,
    Speech,
    decode_conversation,
    decode_speech,
    first_speech,
)
from duplex_sidecar.session.cutting import ReplyCutter
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.hearing import EncoderDriver
from duplex_sidecar.session.input import InputDesk
from duplex_sidecar.session.model import ServedModel
from duplex_sidecar.session.open_unit import OpenUnit, decode_open_unit
from duplex_sidecar.session.opening import facts_of, terms_of
from duplex_sidecar.session.prompting import Prompter, history_from_ledger
from duplex_sidecar.session.rows import RetainedUnits, decode_reference, decode_rows
from duplex_sidecar.session.speaking import Speaker, VoiceSettings
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.session.staggering import Stagger
from duplex_sidecar.session.streams import talker_stream, thinker_stream
from duplex_sidecar.session.thinking import ThinkerDriver
from duplex_sidecar.session.unit import UnitRunner
from duplex_sidecar.session.warming import WarmStreams
from duplex_sidecar.stages.envelope import Tensor
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import LedgerCall, SegmentReason
from duplex_sidecar.telemetry.traces import SessionTrace, Tracing
from duplex_sidecar.window.state import RebuildCause

StagesOf = Callable[[SessionFacts, Lease, StageSet], StageSet]
"""What one session gets as its stages; a recorder puts itself before them."""


def as_they_are(facts: SessionFacts, lease: Lease, stages: StageSet) -> StageSet:
    """The stages themselves, for every session."""
    return stages


@dataclass(frozen=True)
class Assembly:
    """What all sessions of this replica share. clock_s: what grace times and holds are measured
    with. rebuild_ahead: open the stream of a slide that is sure to come before its append does.
    address: host:port under which others reach this replica's door, "" when nobody asks. pod_uid:
    of the pod in which it runs, "" outside one. stagger: of what waits behind an outage."""

    model: ServedModel
    stages: StageSet
    ledger: Ledger
    tracing: Tracing
    metrics: Metrics
    replica: str
    ledger_hold_s: float
    clock_s: Callable[[], float] = time.monotonic
    rebuild_ahead: bool = True
    stages_of: StagesOf = as_they_are
    address: str = ""
    pod_uid: str = ""
    stagger: Stagger = field(default_factory=Stagger)

    def new_trace(self, session: str) -> SessionTrace:
        return self.tracing.session(session, None, SegmentReason.OPENED)


@dataclass(frozen=True)
class _Parts:
    """The movable parts of one session on this replica."""

    runner: UnitRunner
    commands: CommandDesk
    encoder: EncoderDriver
    retained: RetainedUnits
    durable: DurableSession
    keeper: LeaseKeeper
    loads: "_Loads"
    outlet: "_Outlet"
    trace_id: Callable[[], str]


class _Loads:
    """A session that was taken up is in memory as the ledger has it: what its recovery needs
    of it is not read a second time. From the next commit on, and for a new session, it is."""

    def __init__(self, durable: DurableSession, loaded: LoadedSession | None) -> None:
        self._durable = durable
        self._loaded = loaded

    async def __call__(self) -> LoadedSession:
        held = self._loaded
        if held is not None and held.head.committed_seq == self._durable.head.committed_seq:
            return held
        return await self._durable.load()

    def forget(self) -> None:
        self._loaded = None


class _Outlet:
    """Where units publish to; the actor that reads it is made after the runner."""

    def __init__(self) -> None:
        self.publish: Callable[[Event], None] = lambda event: None

    def __call__(self, event: Event) -> None:
        self.publish(event)


def assemble_new(
    shared: Assembly,
    draft: OpeningDraft,
    conversation: Conversation,
    lease: Lease,
    head: Head,
    trace: SessionTrace,
    reference: Tensor | None,
) -> SessionActor:
    """reference: rows of the reference voice, if the draft has positions for them."""
    parts = _parts(shared, draft, lease, head, trace, RetainedUnits(reference))
    return _actor(shared, draft, parts, conversation, first_speech(), None, None, age_s=0.0)


def assemble_recovered(
    shared: Assembly,
    loaded: LoadedSession,
    decision: Resume,
    lease: Lease,
    warm: WarmStreams | None = None,
) -> SessionActor:
    """The session as its ledger has it; what a lost owner left unfinished runs before anything new.
    warm: streams that stand here already, at the last committed unit.

    A respeak or redo continues the trace of the unit that was lost.
    """
    accepted = loaded.accepted
    before = accepted[-1].traceparent if accepted else loaded.opening.traceparent
    trace = shared.tracing.session(loaded.session, before, SegmentReason.RESUMED)
    conversation = decode_conversation(loaded.state)
    speech = _speech_of(loaded)
    sounded = sounded_of(loaded.marks, speech.turn) if speech.turn_open else NOTHING_SOUNDED
    blob = loaded.reference_rows
    retained = RetainedUnits(decode_reference(blob[0]) if blob else None)
    parts = _parts(
        shared, loaded.opening, lease, loaded.head, trace, retained, loaded, sounded, warm
    )
    # The journal is the truth about numbers: an event that was journaled is never numbered again.
    speech = structs.replace(speech, last_sequence=loaded.meta.events_last)
    open_unit = (
        decode_open_unit(loaded.accepted_state) if loaded.accepted_state is not None else None
    )

    async def recover() -> tuple[Conversation, Speech]:
        return await _recover(
            loaded, decision, parts, conversation, speech, open_unit, shared, warm
        )

    age_s = max(0.0, time.time() - loaded.opening.at_ms / 1000)
    return _actor(
        shared, loaded.opening, parts, conversation, speech, open_unit, recover, age_s=age_s
    )


def _speech_of(loaded: LoadedSession) -> Speech:
    if loaded.voice_state is None:
        return first_speech()
    try:
        return decode_speech(loaded.voice_state)
    except msgspec.MsgspecError as error:
        raise LedgerCorrupt(loaded.session, "voice state", str(error)) from error


async def _recover(
    loaded: LoadedSession,
    decision: Resume,
    parts: _Parts,
    conversation: Conversation,
    speech: Speech,
    open_unit: OpenUnit | None,
    shared: Assembly,
    warm: WarmStreams | None,
) -> tuple[Conversation, Speech]:
    _retain(loaded, parts.retained, conversation, decision, shared)
    heard, mark = conversation.seq, conversation.encoder_mark_samples
    if open_unit is not None:
        heard, mark = open_unit.append.seq, open_unit.encoder_mark_samples
    if warm is not None:
        parts.encoder.adopt(warm.encoder)
        if not decision.respeak and decision.redo is None:
            parts.runner.catch_up(speech)
    restoring = asyncio.create_task(parts.encoder.follow(heard, mark))
    try:
        for again in decision.respeak:
            speech = await parts.runner.respeak(conversation, speech, again.unit)
        if decision.redo is not None and open_unit is not None:
            seq = decision.redo.unit.seq
            conversation, speech = await parts.runner.redo(
                conversation,
                speech,
                open_unit,
                decode_rows(loaded.media[seq].rows),
                decision.redo.attempt,
                decision.redo.unit.traceparent,
            )
        # A failed restore is tried again with the next append, which knows how to wait for a stage.
        await asyncio.wait({restoring})
    finally:
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
        parts.loads.forget()
    return conversation, speech


def _retain(
    loaded: LoadedSession,
    retained: RetainedUnits,
    conversation: Conversation,
    decision: Resume,
    shared: Assembly,
) -> None:
    """The units that a slide may render again. Mode `off` keeps none between units; a unit that is
    to be spoken again needs its rows there too."""
    wanted = [unit.seq for unit in conversation.window.units]
    off = msgspec.json.decode(loaded.opening.window, type=ResolvedWindow).mode is WindowMode.OFF
    if conversation.completed is not None and (decision.respeak or not off):
        wanted.append(conversation.seq)
    for unit, rows in history_from_ledger(loaded, wanted, shared.model.vocabulary):
        retained.put_rows(unit.input.seq, rows)
        retained.complete(unit)


def _parts(
    shared: Assembly,
    opening: Opening | OpeningDraft,
    lease: Lease,
    head: Head,
    trace: SessionTrace,
    retained: RetainedUnits,
    loaded: LoadedSession | None = None,
    sounded: SoundedCodes = NOTHING_SOUNDED,
    warm: WarmStreams | None = None,
) -> _Parts:
    facts = facts_of(opening, shared.model)
    stages = shared.stages_of(facts, lease, shared.stages)

    async def renew(held: Lease) -> Lease:
        with shared.metrics.timed_ledger_call(LedgerCall.RENEW):
            return await shared.ledger.renew(held)

    keeper = LeaseKeeper(renew, lease)
    durable = DurableSession(
        shared.ledger,
        keeper,
        head,
        hold_s=shared.ledger_hold_s,
        metrics=shared.metrics,
        clock_s=shared.clock_s,
        stagger=shared.stagger,
    )
    loads = _Loads(durable, loaded)

    async def pcm_of_units(first: int, last: int) -> list[bytes]:
        loaded = await loads()
        return [loaded.media[seq].pcm for seq in range(first, last + 1)]

    gates = stages.redo_gates
    encoder = EncoderDriver(stages.encoder, lease.session, pcm_of_units, gates.encoder)
    speaker = Speaker(
        stages,
        talker_stream(stages, lease.session, lease.fence),
        VoiceSettings(
            session=lease.session,
            voice=opening.voice,
            seed=opening.seed,
            sampling=TALKER_SAMPLING,
            talker_limit=shared.model.max_talker_tokens,
            final_prompt_token=facts.layout_ids.audio_slot,
        ),
        facts.vocabulary,
        trace,
        sounded,
    )
    outlet = _Outlet()
    thinker = ThinkerDriver(
        facts,
        stages.thinker,
        warm.thinker if warm else thinker_stream(stages, lease.session, lease.fence),
        Prompter(facts, retained, loads),
        durable,
        trace,
        no_stream_because=_no_stream_because(lease, taken_up=loaded is not None),
        redo_gate=gates.thinker,
        rebuild_ahead=shared.rebuild_ahead,
        taken_up=warm.ahead if warm else None,
    )
    runner = UnitRunner(
        facts,
        encoder,
        thinker,
        speaker,
        retained,
        durable,
        trace,
        shared.metrics,
        outlet,
    )

    def trace_id() -> str:
        return trace.traceparent.split("-")[1]

    meta = loaded.meta if loaded is not None else None
    commands = CommandDesk(
        ReplyCutter(facts, retained, durable, thinker, speaker),
        durable,
        ClientRecord() if meta is None else meta.client,
        (0, 0) if meta is None else (meta.played_turn or 0, meta.played_samples),
        outlet,
    )
    return _Parts(runner, commands, encoder, retained, durable, keeper, loads, outlet, trace_id)


def _no_stream_because(lease: Lease, *, taken_up: bool) -> RebuildCause:
    """Why the first stream beyond unit 1 comes from a rebuild."""
    if lease.woken:
        return RebuildCause.MOVE
    return RebuildCause.REPLICA_RESTART if taken_up else RebuildCause.ENGINE_RESTART


def _actor(
    shared: Assembly,
    opening: Opening | OpeningDraft,
    parts: _Parts,
    conversation: Conversation,
    speech: Speech,
    open_unit: OpenUnit | None,
    recover: Recover | None,
    *,
    age_s: float,
) -> SessionActor:
    facts = facts_of(opening, shared.model)
    terms = terms_of(opening)
    framing = conversation.framing if open_unit is None else open_unit.append.resume
    parts.keeper.start()
    actor = SessionActor(
        session=opening.session,
        mode=facts.policy.mode,
        conversation=conversation,
        speech=speech,
        desk=InputDesk(
            UnitFramer(
                facts.layout.context_tokens,
                state=framing,
                high_resolution=terms.camera.high_resolution,
            ),
            framing.rate_hz,
            terms.camera.frames_per_unit,
        ),
        commands=parts.commands,
        runner=parts.runner,
        durable=parts.durable,
        keeper=parts.keeper,
        ledger=shared.ledger,
        lifecycle=terms.lifecycle,
        recover=recover,
        clock_s=shared.clock_s,
        age_s=age_s,
        trace_id=parts.trace_id,
    )
    parts.outlet.publish = actor.publish
    return actor
