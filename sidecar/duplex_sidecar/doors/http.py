"""uvicorn's HTTP, and an end for connections that never ask to the end: as it comes, one that sends
no whole request keeps its socket for as long as it likes, and so does one whose second request, or
the rest of its first, comes a byte at a time."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 10.0
"""For a whole request, from the connection's beginning or from the answer to the one before."""


class DoorHttp(H11Protocol):
    """One connection, up to an upgrade. For `uvicorn.Config(http=DoorHttp)`."""

    _idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_a_request()

    def on_response_complete(self) -> None:
        self._wait_for_a_request()
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._wait_no_more()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait_for_a_request(self) -> None:
        self._wait_no_more()
        self._idle = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_idle)

    def _wait_no_more(self) -> None:
        if self._idle is not None:
            self._idle.cancel()  # it holds all of the connection, and what was read of it

    def _close_idle(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.close()
