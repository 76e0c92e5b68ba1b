"""Pools of connections to the ledger's server. With Sentinels each new connection asks them for the
primary first, so a pool whose connections were dropped finds the new one by itself."""

from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from duplex_api.ledger_address import SentinelAddress, parse_address

FindPrimary = Callable[[], Awaitable[tuple[str, int]]]


def make_pool(url: str, *, connections: int, timeout_s: float) -> BlockingConnectionPool:
    """Connects nowhere yet. timeout_s: of a connection, a wait for a free one, and of each question
    to a Sentinel. Raises ValueError."""
    options: dict[str, Any] = {
        "max_connections": connections,
        "timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "client_name": "duplex",
        "driver_info": None,
    }
    address = parse_address(url)
    if isinstance(address, str):
        return BlockingConnectionPool.from_url(address, **options)
    login = {"username": address.username or None, "password": address.password or None}
    return BlockingConnectionPool(
        connection_class=_TlsPrimary if address.tls else _Primary,
        find_primary=_finder(address, timeout_s),
        db=address.database,
        **login,
        **options,
    )


def _finder(address: SentinelAddress, timeout_s: float) -> FindPrimary:
    sentinels = Sentinel(
        address.sentinels,
        sentinel_kwargs={
            "username": address.sentinel_username or None,
            "password": address.sentinel_password or None,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "ssl": address.tls,
        },
    )

    async def find() -> tuple[str, int]:
        try:
            host, port = await sentinels.discover_master(address.service)
        finally:
            # Asked seldom: no connection to a Sentinel is kept, nobody would close it.
            for sentinel in sentinels.sentinels:
                await sentinel.aclose()
        return str(host), int(port)

    return find


class _Primary(Connection):
    """A connection to whichever server is the primary when it is made."""

    def __init__(self, *, find_primary: FindPrimary, **options: Any) -> None:
        super().__init__(**options)
        self._find_primary = find_primary

    async def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = await self._find_primary()
        await super().connect()


class _TlsPrimary(SSLConnection):
    """The same with TLS."""

    def __init__(self, *, find_primary: FindPrimary, **options: Any) -> None:
        super().__init__(**options)
        self._find_primary = find_primary

    async def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = await self._find_primary()
        await super().connect()
