"""Settings of one sidecar process: what it is told at start, validated once, then frozen."""

import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from duplex_api.ledger_address import parse_address
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.stages.engine.settings import Device

MAX_DRAIN_GRACE_S = 3600.0
CUDA_ENCODER_BATCH = 8
ENVIRONMENT_PREFIX = "DUPLEX_"
_NOT_FROM_ENVIRONMENT = frozenset({"bench_script"})


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
    encoder_batch: int = 0
    """Sessions whose seconds, or camera frames, share one pass of the encoder where they wait at
    the same moment. 0: `CUDA_ENCODER_BATCH` on a GPU and 1 on a CPU (`encoder_batch_here`)."""
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
    """Empty, and no file: the admin API answers 401 to everybody."""
    admin_token_file: str = ""
    """File of the admin token, read again when it changes; instead of `admin_token`."""
    admin_port: int = 0
    """Port of the admin API; 0: it is on `port`, beside the realtime door."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    """PEM files, both or none: the admin port speaks TLS. Read again when they change."""
    pod_uid: str = ""
    """Of the pod that this process runs in. With it an operator says which sessions run here."""
    pod_name: str = ""
    advertise: str = ""
    """host:port of the realtime door as a gateway dials it; it is written into each lease. An IPv6
    host may come without its brackets: a pod's environment cannot put them."""
    drain_grace_s: float = 5.0
    """After SIGTERM: how long sessions may go on to the end of their turn before they park."""
    otlp_endpoint: str | None = None
    trace_sample_ratio: float = 1.0
    """Part of the sessions that are traced, 0 to 1. A session is traced whole or not at all, on
    every replica the same."""
    content_in_telemetry: bool = False
    voices_dir: str = ""
    """Folder of voice files, `NAME.safetensors` each: a session's voice is looked for here before
    the checkpoint's own voices. Read at start. Empty: none."""
    contract_tape_dir: str = ""
    """Folder for tapes of what passes between sessions and stages, for `duplex contract record`;
    empty: none are written. They hold prompts, token ids and codes: content."""
    ledger_hold_s: float = 10.0
    """How long input is held while the ledger cannot be reached, before it is refused."""
    ledger_durability: Durability = Durability.MEMORY
    """What an acknowledged write must survive: memory, replicated or fsync. The server is asked at
    start whether it can; if not, this process does not become ready."""

    def __post_init__(self) -> None:
        parse_address(self.redis_url)
        for name in ("checkpoint", "runtime_dir", "cache_dir"):
            if not Path(getattr(self, name)).is_absolute():
                raise ValueError(f"{name} must be an absolute path")
        for name in ("contract_tape_dir", "voices_dir"):
            if getattr(self, name) and not Path(getattr(self, name)).is_absolute():
                raise ValueError(f"{name} must be an absolute path")
        if not 0 <= self.trace_sample_ratio <= 1:
            raise ValueError("trace_sample_ratio must be between 0 and 1")
        for name in ("slots", "rebuild_seats", "max_model_tokens", "max_talker_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.encoder_batch < 0:
            raise ValueError("encoder_batch must not be negative")
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ValueError(f"{name} must be between 0 and 65535")
        if self.admin_port and self.admin_port == self.port:
            raise ValueError("admin_port must be another port than port")
        if self.admin_token and self.admin_token_file:
            raise ValueError("admin_token and admin_token_file exclude each other")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file belong together")
        if self.tls_cert_file and not self.admin_port:
            raise ValueError("tls_cert_file needs admin_port: the realtime door speaks no TLS")
        if not 0 <= self.drain_grace_s <= MAX_DRAIN_GRACE_S:
            raise ValueError(f"drain_grace_s must be between 0 and {MAX_DRAIN_GRACE_S:.0f}")

    @property
    def encoder_batch_here(self) -> int:
        """`encoder_batch`, with its default for the device filled in.

        On a GPU the last of eight has its rows in half the time (`tests/gpu/results/`). A CPU core
        takes as long as for one after the other, and then everybody waits for the last."""
        return self.encoder_batch or (1 if self.device is Device.CPU else CUDA_ENCODER_BATCH)

    @property
    def given_voices_dir(self) -> str:
        """Where voices are kept that come with sessions."""
        return str(Path(self.runtime_dir) / "voices")

    @property
    def address(self) -> str:
        """`advertise` with an IPv6 host in brackets."""
        host, separator, port = self.advertise.rpartition(":")
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"{host}{separator}{port}"

    @property
    def listen_host(self) -> str:
        """`host`; all addresses of both families where the door is advertised by an IPv6 one."""
        ipv6 = self.address.startswith("[")
        return "::" if ipv6 and self.host == "0.0.0.0" else self.host

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the ports."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def settings_from_environment(
    environ: Mapping[str, str], defaults: Mapping[str, str]
) -> SidecarSettings:
    """`DUPLEX_<FIELD>` for every field that is set; empty ones count as not set. In a pod the
    replica is called `<pod uid>-<boot nonce>` unless it is named. Other variables are not looked
    at. Raises ValueError and msgspec.ValidationError, which name field and problem.

    defaults: values of fields that are neither set nor have a default of their own.
    """
    fields = msgspec.structs.fields(SidecarSettings)
    names = {field.name for field in fields if field.name not in _NOT_FROM_ENVIRONMENT}
    given = {name: environ.get(ENVIRONMENT_PREFIX + name.upper(), "") for name in names}
    values = {**defaults, **{name: text for name, text in given.items() if text}}
    missing = [f.name for f in fields if f.required and f.name not in values]
    if missing:
        raise ValueError(f"{ENVIRONMENT_PREFIX}{missing[0].upper()} is not set")
    if "replica" not in values and "pod_uid" in values:
        values["replica"] = f"{values['pod_uid']}-{secrets.token_hex(4)}"
    return msgspec.convert(values, SidecarSettings, strict=False)
