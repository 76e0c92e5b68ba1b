"""The environment of stage processes. Measured on the proofs; every entry says what it is for."""

from collections.abc import Mapping
from pathlib import Path

_DROPPED = frozenset(
    {
        # Counts whole GiB, wins over kv_cache_memory_bytes, and becomes resident.
        "VLLM_CPU_KVCACHE_SPACE",
        # Without cached bytecode every process compiles for 15 s more.
        "PYTHONDONTWRITEBYTECODE",
    }
)


def stage_environment(inherited: Mapping[str, str], cache_dir: Path) -> dict[str, str]:
    """Environment for a stage process. cache_dir is kept between starts: without it vLLM inspects
    each of our classes in an extra process (9 s each)."""
    kept = {name: value for name, value in inherited.items() if name not in _DROPPED}
    return kept | {
        # Tiny models on busy cores: a second thread turned 0.06 s into 0.5 to 4.6 s.
        "OMP_NUM_THREADS": "1",
        # By default each CPU engine pins itself to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Freed memory of many threads' arenas would stay resident.
        "MALLOC_ARENA_MAX": "2",
        # Each engine makes groups of one process with itself. Their sockets, which ask nobody for
        # anything, would listen on the machine's address, in a pod for the whole cluster.
        "GLOO_SOCKET_IFNAME": "lo",
        # Nothing is fetched, nothing is reported.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache_dir / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "TRITON_CACHE_DIR": str(cache_dir / "triton"),
        # Our logits processors have the interface of the V1 runner; with Triton present vLLM
        # would take the V2 runner, which calls other methods.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Else the first top-k sampling on a GPU compiles a kernel.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Load our plugin and no other that happens to be installed.
        "VLLM_PLUGINS": "duplex",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
