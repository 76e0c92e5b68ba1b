"""One address for clients of several sidecars, as a gateway's or a Service's: calls go to the one
that serves now, and wait while none does."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Self

_READ_BYTES = 256 * 1024


class OneAddress:
    """Use as `async with`. Passes bytes on both ways until either side ends; then so does the
    other."""

    def __init__(self, port: int) -> None:
        """port: of the sidecar that serves first."""
        self._target = port
        self._serves = asyncio.Event()
        self._serves.set()
        self._calls: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    @property
    def realtime_url(self) -> str:
        """What the `openai` SDK takes as base URL."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def hold(self) -> None:
        """New calls wait from now on."""
        self._serves.clear()

    def lead_to(self, port: int) -> None:
        """Calls that wait, and new ones, go there from now on."""
        self._target = port
        self._serves.set()

    async def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            await self._serves.wait()
            far, far_out = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await _either(_pass_on(near, far_out), _pass_on(far, near_out))
            finally:
                far_out.transport.abort()
        except OSError:
            pass  # it is gone: so is the caller's connection
        finally:
            near_out.close()  # what is on its way arrives
            self._calls.discard(call)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_READ_BYTES):
        sink.write(data)
        await sink.drain()


async def _either(*ways: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
