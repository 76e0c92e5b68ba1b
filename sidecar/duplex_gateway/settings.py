"""Settings of one gateway process: read from the environment at start, then frozen."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from duplex_api.ledger_address import parse_address

PREFIX = "DUPLEX_"
LEAST_HELD_BYTES = 64 * 1024 * 1024
"""Half of it is what one call may keep."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`DUPLEX_<FIELD>` of the environment. Never logged: the ledger's URL may hold a password."""

    redis_url: str
    host: str = "0.0.0.0"
    port: int = 8080
    health_host: str = "0.0.0.0"
    health_port: int = 8081
    """/livez, /readyz, /metrics."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    """Read again when they change. Both empty: no TLS here (an ingress ends it)."""
    forwarded_allow_ips: str = ""
    """Proxies (comma list, or *) whose X-Forwarded-For is believed. Empty: none."""
    drain_grace_s: float = 20.0
    """After SIGTERM calls go on for so long, then they are closed with 1012."""
    max_calls: int = 2_000
    max_held_bytes: int = 512 * 1024 * 1024
    """Of messages that are kept for all calls together. At most half of the process's memory."""
    queue_wait_s: float = 300.0
    """How long a call waits for a replica before it is told to come again."""
    failed_attempts: int = 20
    """That one address may make at once; then one each `failed_attempt_refill_s`."""
    failed_attempt_refill_s: float = 3.0
    replica: str = msgspec.field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        parse_address(self.redis_url)
        for name in ("port", "health_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ValueError(f"{name} must be between 0 and 65535")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")
        for name in ("tls_cert_file", "tls_key_file"):
            if getattr(self, name) and not Path(getattr(self, name)).is_file():
                raise ValueError(f"{name} is no file")
        for name in ("max_calls", "failed_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_held_bytes < LEAST_HELD_BYTES:
            raise ValueError(f"max_held_bytes must be at least {LEAST_HELD_BYTES}")
        for name in ("drain_grace_s", "queue_wait_s", "failed_attempt_refill_s"):
            if not 0 <= getattr(self, name) < 86_400:
                raise ValueError(f"{name} must be between 0 and 86400")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("log_level must be DEBUG, INFO, WARNING or ERROR")


def settings_from(environment: Mapping[str, str]) -> GatewaySettings:
    """Raises msgspec.ValidationError naming the field, never its value."""
    values = {
        name: environment[PREFIX + name.upper()]
        for name in GatewaySettings.__struct_fields__
        if PREFIX + name.upper() in environment
    }
    return msgspec.convert(values, GatewaySettings, strict=False)
