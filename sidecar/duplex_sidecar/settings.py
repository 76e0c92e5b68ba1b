"""Settings of one sidecar process: what it is told at start, validated once, then frozen."""

import os
import socket
from pathlib import Path

import msgspec

from duplex_sidecar.stages.engine.settings import Device


class SidecarSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the sidecar needs to know. Paths are absolute. Never logged: it holds the
    admin token, and so may the ledger's URL."""

    checkpoint: str
    redis_url: str
    runtime_dir: str
    """Sockets, stage logs, engine views, the hand-off ring. Private to this process."""
    cache_dir: str
    """Caches that survive a restart (vLLM's model information). Shared between replicas."""
    host: str = "127.0.0.1"
    port: int = 8765
    model_name: str = "duplex"
    replica: str = msgspec.field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    device: Device = Device.CPU
    slots: int = 4
    """Live sessions at once."""
    rebuild_seats: int = 2
    """Rebuilds at once: an old and a new stream live side by side while one is under way."""
    rebuild_ahead: bool = True
    """Make the prompt of a slide that is sure to come before its append does. Changes when the
    Thinker works, never what it answers."""
    max_model_tokens: int = 8192
    """The contract's limit of the Thinker; the engine itself gets 32 positions more."""
    max_talker_tokens: int = 4096
    thinker_kv_bytes: int = 256 * 1024 * 1024
    talker_kv_bytes: int = 128 * 1024 * 1024
    thinker_gpu_share: float = 0.5
    talker_gpu_share: float = 0.15
    """Shares of the device's memory that the two engines may claim; encoder and vocoder need the
    rest."""
    cuda_graphs: bool = False
    load_dummy_weights: bool = False
    """Bench only: stages make up weights of the checkpoint's shape; only config.json is read."""
    bench_script: tuple[tuple[int, ...], ...] = ()
    """Bench only: token ids that the units emit in turn, instead of what is sampled."""
    admin_token: str = ""
    """Empty: the admin API answers 401 to everybody."""
    otlp_endpoint: str | None = None
    content_in_telemetry: bool = False
    contract_tape_dir: str = ""
    """Folder for tapes of what passes between sessions and stages, for `duplex contract record`;
    empty: none are written. They hold prompts, token ids and codes: content."""
    ledger_hold_s: float = 10.0
    """How long input is held while the ledger cannot be reached, before it is refused."""

    def __post_init__(self) -> None:
        for name in ("checkpoint", "runtime_dir", "cache_dir"):
            if not Path(getattr(self, name)).is_absolute():
                raise ValueError(f"{name} must be an absolute path")
        if self.contract_tape_dir and not Path(self.contract_tape_dir).is_absolute():
            raise ValueError("contract_tape_dir must be an absolute path")
        for name in ("slots", "rebuild_seats", "max_model_tokens", "max_talker_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 <= self.port < 65536:
            raise ValueError("port must be between 0 and 65535")
