"""A Thinker whose admission guard looks away: vLLM itself has to make room, by preemption.

Imported in the stage's process alone (`exact_crowded_thinker`).
"""

from typing import Any

from msgspec import structs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from duplex_sidecar.stages.engine import launch
from duplex_sidecar.stages.envelope import HealthReport
from duplex_sidecar.stages.thinker import service
from duplex_sidecar.stages.thinker.config import ThinkerSettings

MANY_BLOCKS = 1_000_000


class _Counter(StatLoggerBase):
    """vLLM's own count of preemptions."""

    preemptions = 0

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        del vllm_config, engine_index

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            _Counter.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass


class _CountedEngine(AsyncLLM):
    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **_: Any) -> AsyncLLM:
        return AsyncLLM.from_engine_args(engine_args, stat_loggers=[_Counter])


class _CrowdedService(service.ThinkerService):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._host.limits = structs.replace(self._host.limits, blocks=MANY_BLOCKS)

    def health(self) -> HealthReport:
        report = super().health()
        return structs.replace(report, limits=report.limits | {"preemptions": _Counter.preemptions})


async def load(settings: ThinkerSettings) -> service.ThinkerService:
    launch.AsyncLLM = _CountedEngine
    service.ThinkerService = _CrowdedService
    return await service.load(settings)
