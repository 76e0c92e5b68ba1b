"""One connection to the door of a session's owner."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from duplex_gateway.decide import Dial
from duplex_gateway.wire import resume_message
from duplex_sidecar.ledger.journal import MAX_JOURNAL_BYTES

DIAL_TIMEOUT_S = 3.0
SEND_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
PING_EVERY_S = 10.0
"""As long as an answer may take."""
MAX_EVENT_BYTES = MAX_JOURNAL_BYTES
"""A sidecar sends no more at once than it keeps of everything that it sent."""
MAX_EVENTS_READ_AHEAD = 4
"""While its client does not take one; that of a unit has up to 4 s of sound."""


class Unreachable(Exception):
    """Nobody answers at the owner's address."""


class Lost(Exception):
    """The connection has ended. close_code: 1006 if nothing was said."""

    def __init__(self, close_code: int) -> None:
        super().__init__(f"closed with {close_code}")
        self.close_code = close_code


class Upstream:
    """Messages pass whole, as binary ones. Every method raises `Lost`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def receive(self) -> bytes:
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as closed:
            raise Lost(_close_code(closed)) from None

    async def send(self, message: bytes) -> None:
        """An owner that takes nothing for 10 s is lost."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._connection.send(message)
        except ConnectionClosed as closed:
            raise Lost(_close_code(closed)) from None
        except TimeoutError:
            raise Lost(1006) from None

    def cut(self) -> None:
        """End it at once: its owner is no owner any more, or hangs."""
        self._connection.transport.abort()


@contextlib.asynccontextmanager
async def dialled(
    owner: Dial, session: str, token: str, resume_from: int | None
) -> AsyncGenerator[Upstream]:
    """A connection that has not been greeted. Raises `Unreachable`; `Lost`."""
    resume = "" if resume_from is None else "&resume=1"
    try:
        connection = await connect(
            f"ws://{owner.address}/v1/realtime?session={session}{resume}",
            additional_headers={"authorization": f"Bearer {token}"},
            user_agent_header=None,
            compression=None,
            proxy=None,
            open_timeout=DIAL_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=PING_EVERY_S,
            ping_timeout=PING_EVERY_S,
            max_size=MAX_EVENT_BYTES,
            max_queue=MAX_EVENTS_READ_AHEAD,
        )
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as error:
        raise Unreachable(type(error).__name__) from None
    try:
        upstream = Upstream(connection)
        if resume_from is not None:
            await upstream.send(resume_message(resume_from))
        yield upstream
    finally:
        await connection.close()


def _close_code(closed: ConnectionClosed) -> int:
    return 1006 if closed.rcvd is None else closed.rcvd.code
