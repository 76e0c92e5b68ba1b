"""What the operator is told by its environment (the chart writes it)."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from duplex_operator.ledger_server import read_address

DURABILITIES = ("memory", "replicated", "fsync")
"""The sidecar's own words."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """redis_url: the installation's one ledger. namespace: the operator's own (its Lease lives
    there). watch_namespaces: empty means all. identity: unique per process."""

    redis_url: str = field(repr=False)
    namespace: str
    identity: str
    watch_namespaces: tuple[str, ...] = ()
    sidecar_image: str = ""
    ledger_durability: str = ""
    """What pods are told that an acknowledged write must survive. Empty: the sidecar's default."""
    gateway_endpoint: str = ""
    log_level: str = "INFO"
    health_port: int = 8080
    health_host: str = "0.0.0.0"
    lease_name: str = "duplex-operator"
    reconciles_at_once: int = 48
    relist_period_s: float = 300.0
    secrets_period_s: float = 30.0
    suspect_after_s: float = 2.0
    erase_bound_s: float = 30.0
    """How long a deleted session's finalizer waits for its erasure."""
    counters_period_s: float = 60.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Raises ValueError that names the variable at fault."""
        namespace = _required(environment, "DUPLEX_NAMESPACE")
        redis_url = _required(environment, "DUPLEX_REDIS_URL")
        try:
            read_address(redis_url)
        except ValueError as error:
            raise ValueError(f"DUPLEX_REDIS_URL: {error}") from None
        log_level = environment.get("DUPLEX_LOG_LEVEL", "INFO").upper()
        if log_level not in LOG_LEVELS:
            raise ValueError(f"DUPLEX_LOG_LEVEL is one of {', '.join(LOG_LEVELS).lower()}")
        durability = environment.get("DUPLEX_LEDGER_DURABILITY", "")
        if durability and durability not in DURABILITIES:
            raise ValueError(f"DUPLEX_LEDGER_DURABILITY is one of {', '.join(DURABILITIES)}")
        health_port = environment.get("DUPLEX_HEALTH_PORT", "8080")
        if not health_port.isdecimal() or not 0 < int(health_port) < 65_536:
            raise ValueError("DUPLEX_HEALTH_PORT is a number from 1 to 65535")
        watched = environment.get("DUPLEX_WATCH_NAMESPACES", "")
        return cls(
            redis_url=redis_url,
            namespace=namespace,
            identity=f"{socket.gethostname()}-{os.getpid()}",
            watch_namespaces=tuple(sorted({n.strip() for n in watched.split(",")} - {""})),
            sidecar_image=environment.get("DUPLEX_SIDECAR_IMAGE", ""),
            ledger_durability=durability,
            gateway_endpoint=environment.get("DUPLEX_GATEWAY_ENDPOINT", ""),
            log_level=log_level,
            health_port=int(health_port),
        )

    @property
    def release(self) -> str:
        """The same for all its operators, one after the other: they share this Lease."""
        return f"{self.namespace}/{self.lease_name}"

    def watches(self, namespace: str) -> bool:
        return not self.watch_namespaces or namespace in self.watch_namespaces


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ValueError(f"{name} is not set")
    return value
