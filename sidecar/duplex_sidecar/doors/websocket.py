"""uvicorn's WebSocket, and an end for connections whose client does not read.

As it comes, closing waits until the client has taken everything that was written before: one that
never reads keeps its socket and its buffers for as long as it likes. Here the close frame goes out
behind what waits at once, and what is not taken in time is cut off.
"""

import asyncio

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

CUT_AFTER_S = 5.0
_UNHEARD = ErrorCode.SLOW_CONSUMER
"""Why a connection whose pings are not answered is closed: its client is gone, or does not read."""


class DoorWebSocket(WebSocketsSansIOProtocol):
    """One connection. For `uvicorn.Config(ws=DoorWebSocket)`."""

    _cut: asyncio.TimerHandle | None = None

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close":
            self._cut_soon()
            self.writable.set()  # a close frame is small: it does not wait for a client that reads
        await super().send(message)

    def keepalive_timeout(self) -> None:
        self._cut_soon()
        self.pong_timer = None
        self.pending_ping_payload = None
        if self.close_sent or self.transport.is_closing():
            return
        self.conn.fail(ERRORS[_UNHEARD].close_code or 1008, _UNHEARD)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    def shutdown(self) -> None:
        self._cut_soon()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)

    def _cut_soon(self) -> None:
        if self._cut is None:
            self._cut = self.loop.call_later(CUT_AFTER_S, self.transport.abort)
