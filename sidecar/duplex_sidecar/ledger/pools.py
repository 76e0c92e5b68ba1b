"""Pools of connections to the ledger's server. With Sentinels each new connection asks them for the
primary first, so a pool whose connections were dropped finds the new one by itself. The nodes of a
cluster have a pool each (`ledger.nodes`)."""

from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from duplex_api.ledger_address import ClusterAddress, SentinelAddress

FindPrimary = Callable[[], Awaitable[tuple[str, int]]]


def make_pool(
    address: str | SentinelAddress, *, connections: int, timeout_s: float
) -> BlockingConnectionPool:
    """Connects nowhere yet. timeout_s: of a connection, a wait for a free one, and of each question
    to a Sentinel. Raises ValueError."""
    options = _options(connections, timeout_s)
    if isinstance(address, str):
        return BlockingConnectionPool.from_url(address, **options)
    return BlockingConnectionPool(
        connection_class=_TlsPrimary if address.tls else _Primary,
        find_primary=_finder(address, timeout_s),
        db=address.database,
        username=address.username or None,
        password=address.password or None,
        **options,
    )


def node_pool(
    address: ClusterAddress, host: str, port: int, *, connections: int, timeout_s: float
) -> BlockingConnectionPool:
    """Of one node of that cluster."""
    return BlockingConnectionPool(
        connection_class=SSLConnection if address.tls else Connection,
        host=host,
        port=port,
        username=address.username or None,
        password=address.password or None,
        **_options(connections, timeout_s),
    )


def _options(connections: int, timeout_s: float) -> dict[str, Any]:
    return {
        "max_connections": connections,
        "timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "client_name": "duplex",
        "driver_info": None,
    }


def _finder(address: SentinelAddress, timeout_s: float) -> FindPrimary:
    async def find() -> tuple[str, int]:
        # Anew for each question: many connections ask at once after a failover, and what one closes
        # in the end must not be what another one is asking over.
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
