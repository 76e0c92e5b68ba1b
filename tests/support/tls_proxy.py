"""TLS in front of a server on a Unix socket: what a managed Redis shows to its clients."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"


class TlsProxy:
    """Ends the TLS of its clients. upstream: unix:// address of the server."""

    def __init__(self, upstream: str, certificate: Path, key: Path) -> None:
        self._upstream = upstream.removeprefix("unix://")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0
        """Whose handshake was done."""
        self.port = 0

    def url(self, ca: Path) -> str:
        return f"rediss://{HOST}:{self.port}/0?ssl_ca_certs={ca}"

    async def __aenter__(self) -> "TlsProxy":
        self._server = await asyncio.start_server(self._serve, HOST, 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """All connections of now break."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._upstream)
        both = {writer, upstream_writer}
        self._writers |= both
        try:
            with suppress(OSError):
                await asyncio.wait(
                    {
                        asyncio.create_task(_pass_on(reader, upstream_writer)),
                        asyncio.create_task(_pass_on(upstream_reader, writer)),
                    }
                )
        finally:
            self._writers -= both
            self._tasks.discard(task)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    sink.close()
