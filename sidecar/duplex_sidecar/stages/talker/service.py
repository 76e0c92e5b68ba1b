"""The Talker stage: conditions in, codec codes out. Runs in the Talker's process."""

from pathlib import Path

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM

from duplex_sidecar.checkpoint.config import CheckpointConfig
from duplex_sidecar.checkpoint.engine_view import EngineModel, write_engine_view
from duplex_sidecar.engine_plugin import TALKER_PROCESSOR
from duplex_sidecar.engine_plugin.ring import MIN_PAYLOAD_BYTES, RingReader
from duplex_sidecar.model.minicpmo45.decode import GREEDY_SAMPLING
from duplex_sidecar.model.minicpmo45.talker import CODEC_EOS, UnitKind, UnitRules, encode_rules
from duplex_sidecar.stages.engine.guards import EngineLimits, Refusal
from duplex_sidecar.stages.engine.handoff import Handoff, UnitFaultError
from duplex_sidecar.stages.engine.host import EngineHost, Feed
from duplex_sidecar.stages.engine.launch import engine_blocks, start_engine
from duplex_sidecar.stages.engine.preemptions import PREEMPTIONS
from duplex_sidecar.stages.engine.settings import BLOCK_TOKENS
from duplex_sidecar.stages.envelope import (
    Condition,
    Done,
    ElementType,
    Health,
    HealthReport,
    Request,
    TalkerAnswer,
    TalkerClose,
    TalkerFeed,
    Tensor,
)
from duplex_sidecar.stages.errors import StageFault
from duplex_sidecar.stages.talker.config import TalkerSettings
from duplex_sidecar.stages.talker.prompt import (
    check_parts,
    checked_rules,
    count_positions,
    renderer,
)

STAGE = "talker"
_RING_SLOTS_PER_SEAT = 8
"""The ring carries nothing but faults."""
_WARM_STREAM = "warm-up"


class TalkerService:
    """Implements `StageService`."""

    def __init__(
        self, settings: TalkerSettings, config: CheckpointConfig, engine: AsyncLLM, ring: RingReader
    ) -> None:
        self._settings = settings
        self._text_ids = config.talker.num_text_tokens
        self._llm_dim = config.talker.llm_dim
        self._engine = engine
        self._ring = ring
        limits = EngineLimits(
            max_model_len=settings.max_model_len,
            seats=settings.seats,
            blocks=engine_blocks(engine),
            block_tokens=BLOCK_TOKENS,
        )
        self._host = EngineHost(STAGE, engine, limits, Handoff(ring), settings.feed_timeout_s)

    async def handle(self, request: Request) -> msgspec.Struct:
        match request:
            case TalkerFeed():
                return await self.feed(request)
            case TalkerClose():
                await self._host.close(request.stream)
                return Done()
            case Health():
                return self.health()
            case _:
                raise self._host.error(StageFault.REFUSED, f"not for the {STAGE}")

    async def feed(self, request: TalkerFeed) -> TalkerAnswer:
        """One condition: check, run, strip the end code."""
        feed = self._checked(request)
        answered = await self._host.run_unit(feed)
        try:
            self._host.handoff.check_fault(answered.number, feed.unit)
            if answered.ids[-1] != CODEC_EOS:
                # The dropped last token would have been a code: the stream misses it from now on.
                raise UnitFaultError("the unit did not end with the end code")
        except UnitFaultError as error:
            raise self._host.poison(answered, feed, error) from None
        self._host.finish_unit(answered, feed)
        return TalkerAnswer(
            session=request.session,
            stream=request.stream,
            unit=request.unit,
            codes=tuple(answered.ids[:-1]),
            engine_ms=answered.engine_ms,
        )

    def _checked(self, request: TalkerFeed) -> Feed:
        try:
            check_parts(request.parts, self._text_ids, self._llm_dim)
            rules = checked_rules(request.rules)
        except Refusal as refusal:
            raise self._host.error(StageFault.REFUSED, str(refusal)) from None
        return Feed(
            stream=request.stream,
            unit=request.unit,
            opens=request.opens,
            position=request.position,
            new=count_positions(request.parts),
            answer_limit=rules.budget.max_codes,
            rules=request.rules,
            stop_ids=[CODEC_EOS],
            render=renderer(request.parts),
        )

    def health(self) -> HealthReport:
        limits = self._host.limits
        return HealthReport(
            stage=STAGE,
            limits={
                "max_model_len": limits.max_model_len,
                "context_tokens": self._settings.context_tokens,
                "llm_dim": self._llm_dim,
                "seats": limits.seats,
                "blocks": limits.blocks,
                "block_tokens": limits.block_tokens,
                "preemptions": PREEMPTIONS.count,
            },
            streams=self._host.streams,
        )

    async def warm_up(self) -> None:
        """One unit through the whole way."""
        row = Tensor(ElementType.FLOAT32, (1, self._llm_dim), bytes(4 * self._llm_dim))
        rules = UnitRules(
            kind=UnitKind.MID, recent_codes=(), sampling=GREEDY_SAMPLING, seed=_WARM_STREAM
        )
        await self.feed(
            TalkerFeed(
                session=_WARM_STREAM,
                stream=_WARM_STREAM,
                unit=0,
                opens=True,
                position=0,
                parts=(Condition((0,), row),),
                rules=encode_rules(rules),
            )
        )
        await self._host.close(_WARM_STREAM)

    async def failed(self) -> str:
        return await self._host.failed()

    async def close(self) -> None:
        await self._host.close_all()
        # Its memory is all that the core has: nothing to wait for.
        self._engine.shutdown(timeout=0)
        self._ring.close()


async def load(settings: TalkerSettings) -> TalkerService:
    """Start the engine and run it once."""
    checkpoint, view = Path(settings.checkpoint), Path(settings.runtime_dir) / "engine-view"
    shapes = write_engine_view(
        EngineModel.TALKER,
        checkpoint,
        view,
        max_model_len=settings.max_model_len,
        with_weights=settings.loads_weights,
    )
    ring_path = settings.ring_path(STAGE)
    ring = RingReader(ring_path, settings.seats * _RING_SLOTS_PER_SEAT, MIN_PAYLOAD_BYTES)
    try:
        engine = start_engine(
            settings,
            view,
            TALKER_PROCESSOR,
            {"ring": str(ring_path), "checkpoint": settings.checkpoint},
        )
    finally:
        # The core has mapped it by now; a killed process then leaves no file behind.
        ring.unlink()
    service = TalkerService(settings, shapes, engine, ring)
    await service.warm_up()
    return service
