"""The Thinker stage: feeds in, tokens and hidden rows out. Runs in the Thinker's process."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from vllm.v1.engine.async_llm import AsyncLLM

from duplex_sidecar.checkpoint.config import CheckpointConfig
from duplex_sidecar.checkpoint.engine_view import EngineModel, write_engine_view
from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.engine_plugin import DECISION_ROWS_KEY, THINKER_PROCESSOR
from duplex_sidecar.engine_plugin.ring import RingReader
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    UnitRules,
    encode_rules,
    initial_state,
)
from duplex_sidecar.stages.engine.guards import EngineLimits, Refusal
from duplex_sidecar.stages.engine.handoff import Handoff, RowsLostError, UnitFaultError
from duplex_sidecar.stages.engine.host import EngineHost, Feed
from duplex_sidecar.stages.engine.launch import engine_blocks, start_engine
from duplex_sidecar.stages.engine.preemptions import PREEMPTIONS
from duplex_sidecar.stages.engine.settings import BLOCK_TOKENS
from duplex_sidecar.stages.envelope import (
    ELEMENT_BYTES,
    Done,
    Health,
    HealthReport,
    Ids,
    Request,
    Rows,
    Tensor,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
)
from duplex_sidecar.stages.errors import StageFault
from duplex_sidecar.stages.thinker.config import ThinkerSettings
from duplex_sidecar.stages.thinker.prompt import (
    check_parts,
    checked_rules,
    count_positions,
    renderer,
)

STAGE = "thinker"
_RING_SLOTS_PER_SEAT = 64
"""Between two looks at the ring no unit ends, so a seat has at most 20 steps and a few chunks of
a prefill in it."""
_WARM_STREAM = "warm-up"


class ThinkerService:
    """Implements `StageService`."""

    def __init__(
        self,
        settings: ThinkerSettings,
        config: CheckpointConfig,
        engine: AsyncLLM,
        ring: RingReader,
    ) -> None:
        self._settings = settings
        self._hidden_size = config.thinker.hidden_size
        self._vocab_size = config.thinker.vocab_size
        self._vocabulary = load_vocabulary(Path(settings.checkpoint))
        self._stop_ids = sorted(self._vocabulary.terminators)
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
            case ThinkerFeed():
                return await self.feed(request)
            case ThinkerClose():
                await self._host.close(request.stream)
                return Done()
            case Health():
                return self.health()
            case _:
                raise self._host.error(StageFault.REFUSED, f"not for the {STAGE}")

    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer:
        """One append: check, run, pair the tokens with their rows."""
        feed = self._checked(request)
        answered = await self._host.run_unit(feed)
        row_bytes = self._hidden_size * ELEMENT_BYTES[self._settings.element_type]
        try:
            steps = self._host.handoff.steps(
                answered.number, feed.unit, answered.first, answered.ids, row_bytes
            )
        except (UnitFaultError, RowsLostError) as error:
            raise self._host.poison(answered, feed, error) from None
        self._host.finish_unit(answered, feed)
        decision_row: Tensor | None = None
        if self._settings.decision_rows:
            decision_row = self._rows([steps.decision_row])
        return ThinkerAnswer(
            session=request.session,
            stream=request.stream,
            unit=request.unit,
            emitted_ids=tuple(answered.ids),
            sampled_ids=steps.sampled_ids,
            hidden=self._rows(steps.rows),
            engine_ms=answered.engine_ms,
            decision_row=decision_row,
        )

    def _rows(self, rows: Sequence[bytes]) -> Tensor:
        return Tensor(self._settings.element_type, (len(rows), self._hidden_size), b"".join(rows))

    def _checked(self, request: ThinkerFeed) -> Feed:
        try:
            check_parts(
                request.parts, self._vocab_size, self._hidden_size, self._settings.element_type
            )
            rules = checked_rules(
                request.rules, self._vocabulary, bench_scripts=self._settings.bench_scripts
            )
        except Refusal as refusal:
            raise self._host.error(StageFault.REFUSED, str(refusal)) from None
        return Feed(
            stream=request.stream,
            unit=request.unit,
            opens=request.opens,
            position=request.position,
            new=count_positions(request.parts),
            answer_limit=rules.token_limit,
            rules=request.rules,
            stop_ids=self._stop_ids,
            render=renderer(request.parts),
        )

    def health(self) -> HealthReport:
        limits = self._host.limits
        return HealthReport(
            stage=STAGE,
            limits={
                "max_model_len": limits.max_model_len,
                "context_tokens": self._settings.context_tokens,
                "hidden_size": self._hidden_size,
                "vocab_size": self._vocab_size,
                "seats": limits.seats,
                "blocks": limits.blocks,
                "block_tokens": limits.block_tokens,
                "lapped_records": self._host.handoff.lapped_records,
                "preemptions": PREEMPTIONS.count,
            },
            streams=self._host.streams,
        )

    async def warm_up(self) -> None:
        """Two units through the whole way: one that listens, one that samples and hands off."""
        rows = Tensor(
            self._settings.element_type,
            (1, self._hidden_size),
            bytes(self._hidden_size * ELEMENT_BYTES[self._settings.element_type]),
        )
        position = 0
        for unit, is_speech in enumerate((False, True)):
            rules = UnitRules(
                policy=initial_state(seeded_text=False),
                is_speech=is_speech,
                force_listen=False,
                max_tokens=None,
                sampling=GREEDY_SAMPLING,
                seed=_WARM_STREAM,
            )
            answer = await self.feed(
                ThinkerFeed(
                    session=_WARM_STREAM,
                    stream=_WARM_STREAM,
                    unit=unit,
                    opens=unit == 0,
                    position=position,
                    parts=(Ids((self._vocabulary.unit,)), Rows(rows)),
                    rules=encode_rules(rules),
                )
            )
            position += 2 + len(answer.emitted_ids) - 1
        await self._host.close(_WARM_STREAM)

    async def failed(self) -> str:
        return await self._host.failed()

    async def close(self) -> None:
        await self._host.close_all()
        # Its memory is all that the core has: nothing to wait for.
        self._engine.shutdown(timeout=0)
        self._ring.close()


async def load(settings: ThinkerSettings) -> ThinkerService:
    """Start the engine and run it once."""
    checkpoint, view = Path(settings.checkpoint), Path(settings.runtime_dir) / "engine-view"
    shapes = write_engine_view(
        EngineModel.THINKER,
        checkpoint,
        view,
        max_model_len=settings.max_model_len,
        with_weights=settings.loads_weights,
    )
    ring_path = settings.ring_path(STAGE)
    row_bytes = shapes.thinker.hidden_size * ELEMENT_BYTES[settings.element_type]
    ring = RingReader(ring_path, settings.seats * _RING_SLOTS_PER_SEAT, row_bytes)
    plugin_config = {"ring": str(ring_path), "checkpoint": settings.checkpoint}
    if settings.decision_rows:
        plugin_config[DECISION_ROWS_KEY] = ""
    try:
        engine = start_engine(settings, view, THINKER_PROCESSOR, plugin_config)
    finally:
        # The core has mapped it by now; a killed process then leaves no file behind.
        ring.unlink()
    service = ThinkerService(settings, shapes, engine, ring)
    await service.warm_up()
    return service
