"""A client of the ledger's server, or of the primary that Sentinels name. The same addresses as a
sidecar takes (`duplex_api.ledger_address`), since every pool's pods get this one. No error quotes
any of it: it may be of a password.
"""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel

from duplex_api.ledger_address import ClusterAddress, SentinelAddress, parse_address

_OPTIONS: dict[str, Any] = {"protocol": 2, "decode_responses": True, "health_check_interval": 15}


@dataclass(frozen=True, slots=True)
class LedgerClients:
    """redis: of the primary. sentinels: those that are asked for it on each new connection."""

    redis: "Redis"
    sentinels: tuple["Redis", ...] = ()

    async def close(self) -> None:
        await self.redis.aclose()
        for sentinel in self.sentinels:
            await sentinel.aclose()


def read_address(url: str) -> str | SentinelAddress:
    """The URL itself where it names one server. Raises ValueError."""
    address = parse_address(url)
    if isinstance(address, SentinelAddress):
        return address
    if isinstance(address, ClusterAddress):
        raise ValueError("the operator serves no ledger on a Redis Cluster")
    try:
        parse_url(url)
    except ValueError:
        raise ValueError(
            "a ledger address is redis://host:port/0, rediss://, unix:// or redis+sentinel://, "
            "with user and password percent-encoded"
        ) from None
    return url


def open_ledger(url: str, timeout_s: float) -> LedgerClients:
    """Connects nowhere yet. timeout_s: of a connection, and of each answer. Raises ValueError."""
    address = read_address(url)
    waits: dict[str, Any] = {"socket_connect_timeout": timeout_s, "socket_timeout": timeout_s}
    if isinstance(address, str):
        return LedgerClients(Redis.from_url(address, **_OPTIONS, **waits))
    sentinels: Any = Sentinel(
        address.sentinels,
        sentinel_kwargs={
            "username": address.sentinel_username or None,
            "password": address.sentinel_password or None,
            "ssl": address.tls,
            **waits,
        },
    )
    primary: Redis = sentinels.master_for(
        address.service,
        username=address.username or None,
        password=address.password or None,
        db=address.database,
        ssl=address.tls,
        **_OPTIONS,
        **waits,
    )
    return LedgerClients(primary, tuple(sentinels.sentinels))
