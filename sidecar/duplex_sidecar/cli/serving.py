"""Runs the sidecar's servers in one loop, until a signal, and ends them in good order.

SIGTERM empties the replica first: sessions park at the end of their turn, or when the grace is
over, and the doors stay open until then. SIGINT does the same without grace; a second signal waits
for nobody.
"""

import asyncio
import gc
import signal
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import uvicorn
from fastapi import FastAPI

from duplex_sidecar.app import SidecarApps
from duplex_sidecar.doors.http import DoorHttp
from duplex_sidecar.doors.openai_wire import MAX_MESSAGE_BYTES
from duplex_sidecar.doors.websocket import DoorWebSocket
from duplex_sidecar.settings import SidecarSettings

GRACEFUL_SHUTDOWN_S = 10
LOOK_AT_CERTIFICATE_S = 5.0


class _Server(uvicorn.Server):
    """Signals are the business of `Serving`: two servers would take them from each other."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Serving:
    def __init__(
        self, settings: SidecarSettings, apps: SidecarApps, listeners: list[socket.socket]
    ) -> None:
        """listeners: of the door and, where there is one, of the admin port."""
        self._settings = settings
        self._sidecar = apps.sidecar
        self._listeners = listeners
        self._servers = [_Server(_config(apps.public, "on"))]
        if apps.admin is not None:
            self._servers.append(_Server(_config(apps.admin, "off", settings)))
        self._leaving: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Until a signal, or `give_up`."""
        # What is imported lives as long as the process. Looking through all of it again in each
        # full collection would hold up every session.
        gc.collect()
        gc.freeze()
        factory = self._servers[0].config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._run())

    def give_up(self) -> None:
        """It will never serve."""
        self._exit()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave, self._settings.drain_grace_s)
        loop.add_signal_handler(signal.SIGINT, self._leave, 0.0)
        certificate = asyncio.create_task(self._renew_certificate())
        try:
            await asyncio.gather(
                *(
                    self._serve(server, listener)
                    for server, listener in zip(self._servers, self._listeners, strict=True)
                )
            )
        finally:
            certificate.cancel()
            await asyncio.gather(certificate, return_exceptions=True)

    async def _serve(self, server: _Server, listener: socket.socket) -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            self._exit()  # one does not go on without the other

    def _leave(self, grace_s: float) -> None:
        if self._leaving is not None:
            self._exit()
            return
        self._leaving = asyncio.create_task(self._drain(grace_s))

    async def _drain(self, grace_s: float) -> None:
        try:
            await self._sidecar.drain(grace_s)
        finally:
            self._exit()

    def _exit(self) -> None:
        self._sidecar.feed.close()
        for server in self._servers:
            server.should_exit = True

    async def _renew_certificate(self) -> None:
        """New connections get the certificate that lies in the files now."""
        files = [self._settings.tls_cert_file, self._settings.tls_key_file]
        if not all(files):
            return
        seen = _states(files)
        while True:
            await asyncio.sleep(LOOK_AT_CERTIFICATE_S)
            if (now := _states(files)) != seen and now:
                context = self._servers[-1].config.ssl
                assert context is not None
                if _load(context, *files):
                    seen = now


def _states(files: list[str]) -> list[tuple[int, int]]:
    """Empty while they cannot be looked at: a mounted Secret is swapped under them."""
    try:
        found = [Path(file).stat() for file in files]
    except OSError:
        return []
    return [(each.st_ino, each.st_mtime_ns) for each in found]


def _load(context: ssl.SSLContext, cert_file: str, key_file: str) -> bool:
    """False: certificate and key do not fit (yet); the old ones stay."""
    try:
        context.load_cert_chain(cert_file, key_file)
    except (OSError, ssl.SSLError):
        return False
    return True


def _config(
    app: FastAPI, lifespan: Literal["on", "off"], tls: SidecarSettings | None = None
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan=lifespan,
        http=DoorHttp,
        ws=DoorWebSocket,
        ws_max_size=MAX_MESSAGE_BYTES + 1024,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        ssl_certfile=(tls.tls_cert_file or None) if tls else None,
        ssl_keyfile=(tls.tls_key_file or None) if tls else None,
    )
