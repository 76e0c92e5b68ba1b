"""The client's side of a call: whole messages, a bound on each wait."""

import asyncio
import contextlib
from typing import NoReturn

from fastapi import WebSocket, WebSocketDisconnect

from duplex_gateway.budget import Account
from duplex_gateway.ending import Ended
from duplex_gateway.metrics import CallEnd
from duplex_sidecar.doors.unread import Overdue, Unread
from duplex_sidecar.protocol.errors import ErrorCode

SEND_TIMEOUT_S = 10.0
SHORT_SEND_TIMEOUT_S = 1.0
"""Where all calls together hold as much as they may: one that reads takes a message at once."""
FAREWELL_TIMEOUT_S = 2.0
"""For what tells why a connection is closed; a client that does not read does without."""


class ClientSocket:
    """An accepted connection."""

    def __init__(self, websocket: WebSocket, unread: Unread, account: Account) -> None:
        """unread: of that connection; the call's account has it, too, from now on."""
        self._websocket = websocket
        self._unread = unread
        self._account = account
        unread.count_for(account.part())

    def admit(self) -> None:
        """Its token has proved right."""
        self._unread.admit()

    async def until_overdue(self) -> NoReturn:
        """Raises Ended when a message is too long for what room there is, or takes too long."""
        match await self._unread.overdue():
            case Overdue.NO_ROOM as why:
                raise Ended.because(CallEnd.REFUSED, ErrorCode.RESOURCE_EXHAUSTED, why)
            case Overdue.TOO_SLOW as why:
                raise Ended.because(CallEnd.SLOW_CLIENT, ErrorCode.SLOW_CONSUMER, why)

    async def receive(self) -> bytes:
        """The next message, as bytes if it is a text, too: as a str one foreign character would
        make it four times as large for as long as it is kept. Raises Ended."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Ended(CallEnd.CLIENT_LEFT)
        text = message.get("text")
        return text.encode() if text is not None else message.get("bytes") or b""

    async def send(self, message: bytes) -> None:
        """Raises Ended: the client is gone, or does not read."""
        fits = self._account.fits(len(message))
        try:
            with self._account.holding(len(message)):
                async with asyncio.timeout(SEND_TIMEOUT_S if fits else SHORT_SEND_TIMEOUT_S):
                    await self._websocket.send_text(message.decode())
        except TimeoutError:
            raise Ended.because(CallEnd.SLOW_CLIENT, ErrorCode.SLOW_CONSUMER) from None
        except (WebSocketDisconnect, RuntimeError):  # starlette: the socket is closed already
            raise Ended(CallEnd.CLIENT_LEFT) from None

    async def say_goodbye(self, ended: Ended) -> None:
        """The last messages and the close code, if there is anybody left to hear them."""
        if ended.close_code is None:
            return
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                    for message in ended.messages:
                        await self._websocket.send_text(message.decode())
            await self._websocket.close(ended.close_code, ended.reason)
