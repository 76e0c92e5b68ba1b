"""The realtime door at /v1/realtime: one WebSocket, one session, no knowledge of models.

Two tasks run for a socket: one reads messages into
commands, one writes events; whichever ends first ends the other.
"""

import asyncio
import contextlib
import logging

from fastapi import WebSocket, WebSocketDisconnect

from duplex_sidecar.doors.bearer import bearer_token
from duplex_sidecar.doors.first_message import resume_point
from duplex_sidecar.doors.openai_events import render_event
from duplex_sidecar.doors.openai_wire import (
    Resume,
    WireError,
    parse_message,
)
from duplex_sidecar.doors.unread import unread_of
from duplex_sidecar.protocol.errors import ERRORS, ClientError, ErrorCode
from duplex_sidecar.protocol.events import Closed, Failure
from duplex_sidecar.session.port import Attachment, SessionPort

SEND_TIMEOUT_S = 10.0
FAREWELL_TIMEOUT_S = 2.0
"""For the error that tells why a connection is closed; a client that does not read does without."""
MAX_ERRORS_IN_A_ROW = 100
"""A socket that sends nothing but rubbish is closed."""

log = logging.getLogger(__name__)


async def serve_realtime(websocket: WebSocket, sessions: SessionPort, model: str) -> None:
    """Serve one connection to its end. Never raises for what a client does.

    A client may be silent as long as its session allows it; that it has gone without a word is seen
    by the server's pings.
    """
    token, subprotocol = bearer_token(websocket.headers)
    await websocket.accept(subprotocol=subprotocol)
    session = websocket.query_params.get("session", "")
    attachment: Attachment | None = None
    try:
        last_sequence: int | None = None
        if websocket.query_params.get("resume") in ("1", "true"):
            last_sequence = await resume_point(_receive(websocket))
        attachment = await sessions.attach(session, token, last_sequence)
        unread_of(websocket.scope).admit()
        await _converse(websocket, attachment, model)
    except ClientError as error:
        await _refuse(websocket, error, session, model)
    except WebSocketDisconnect:
        pass
    finally:
        if attachment is not None:
            await attachment.detach()


async def _receive(websocket: WebSocket) -> str | bytes:
    """The next message, text or binary. Raises WebSocketDisconnect."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1005)
    text = message.get("text")
    return text if text is not None else message.get("bytes") or b""


async def _converse(websocket: WebSocket, attachment: Attachment, model: str) -> None:
    reader = asyncio.create_task(_read(websocket, attachment))
    writer = asyncio.create_task(_write(websocket, attachment, model))
    try:
        done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (reader, writer):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, WebSocketDisconnect, ClientError):
                await task


async def _read(websocket: WebSocket, attachment: Attachment) -> None:
    errors_in_a_row = 0
    while True:
        raw = await _receive(websocket)
        try:
            command = parse_message(raw, attachment.session)
            if isinstance(command, Resume):
                raise WireError(
                    ErrorCode.OUT_OF_ORDER_EVENT,
                    "session.resume is the first message of a connection with resume=1",
                    command.event_id,
                )
            await attachment.submit(command)
            errors_in_a_row = 0
        except ClientError as error:
            if ERRORS[error.code].close_code is not None:
                raise
            errors_in_a_row += 1
            if errors_in_a_row >= MAX_ERRORS_IN_A_ROW:
                raise ClientError(
                    ErrorCode.INVALID_EVENT, f"{errors_in_a_row} refused events in a row"
                ) from None
            event_id = error.event_id if isinstance(error, WireError) else None
            attachment.refuse(Failure(error.code, error.detail, error.param, event_id))


async def _write(websocket: WebSocket, attachment: Attachment, model: str) -> None:
    try:
        while (event := await attachment.next_event()) is not None:
            await _send(websocket, render_event(event, attachment.session, model))
            if isinstance(event, Closed):
                await websocket.close(ERRORS[event.code].close_code or 1000, event.code)
                return
    except RuntimeError as error:  # starlette: the socket is closed already
        raise WebSocketDisconnect(1006) from error


async def _send(websocket: WebSocket, message: bytes) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await websocket.send_text(message.decode("utf-8"))
    except TimeoutError:
        raise ClientError(ErrorCode.SLOW_CONSUMER) from None


async def _refuse(websocket: WebSocket, error: ClientError, session: str, model: str) -> None:
    log.info("connection refused", extra={"fields": {"code": error.code}})
    event_id = error.event_id if isinstance(error, WireError) else None
    failure = Failure(error.code, error.detail, error.param, event_id)
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await websocket.send_text(render_event(failure, session, model).decode("utf-8"))
        await websocket.close(ERRORS[error.code].close_code or 1008, error.code)
