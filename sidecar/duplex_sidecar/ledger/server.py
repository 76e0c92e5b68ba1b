"""What a server must be to hold the ledger, and what it may promise. Pure: its answers in, a
refusal or nothing out.

| durability | what survives | what the server must be |
|---|---|---|
| memory | the loss of sidecars, pods, GPU nodes | anything that does not evict |
| replicated | the loss of the primary too, if a replica that acknowledged takes over | `min-replicas-to-write` >= 1, a replica connected; each write is waited for |
| fsync | a power cut on the server's host | `appendonly yes`, `appendfsync always` |
"""  # noqa: E501

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from duplex_sidecar.ledger.errors import LedgerUnsuitable

NEEDED_REPLICAS = 1
"""Replicas that have a write before it counts as `replicated`."""

CONFIG_NAMES = ("appendonly", "appendfsync", "min-replicas-to-write")

Info = Mapping[str, Any]


class Durability(StrEnum):
    """What an acknowledged write survives."""

    MEMORY = "memory"
    REPLICATED = "replicated"
    FSYNC = "fsync"


def check_server(server: Info, memory: Info) -> None:
    """Redis >= 7.2 or Valkey >= 8, and never one that evicts: all keys of a ledger carry an expiry,
    so any eviction policy would eat them. Raises `LedgerUnsuitable`."""
    valkey = server.get("valkey_version")
    name = "Valkey" if valkey else "Redis"
    version = str(valkey or server.get("redis_version", "0"))
    needed = (8, 0) if valkey else (7, 2)
    parts = version.split(".")
    found = tuple(int(part) if part.isdigit() else 0 for part in (*parts, "0", "0")[:2])
    if found < needed:
        text = f"{name} {version} is too old: Redis >= 7.2 or Valkey >= 8 is needed"
        raise LedgerUnsuitable("", text)
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        text = f"{name} has maxmemory-policy {policy}; a ledger needs noeviction"
        raise LedgerUnsuitable("", text)


def check_durability(
    durability: Durability, replication: Info, config: Mapping[str, str] | None
) -> None:
    """config: the server's own settings of `CONFIG_NAMES`, None if it does not tell. Raises
    `LedgerUnsuitable` saying what would have to change."""
    if durability is Durability.MEMORY:
        return
    promise = f"durability {durability}"
    if config is None:
        text = "cannot be checked: the server refuses CONFIG GET to this user"
        raise LedgerUnsuitable("", f"{promise} {text}; allow it or set durability memory")
    if durability is Durability.FSYNC:
        wanted = {"appendonly": "yes", "appendfsync": "always"}
        wrong = [f"{name} {config.get(name, 'unset')}" for name in wanted if _differs(config, name)]
        if wrong:
            text = f"needs appendonly yes and appendfsync always; the server has {', '.join(wrong)}"
            raise LedgerUnsuitable("", f"{promise} {text}")
        return
    if _number(config.get("min-replicas-to-write")) < NEEDED_REPLICAS:
        text = f"needs min-replicas-to-write {NEEDED_REPLICAS} or more"
        raise LedgerUnsuitable("", f"{promise} {text}; the server accepts writes on its own")
    connected = _number(replication.get("connected_slaves"))
    if connected < NEEDED_REPLICAS:
        text = f"needs {NEEDED_REPLICAS} connected replica; the server has {connected}"
        raise LedgerUnsuitable("", f"{promise} {text}")


def _differs(config: Mapping[str, str], name: str) -> bool:
    return config.get(name) != {"appendonly": "yes", "appendfsync": "always"}[name]


def _number(value: Any) -> int:
    text = str(value)
    return int(text) if text.isdigit() else 0
