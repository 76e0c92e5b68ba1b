"""`python -m duplex_gateway`: settings from the environment, logs on stderr, until SIGTERM."""

import asyncio
import logging
import os
import ssl
import sys

import msgspec
import uvloop

from duplex_gateway.server import listen, serve_until_signal
from duplex_gateway.settings import settings_from
from duplex_sidecar.ledger.errors import LedgerError
from duplex_sidecar.telemetry.logs import configure_logs

EXIT_USAGE = 2
EXIT_PORT_TAKEN = 4
EXIT_LEDGER = 5


def main() -> int:
    """Returns the exit status."""
    try:
        settings = settings_from(os.environ)
    except (ValueError, msgspec.ValidationError) as error:
        return _complain(EXIT_USAGE, str(error))
    configure_logs(settings.replica, "gateway", logging.getLevelNamesMapping()[settings.log_level])
    try:
        with (
            listen(settings.host, settings.port) as doors,
            listen(settings.health_host, settings.health_port) as health,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(serve_until_signal(settings, doors, health))
    except LedgerError as error:
        return _complain(EXIT_LEDGER, f"ledger: {error.reason}")
    except ssl.SSLError as error:
        return _complain(EXIT_USAGE, f"certificate: {error.reason}")
    except OSError as error:
        return _complain(EXIT_PORT_TAKEN, f"cannot listen: {error.strerror or error}")
    return 0


def _complain(status: int, text: str) -> int:
    print(f"duplex gateway: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
