"""The main function that all stage processes share.

    python -m duplex_sidecar.stages.<stage>.process --socket PATH --config JSONFILE

A stage loads its model, runs it once and only then serves at the socket: whoever can connect talks
to a warm stage. It ends with status 0 on SIGTERM or when its stdin is closed, and with
EXIT_FAILED, at once and with all its children, when what it serves is broken beyond one session.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from duplex_sidecar.stages.envelope import Request
from duplex_sidecar.stages.family import (
    die_with_parent,
    kill_own_group,
    mark_children,
    on_stdin_end,
)
from duplex_sidecar.stages.rpc import serve_calls

EXIT_FAILED = 70
"""Status of a stage that cannot load or whose engine died: the last log line says why."""

_CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class StageService(Protocol):
    """What a stage process serves."""

    async def handle(self, request: Request) -> msgspec.Struct:
        """Answer one request. Raises StageError for what concerns one session."""
        ...

    async def failed(self) -> str:
        """Returns the reason once the whole stage is lost; waits for ever while it is well."""
        ...

    async def close(self) -> None:
        """Release models and children."""
        ...


Load = Callable[[bytes], Awaitable[StageService]]
"""Gets the bytes of the config file, loads the model, runs it once. In the main thread; may block
it."""


def run_stage_process(stage: str, load: Load) -> None:
    """Parse the command line, serve until told to leave, exit the process."""
    die_with_parent()
    mark_children()
    parser = argparse.ArgumentParser(description=f"Serves the {stage} stage of one sidecar.")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to serve at")
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the settings")
    arguments = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    config: bytes = arguments.config.read_bytes()
    arguments.socket.unlink(missing_ok=True)
    status = asyncio.run(_serve(stage, load, arguments.socket, config))
    # Without the interpreter's own ending: it takes seconds to take the libraries apart, and what
    # is left of a broken engine may block it.
    logging.shutdown()
    os._exit(status)


async def _serve(stage: str, load: Load, socket: Path, config: bytes) -> int:
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    # While the model loads, the loop does not run: then the sidecar's end is fatal at once.
    serving = False

    def on_sidecar_gone() -> None:
        if serving:
            loop.call_soon_threadsafe(leave.set)
        else:
            kill_own_group()

    on_stdin_end(on_sidecar_gone)
    try:
        service = await load(config)
    except Exception as error:
        logger.exception("%s cannot start: %s", stage, error)
        return EXIT_FAILED
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        # After loading, because libraries set their own handlers while they load.
        loop.add_signal_handler(signal_number, leave.set)
    server = await serve_calls(socket, stage, service.handle)
    serving = True
    logger.info("%s serves", stage)
    reason = await _first_of(leave, service)
    if reason is not None:
        logger.error("%s is lost: %s", stage, reason)
        return EXIT_FAILED
    server.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await service.close()
    return 0


async def _first_of(leave: asyncio.Event, service: StageService) -> str | None:
    """None when asked to leave, else the reason why the stage is lost."""
    leaving = asyncio.create_task(leave.wait())
    failing = asyncio.create_task(service.failed())
    await asyncio.wait((leaving, failing), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if failing.done():
        return failing.result()
    failing.cancel()
    return None
