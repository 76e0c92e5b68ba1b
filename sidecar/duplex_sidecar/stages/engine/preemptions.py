"""An alarm on vLLM's own preemptions: admission makes them impossible, so one is a fault of ours.

A preempted unit is replayed and says the same, so nobody hears it; but it shows that the engine ran
out of KV blocks, and the next step of that is a silent wait.
"""

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

log = logging.getLogger(__name__)


class Preemptions:
    """Of one engine, since it was started."""

    def __init__(self) -> None:
        self.count = 0

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """For `AsyncLLM`: its front end tells it what each step did."""
        return _Alarm(self, vllm_config, engine_index)


class _Alarm(StatLoggerBase):
    def __init__(
        self, preemptions: Preemptions, vllm_config: VllmConfig, engine_index: int = 0
    ) -> None:
        del vllm_config, engine_index  # of one engine here
        self._preemptions = preemptions

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is None or not iteration_stats.num_preempted_reqs:
            return
        self._preemptions.count += int(iteration_stats.num_preempted_reqs)
        log.error(
            "vLLM has preempted %d units: more was admitted than fits", self._preemptions.count
        )

    def log_engine_initialized(self) -> None:
        pass


PREEMPTIONS = Preemptions()
"""A stage process runs one engine."""
