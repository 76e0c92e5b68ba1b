"""Calls over a Unix socket between the sidecar and one stage process.

A frame is a 4-byte little-endian length and a msgpack body: `Call {id, request}` one way,
`Reply {id, result | fault}` the other. Calls are concurrent; replies come in any order.
"""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from duplex_sidecar.stages.envelope import Request
from duplex_sidecar.stages.errors import StageError, StageFault

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A whole 8,000-position prompt at 4,096 bf16 is 64 MiB; anything above this is a broken peer."""

_T = TypeVar("_T")


class Call(msgspec.Struct, frozen=True):
    id: int
    request: Request


class Reply(msgspec.Struct, frozen=True):
    id: int
    result: msgspec.Raw
    fault: StageFault | None
    reason: str


_encoder = msgspec.msgpack.Encoder()
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode

Handler = Callable[[Request], Awaitable[msgspec.Struct]]


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"frame of {size} bytes")
    return await reader.readexactly(size)


def _write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(_LENGTH.pack(len(body)))
    writer.write(body)


async def serve_calls(path: Path, stage: str, handler: Handler) -> asyncio.Server:
    """Serve `handler` at a Unix socket. A StageError becomes a fault reply; any other exception an
    `internal` fault of that one call: the process lives on."""

    async def answer(call: Call, writer: asyncio.StreamWriter) -> None:
        fault: StageFault | None = None
        reason = ""
        result = msgspec.Raw(b"\xc0")
        try:
            result = msgspec.Raw(_encoder.encode(await handler(call.request)))
        except StageError as error:
            fault, reason = error.fault, error.reason
        except Exception as error:
            fault, reason = StageFault.INTERNAL, f"{type(error).__name__}: {error}"
        with contextlib.suppress(ConnectionError):
            _write_frame(writer, _encoder.encode(Reply(call.id, result, fault, reason)))
            await writer.drain()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                call = _decode_call(await _read_frame(reader))
                task = asyncio.create_task(answer(call, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            pass
        except asyncio.CancelledError:
            # Only the end of the process cancels this task, which streams before Python 3.12 would
            # report as an error of its own.
            pass
        finally:
            for task in tasks:
                task.cancel()
            writer.close()

    return await asyncio.start_unix_server(connection, path=str(path), limit=2**20)


class RpcClient:
    """The sidecar's end of one connection to one stage process."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next_id = 0
        self._reader_task: asyncio.Task[None] | None = None

    async def connect(self, path: Path) -> None:
        reader, self._writer = await asyncio.open_unix_connection(str(path), limit=2**20)
        self._reader_task = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply = _decode_reply(await _read_frame(reader))
                future = self._waiting.pop(reply.id, None)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            pass
        finally:
            self._fail_all("connection lost")

    def _fail_all(self, reason: str) -> None:
        """Nothing can be called any more: let go of the socket and fail what is waiting."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(StageError(self._stage, StageFault.GONE, reason))

    async def call(self, request: Request, answer: type[_T], timeout_s: float) -> _T:
        """One call. Raises StageError: gone, timeout, or what the stage replied."""
        writer = self._writer
        if writer is None:
            raise StageError(self._stage, StageFault.GONE, "not connected")
        self._next_id += 1
        call_id = self._next_id
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                _write_frame(writer, _encoder.encode(Call(call_id, request)))
                await writer.drain()
                reply = await future
        except TimeoutError:
            raise StageError(
                self._stage, StageFault.TIMEOUT, f"no answer in {timeout_s} s"
            ) from None
        except ConnectionError as error:
            raise StageError(self._stage, StageFault.GONE, str(error)) from None
        finally:
            self._waiting.pop(call_id, None)
        if reply.fault is not None:
            raise StageError(self._stage, reply.fault, reply.reason)
        return msgspec.msgpack.decode(reply.result, type=answer)

    async def close(self) -> None:
        if self._reader_task is not None:
            self._reader_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader_task
        self._fail_all("closed")
