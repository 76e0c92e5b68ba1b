"""What the sidecar tells a vLLM stage process (Thinker, Talker) in its JSON config file."""

import hashlib
from enum import StrEnum
from pathlib import Path

import msgspec

from duplex_sidecar.stages.envelope import ElementType

BLOCK_TOKENS = 32
"""KV positions per block: the smallest that the CPU backend takes, so the finest grain."""

UNIT_MARGIN_TOKENS = 32
"""Positions that an engine has above the contract's limit, so that a unit admitted at the limit
can finish (a Thinker answer has at most 20 tokens)."""


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class LoadFormat(StrEnum):
    AUTO = "auto"
    """Weights from the checkpoint's safetensors."""
    DUMMY = "dummy"
    """Random weights of the checkpoint's shape, for benches: no file but config.json is read."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Paths are absolute.

    context_tokens: the contract's limit; the engine itself gets UNIT_MARGIN_TOKENS more.
    seats: streams that may live at once: slots + concurrent rebuilds.
    kv_bytes: KV cache of this engine.
    runtime_dir: engine view, socket and logs; belongs to this process alone.
    ring_dir: a tmpfs for the hand-off ring. cache_dir: kept between starts (compiled artefacts).
    max_batched_tokens: positions per engine step; longer prompts are prefilled in chunks.
    gpu_memory_share: of the device's memory that this engine may claim at start; what the stages
    of one device claim together has to stay below 1.
    feed_timeout_s: an engine that does not answer one feed in this time has that stream ended.
    """

    checkpoint: str
    device: Device
    element_type: ElementType
    context_tokens: int
    seats: int
    kv_bytes: int
    runtime_dir: str
    cache_dir: str
    ring_dir: str = "/dev/shm"
    max_batched_tokens: int = 2048
    gpu_memory_share: float = 0.9
    enforce_eager: bool = True
    load_format: LoadFormat = LoadFormat.AUTO
    feed_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("context_tokens", "seats", "kv_bytes", "max_batched_tokens", "feed_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0")
        if not 0 < self.gpu_memory_share < 1:
            raise ValueError("gpu_memory_share must be between 0 and 1")
        if self.element_type not in (ElementType.FLOAT32, ElementType.BFLOAT16):
            raise ValueError("element_type must be float32 or bfloat16")
        if self.device is Device.CPU and not self.enforce_eager:
            raise ValueError("enforce_eager must be true on a CPU: there are no graphs to capture")
        for name in ("checkpoint", "runtime_dir", "cache_dir", "ring_dir"):
            if not Path(getattr(self, name)).is_absolute():
                raise ValueError(f"{name} must be an absolute path")

    @property
    def loads_weights(self) -> bool:
        return self.load_format is LoadFormat.AUTO

    def ring_path(self, stage: str) -> Path:
        """File of the hand-off ring. It has a name only while the engine starts, and always the
        same one, so that the next start takes the place of a start that was killed."""
        owner = hashlib.blake2b(self.runtime_dir.encode(), digest_size=8).hexdigest()
        return Path(self.ring_dir) / f"duplex-{stage}-{owner}.ring"

    @property
    def max_model_len(self) -> int:
        """Positions that the engine is built for."""
        return self.context_tokens + UNIT_MARGIN_TOKENS
