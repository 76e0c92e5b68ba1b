"""`duplex serve`: the stand-alone sidecar, without Kubernetes."""

import os
import secrets
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import msgspec

from duplex_api.ledger_address import without_login
from duplex_sidecar.app import create_apps
from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from duplex_sidecar.cli.serving import Serving
from duplex_sidecar.ledger.embedded import EmbeddedError, EmbeddedValkey
from duplex_sidecar.settings import SidecarSettings, settings_from_environment
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.supervisor import StageStartError
from duplex_sidecar.telemetry.logs import configure_logs

EXIT_USAGE = 2
EXIT_CHECKPOINT = 3
EXIT_PORT_TAKEN = 4
EXIT_LEDGER = 5
EXIT_START = 6
"""A stage does not start, or the ledger is of a wrong kind."""


def serve(
    checkpoint: Path | None = None,
    *,
    config: Path | None = None,
    redis_url: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    device: Device = Device.CPU,
    slots: int = 4,
    otlp_endpoint: str | None = None,
    contract_tape: Path | None = None,
    from_environment: bool = False,
) -> int:
    """Serve sessions on one machine. Prints the address and where the admin token lies.

    Parameters
    ----------
    checkpoint
        Checkpoint folder. Default: the tiny one (`duplex checkpoint make`).
    config
        JSON file with all settings; the other options are not looked at then.
    redis_url
        Redis or Valkey, for example redis://host:6379/0. Default: an embedded Valkey.
    host
        Address to listen on.
    port
        Port to listen on.
    device
        cpu or cuda.
    slots
        Live sessions at once.
    otlp_endpoint
        Base URL of an OTLP/HTTP collector.
    contract_tape
        Folder for tapes of all sessions, for `duplex contract record`. They hold content.
    from_environment
        All settings come from variables `DUPLEX_<SETTING>`; no other option is looked at.
    """
    try:
        if from_environment:
            settings = settings_from_environment(os.environ, _environment_defaults())
        elif config is not None:
            settings = msgspec.json.decode(config.read_bytes(), type=SidecarSettings)
        else:
            settings = _settings(
                checkpoint, redis_url, host, port, device, slots, otlp_endpoint, contract_tape
            )
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return _complain(EXIT_USAGE, str(error))
    except EmbeddedError as error:
        return _complain(EXIT_LEDGER, f"{error}; name a server with --redis-url")
    return run_sidecar(settings)


def run_sidecar(settings: SidecarSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    configure_logs(settings.replica, "sidecar")
    # `Serving` takes these over when its loop runs.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    failures: list[BaseException] = []
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        for port in (settings.port, settings.admin_port):
            if port == 0 and listeners:
                continue
            try:
                listeners.append(stack.enter_context(_listen(settings.listen_host, port)))
            except OSError as error:
                reason = error.strerror or str(error)
                return _complain(
                    EXIT_PORT_TAKEN, f"cannot listen on {settings.listen_host}:{port}: {reason}"
                )

        def give_up(error: BaseException) -> None:
            failures.append(error)
            serving.give_up()

        try:
            serving = Serving(settings, create_apps(settings, give_up), listeners)
        except CheckpointError as error:
            return _complain(
                EXIT_CHECKPOINT, f"{error}\nmake one with: duplex checkpoint make PATH"
            )
        except (OSError, ValueError) as error:
            return _complain(EXIT_USAGE, f"runtime folder or admin token: {error}")
        serving.run()
    return _complain(EXIT_START, _start_failure(failures[0])) if failures else 0


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _settings(
    checkpoint: Path | None,
    redis_url: str | None,
    host: str,
    port: int,
    device: Device,
    slots: int,
    otlp_endpoint: str | None,
    contract_tape: Path | None,
) -> SidecarSettings:
    cache_dir = default_cache_dir()
    cache_dir.mkdir(parents=True, exist_ok=True)
    if redis_url is None:
        valkey = EmbeddedValkey(cache_dir / "ledger")
        valkey.start()
        redis_url = valkey.url
    runtime_dir = Path(tempfile.mkdtemp(prefix="duplex-"))
    token = secrets.token_urlsafe(32)
    token_file = runtime_dir / "admin-token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    ledger = without_login(redis_url)
    print(f"http://{host}:{port}   admin token: {token_file}   ledger: {ledger}", flush=True)
    return SidecarSettings(
        checkpoint=str((checkpoint or default_checkpoint()).absolute()),
        redis_url=redis_url,
        runtime_dir=str(runtime_dir),
        cache_dir=str(cache_dir.absolute()),
        host=host,
        port=port,
        device=device,
        slots=slots,
        admin_token=token,
        otlp_endpoint=otlp_endpoint,
        contract_tape_dir="" if contract_tape is None else str(contract_tape.absolute()),
    )


def _environment_defaults() -> dict[str, str]:
    own_folder = "" if os.environ.get("DUPLEX_RUNTIME_DIR") else tempfile.mkdtemp(prefix="duplex-")
    return {
        "runtime_dir": own_folder,
        "cache_dir": str(default_cache_dir().absolute()),
    }


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _start_failure(error: BaseException) -> str:
    tail = error.log_tail if isinstance(error, StageStartError) else ()
    return "\n".join((str(error), *tail))


def _complain(status: int, text: str) -> int:
    print(f"duplex serve: {text}", file=sys.stderr)
    return status
