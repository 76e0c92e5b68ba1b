"""Where the ledger is, and a client of it: one server by URL, or the primary that Sentinels name.

    redis://user:password@host:6379/0     one server (rediss:// with TLS, unix:///path)
    redis+sentinel://user:password@sentinel-a:26379,sentinel-b:26379/service/0
    rediss+sentinel://...                 TLS to the servers and the Sentinels

User and password are the server's; `?sentinel_username=...&sentinel_password=...` the Sentinels'.
The same addresses as a sidecar takes, since every pool's pods get this one. No error quotes any of
it: it may be of a password.
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel

_SENTINEL = {"redis+sentinel": False, "rediss+sentinel": True}
_DEFAULT_PORT = 26_379
_OPTIONS: dict[str, Any] = {"protocol": 2, "decode_responses": True, "health_check_interval": 15}


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """tls: also to the Sentinels. Names and passwords are "" where none is given."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    database: int
    username: str
    password: str
    sentinel_username: str
    sentinel_password: str
    tls: bool


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
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("a ledger address is a URL") from None
    if parts.fragment or (parts.scheme != "unix" and "@" in parts.path + parts.query):
        raise ValueError("user and password of a ledger address are percent-encoded")
    if parts.scheme in _SENTINEL:
        return _read_sentinels(url)
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


def _read_sentinels(url: str) -> SentinelAddress:
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    path = [part for part in parts.path.split("/") if part]
    if not path or len(path) > 2 or not hosts:
        raise ValueError("a Sentinel address is redis+sentinel://host:port[,host:port]/service[/0]")
    if len(path) == 2 and not path[1].isdecimal():
        raise ValueError("the last part of a Sentinel address is a database number")
    query = dict(parse_qsl(parts.query))
    if set(query) - {"sentinel_username", "sentinel_password"}:
        raise ValueError("a Sentinel address takes sentinel_username and sentinel_password alone")
    return SentinelAddress(
        sentinels=tuple(_host_and_port(host) for host in hosts.split(",")),
        service=unquote(path[0]),
        database=int(path[1]) if len(path) == 2 else 0,
        username=unquote(username),
        password=unquote(password),
        sentinel_username=query.get("sentinel_username", ""),
        sentinel_password=query.get("sentinel_password", ""),
        tls=_SENTINEL[parts.scheme],
    )


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not host:
        host, port = text, ""
    if port and not (port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError("a Sentinel's port is a number from 1 to 65535")
    if not host:
        raise ValueError("a Sentinel without a host")
    return host.strip("[]"), int(port) if port else _DEFAULT_PORT
