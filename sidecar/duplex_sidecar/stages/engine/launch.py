"""Starts one vLLM engine for a stage: engine core in a child process, front end here."""

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from duplex_sidecar.stages.engine.preemptions import PREEMPTIONS
from duplex_sidecar.stages.engine.settings import BLOCK_TOKENS, Device, EngineSettings

_UNLIMITED_ITEMS = 999
"""Rendered inputs are not counted against the limit; 0 would switch the modality off."""


def start_engine(
    settings: EngineSettings, view: Path, logits_processor: str, plugin_config: Mapping[str, str]
) -> AsyncLLM:
    """Blocks until the model is loaded. Call in the main thread: the engine core is killed when
    the thread that started it ends. plugin_config goes to the processor in the core."""
    arguments: dict[str, Any] = {
        "model": str(view),
        "dtype": settings.element_type.value,
        "load_format": settings.load_format.value,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.seats,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "gpu_memory_utilization": settings.gpu_memory_share,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": settings.enforce_eager,
        # Token ids in, token ids out.
        "skip_tokenizer_init": True,
        # A stream keeps its KV anyway; caching by item hash could only serve wrong rows.
        "enable_prefix_caching": False,
        # Else the core keeps up to 4 GiB of rows that nobody asks for again.
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"audio": _UNLIMITED_ITEMS},
        "logits_processors": [logits_processor],
        "additional_config": {"duplex": dict(plugin_config)},
        # CPU and GPU run one path until the confirmed-token tests pass with it on a GPU.
        "async_scheduling": False,
        # The class: the string "uni" becomes the multiprocess executor on a CPU, which costs one
        # more process of 0.7 GiB.
        "distributed_executor_backend": UniProcExecutor,
        # The one statistic that is wanted, preemptions, has a logger of its own.
        "disable_log_stats": True,
        "generation_config": "vllm",
    }
    if settings.device is Device.CUDA and not settings.enforce_eager:
        # Graphs of the decode steps without a compiler in the loop.
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments), stat_loggers=[PREEMPTIONS.logger]
    )


def engine_blocks(engine: AsyncLLM) -> int:
    """KV blocks that streams may use (one is vLLM's own null block)."""
    blocks = engine.vllm_config.cache_config.num_gpu_blocks
    if blocks is None:
        raise RuntimeError("the engine did not report its KV blocks")
    return blocks - 1


def core_sentinels() -> list[int]:
    """File descriptors that become readable when a child process of the engine ends."""
    return [child.sentinel for child in multiprocessing.active_children()]
