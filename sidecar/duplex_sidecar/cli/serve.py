"""`duplex serve`: the stand-alone sidecar, without Kubernetes."""

import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from duplex_api.ledger_address import without_login
from duplex_sidecar.app import create_apps
from duplex_sidecar.checkpoint.errors import CheckpointError
from duplex_sidecar.cli.inputs import (
    AtLeastOne,
    CheckpointPath,
    InputFile,
    LedgerUrl,
    OutputPath,
    Port,
    os_error_text,
)
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint, own_command
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
    checkpoint: CheckpointPath | None = None,
    *,
    config: InputFile | None = None,
    redis_url: LedgerUrl | None = None,
    host: str = "127.0.0.1",
    port: Port = 8765,
    device: Device = Device.CPU,
    slots: AtLeastOne = 4,
    otlp_endpoint: str | None = None,
    contract_tape: OutputPath | None = None,
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
    _leave_on_signals()
    with ExitStack() as own:
        try:
            if from_environment:
                return run_sidecar(_from_environment(own))
            if config is not None:
                return run_sidecar(_from_file(config))
            cache_dir = default_cache_dir().absolute()
            valkey = EmbeddedValkey(cache_dir / "ledger") if redis_url is None else None
            settings = SidecarSettings(
                checkpoint=str((checkpoint or default_checkpoint()).absolute()),
                redis_url=redis_url or (valkey.url if valkey else ""),
                runtime_dir=str(own.enter_context(_own_folder())),
                cache_dir=str(cache_dir),
                host=host,
                port=port,
                device=device,
                slots=slots,
                admin_token=secrets.token_urlsafe(32),
                otlp_endpoint=otlp_endpoint,
                contract_tape_dir="" if contract_tape is None else str(contract_tape.absolute()),
            )
        except OSError as error:
            return _complain(EXIT_USAGE, os_error_text(error))
        except (ValueError, msgspec.MsgspecError) as error:
            return _complain(EXIT_USAGE, str(error))
        return run_sidecar(settings, valkey, tell=True)


def run_sidecar(
    settings: SidecarSettings, valkey: EmbeddedValkey | None = None, *, tell: bool = False
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status.

    valkey: its ledger, started once everything else is known to be right. It goes on after this
    process, but not after a start that failed. tell: print the address, and write the admin token
    into a file.
    """
    configure_logs(settings.replica, "sidecar")
    _leave_on_signals()  # `Serving` takes these over when its loop runs.
    failures: list[BaseException] = []
    with ExitStack() as stack, ExitStack() as unless_served:
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
            told = _address(settings, listeners[0]) if tell else ""
        except CheckpointError as error:
            here = Path(settings.checkpoint)
            command = f"{own_command()} checkpoint make {'PATH' if here.exists() else here}"
            return _complain(EXIT_CHECKPOINT, f"{error}\nmake one with: {command}")
        except (OSError, ValueError) as error:
            return _complain(EXIT_USAGE, f"runtime folder or admin token: {error}")
        try:
            if valkey is not None:
                if not valkey.running:
                    unless_served.callback(valkey.stop)
                valkey.start()
        except (OSError, EmbeddedError) as error:
            return _complain(EXIT_LEDGER, f"{error}; name a server with --redis-url")
        if told:
            print(told, flush=True)
        serving.run()
        if not failures:
            unless_served.pop_all()
    return _complain(EXIT_START, _start_failure(failures[0])) if failures else 0


def _leave_on_signals() -> None:
    """What is open is closed on the way out."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


@contextmanager
def _own_folder() -> Generator[Path]:
    """For sockets, logs and the admin token; of this user alone, and gone with this process."""
    with tempfile.TemporaryDirectory(prefix="duplex-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _from_file(config: Path) -> SidecarSettings:
    """Raises OSError, and ValueError that names the file."""
    data = config.read_bytes()
    try:
        return msgspec.json.decode(data, type=SidecarSettings)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{config}: {error}") from None


def _from_environment(own: ExitStack) -> SidecarSettings:
    """Raises ValueError and msgspec.ValidationError."""
    named = os.environ.get("DUPLEX_RUNTIME_DIR", "")
    defaults = {
        "runtime_dir": named or str(own.enter_context(_own_folder())),
        "cache_dir": str(default_cache_dir().absolute()),
    }
    return settings_from_environment(os.environ, defaults)


def _address(settings: SidecarSettings, listener: socket.socket) -> str:
    token_file = Path(settings.runtime_dir) / "admin-token"
    token_file.touch(mode=0o600)
    token_file.write_text(settings.admin_token)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    port = listener.getsockname()[1]
    ledger = without_login(settings.redis_url)
    return f"http://{host}:{port}   admin token: {token_file}   ledger: {ledger}"


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
