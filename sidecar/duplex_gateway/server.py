"""Two HTTP servers in one process: the clients' one, perhaps with TLS, and the health port."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from fastapi import FastAPI

from duplex_gateway.app import Gateway, create_app, create_health_app
from duplex_gateway.settings import GatewaySettings
from duplex_gateway.tls import Certificate
from duplex_sidecar.doors.http import DoorHttp
from duplex_sidecar.doors.openai_wire import MAX_MESSAGE_BYTES
from duplex_sidecar.doors.websocket import DoorWebSocket

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """Signals are the process's own business: calls are ended in good order first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    settings: GatewaySettings, doors: socket.socket, health: socket.socket, stop: asyncio.Event
) -> None:
    """Serve on these listening sockets until `stop` is set, then end the calls and return. Raises
    LedgerUnsuitable; OSError and ssl.SSLError for a certificate that cannot be read."""
    gateway = Gateway(settings)
    client_side = _Server(_client_config(settings, create_app(gateway)))
    health_side = _Server(
        uvicorn.Config(
            create_health_app(gateway),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=DoorHttp,
        )
    )
    client_side.config.load()
    background: list[asyncio.Task[None]] = []
    if client_side.config.ssl is not None:
        certificate = Certificate(settings.tls_cert_file, settings.tls_key_file)
        background.append(asyncio.create_task(certificate.follow(client_side.config.ssl)))
    starting = asyncio.create_task(gateway.start())
    stopping = asyncio.create_task(stop.wait())
    servers = [
        asyncio.create_task(client_side.serve([doors])),
        asyncio.create_task(health_side.serve([health])),
    ]
    try:
        await asyncio.wait({starting, stopping, *servers}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await starting
            await asyncio.wait({stopping, *servers}, return_when=asyncio.FIRST_COMPLETED)
        await gateway.drain()
    finally:
        client_side.should_exit = health_side.should_exit = True
        others: list[asyncio.Task[Any]] = [starting, stopping, *background]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, *servers, return_exceptions=True)
        await gateway.stop()


def _client_config(settings: GatewaySettings, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=DoorHttp,
        ws=DoorWebSocket,
        ws_max_size=MAX_MESSAGE_BYTES + 1024,
        ws_per_message_deflate=False,
        proxy_headers=bool(settings.forwarded_allow_ips),
        forwarded_allow_ips=settings.forwarded_allow_ips or None,
        ssl_certfile=settings.tls_cert_file or None,
        ssl_keyfile=settings.tls_key_file or None,
        limit_concurrency=2 * settings.max_calls + 64,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


async def serve_until_signal(
    settings: GatewaySettings, doors: socket.socket, health: socket.socket
) -> None:
    """As `serve`, until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, doors, health, stop)
