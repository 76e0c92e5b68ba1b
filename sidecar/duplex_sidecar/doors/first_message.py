"""The first message of a connection with `resume=1`, at the sidecar's door and at the gateway's."""

import asyncio
import contextlib
from collections.abc import Awaitable

from duplex_sidecar.doors.openai_wire import Resume, parse_message
from duplex_sidecar.protocol.commands import Command
from duplex_sidecar.protocol.errors import ClientError, ErrorCode

FIRST_MESSAGE_TIMEOUT_S = 10.0


async def resume_point(received: Awaitable[str | bytes]) -> int:
    """The newest event that the client has seen. received: its first message, which has 10 s to
    come. Raises ClientError when it is no `session.resume`."""
    message: Command | Resume | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            message = parse_message(await received)
    if not isinstance(message, Resume):
        raise ClientError(
            ErrorCode.OUT_OF_ORDER_EVENT, "resume=1 needs session.resume as first message"
        )
    return message.last_received_server_event_seq
