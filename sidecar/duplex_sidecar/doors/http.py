"""uvicorn's HTTP, and an end for connections that ask for nothing: as it comes, one that sends no
whole request keeps its socket for as long as it likes."""

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 10.0
"""For a connection's first request; uvicorn itself bounds the wait for the next ones."""


class DoorHttp(H11Protocol):
    """One connection, up to an upgrade. For `uvicorn.Config(http=DoorHttp)`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.cancel()  # it holds all of the connection
        super().connection_lost(exc)

    def _close_idle(self) -> None:
        upgraded = self.transport.get_protocol() is not self
        asked = cast("object | None", self.cycle)
        if not upgraded and asked is None:
            self.transport.close()
