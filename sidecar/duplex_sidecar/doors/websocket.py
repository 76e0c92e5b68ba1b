"""uvicorn's WebSocket, and an end for connections whose client does not read, or does not end what
it says.

As it comes, closing waits until the client has taken everything that was written before: one that
never reads keeps its socket and its buffers for as long as it likes. Here the close frame goes out
behind what waits at once, and what is not taken in time is cut off.

And as it comes, one that writes has up to `ws_max_size` bytes, and any number of frames, of memory
for as long as it likes. Here it is read on only where `unread` has room. And its request, of which
uvicorn keeps twenty times its bytes for as long as the connection lasts, is forgotten when whoever
serves it has let it in.
"""

import asyncio
import math
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from duplex_sidecar.doors.unread import READ_BYTES, Unread, offer
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

CUT_AFTER_S = 5.0
_UNHEARD = ErrorCode.SLOW_CONSUMER
"""Why a connection whose pings are not answered is closed: its client is gone, or does not read."""


class _Connection(WebSocketsSansIOProtocol):
    """Everything but how the bytes come."""

    _cut: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _look_s = math.inf
    _is_ascii = True
    """The message that is coming, so far."""

    def __init__(self, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._unread = Unread(self._regulate)

    # --- in -------------------------------------------------------------------------------------

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        self._unread.other_frame()
        if self.response.status_code == 101:
            offer(self.scope, self._unread)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._unread.read(len(data))
        self._regulate()

    def handle_text(self, event: Frame) -> None:
        self._is_ascii = True
        self._frame(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._frame(event)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._frame(event)
        super().handle_cont(event)

    def handle_ping(self) -> None:
        self._unread.other_frame()
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._unread.other_frame()
        super().handle_pong(event)

    def _frame(self, event: Frame) -> None:
        self._is_ascii = self._is_ascii and cast("bytes", event.data).isascii()
        self._unread.frame(len(event.data))

    def send_receive_event_to_app(self) -> None:
        if self._unread.is_long and not self._is_ascii:
            # As a str it would take four times the memory; what it says is the same in bytes.
            self.curr_msg_data_type = "bytes"
        self._unread.message(kept=not self.close_sent)
        super().send_receive_event_to_app()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._unread.taken()
        self._regulate()
        return message

    def _regulate(self) -> None:
        """Read on, or not, and see to it that this is looked at again."""
        if self.disconnected or self.transport.is_closing():
            return
        if not self._unread.may_read:
            if not self.read_paused:
                self.read_paused = True
                self.transport.pause_reading()
        elif self.read_paused and self.queue.empty():
            self.read_paused = False
            self.transport.resume_reading()
        now_s = self.loop.time()
        wait_s = self._unread.look(now_s)
        if wait_s is not None and now_s + wait_s < self._look_s:
            if self._look is not None:
                self._look.cancel()
            self._look_s = now_s + wait_s
            self._look = self.loop.call_at(self._look_s, self._look_again)

    def _look_again(self) -> None:
        self._look, self._look_s = None, math.inf
        self._regulate()

    # --- the end --------------------------------------------------------------------------------

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.close":
            self._cut_soon()
            self.writable.set()  # a close frame is small: it does not wait for a client that reads
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._forget_request()

    def _forget_request(self) -> None:
        """Each is emptied, not replaced: the parser has the request, starlette the scope's list."""
        self.request.headers.clear()
        cast("list[tuple[bytes, bytes]]", self.scope["headers"]).clear()
        cast("list[str]", self.scope["subprotocols"]).clear()

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
        for timer in (self._cut, self._look):
            if timer is not None:
                timer.cancel()
        self._unread.closed()
        super().connection_lost(exc)

    def _cut_soon(self) -> None:
        if self._cut is None:
            self._cut = self.loop.call_later(CUT_AFTER_S, self.transport.abort)


class _ALittleAtATime(asyncio.BufferedProtocol):
    """One connection. The other kind of protocol is given as much as there is, 256 kB at a time."""

    def __init__(self, **uvicorns: Any) -> None:
        """uvicorns: as uvicorn makes its own."""
        self._connection = _Connection(**uvicorns)
        self._buffer = bytearray(READ_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """The opening request, from who has read it."""
        self._connection.data_received(data)

    def get_buffer(self, sizehint: int) -> bytearray:
        _ = sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)


DoorWebSocket = cast("type[asyncio.Protocol]", _ALittleAtATime)
"""For `uvicorn.Config(ws=DoorWebSocket)`, which makes it and no more than passes it to asyncio."""
