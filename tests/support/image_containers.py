"""Containers of a built image as a node would run a pool's pod, by runc alone: no cluster, in whose
nodes an image of this size would lie in memory.

What holds for the pod holds here: its command, environment, user and mounts, a root that is
read-only, no capability, no new privileges, a filter of system calls, its limit of memory. The
network is the machine's.
"""

import json
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
from support.kube import Json

from scripts.images import buildah

SYSTEM_CALLS = Path("/usr/share/containers/seccomp.json")
"""What containers may call where nobody says otherwise; comes with buildah."""
STOP_TIMEOUT_S = 60.0
_MEMORY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_START = """\
container=$1 bundle=$2 state=$3 name=$4
shift 4
trap '"$@" umount "$container" >/dev/null; "$@" rm "$container" >/dev/null' EXIT
mount --bind "$("$@" mount "$container")" "$bundle/rootfs"
runc --root "$state" run --bundle "$bundle" "$name"
"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a cluster would bring. folders: of this machine, by the name of a volume that is no
    emptyDir. variables: over those of the pod, also in place of what it takes from elsewhere."""

    folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True)
class Container:
    """Started. Of its processes the first one is the pod's command."""

    name: str
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Empty before it runs and after it has ended."""
        done = subprocess.run(
            (*_runc(self.folder), "state", self.name), capture_output=True, text=True, check=False
        )
        pid: int = json.loads(done.stdout)["pid"] if done.returncode == 0 else 0
        if not pid:
            return []
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]

    def await_end(self, timeout_s: float) -> int:
        """The exit status of its command."""
        return self.process.wait(timeout=timeout_s)

    def stop(self) -> int:
        """As a kubelet does: SIGTERM, and the exit status. Raises TimeoutExpired."""
        subprocess.run((*_runc(self.folder), "kill", self.name, "TERM"), check=True)
        return self.await_end(STOP_TIMEOUT_S)


@contextmanager
def running_container(
    tag: str, pod: Json, folder: Path, surroundings: Surroundings
) -> Generator[Container]:
    """The first container of a pod's spec, from an image in the store of `scripts.images`. Gone at
    the end. folder: new; what the container writes is below it."""
    name = f"duplex-{folder.name}-{time.time_ns()}"
    bundle = folder / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost {_HOSTNAME}\n")
    config = _oci_config(image_config(tag), pod, folder, surroundings)
    (bundle / "config.json").write_text(json.dumps(config))
    container = _buildah("from", "--pull-never", tag)
    script = ("sh", "-euc", _START, "sh", container, bundle, folder / "state", name)
    # Its first words make a mount namespace; in this one the rest has to see the mounts.
    command = ("unshare", "--mount", *script, *buildah()[2:])
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            yield Container(name, folder, process)
        finally:
            subprocess.run(
                (*_runc(folder), "delete", "--force", name), capture_output=True, check=False
            )
            process.wait(timeout=STOP_TIMEOUT_S)
            shutil.rmtree(bundle)


def image_config(tag: str) -> Json:
    """What the Dockerfile says of containers: Env, User, Cmd, ..."""
    return json.loads(_buildah("inspect", "--type", "image", tag))["OCIv1"]["config"]


_HOSTNAME = "demo-abc234"


def _buildah(*arguments: str) -> str:
    command = (*buildah(), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _runc(folder: Path) -> tuple[str | Path, ...]:
    return ("runc", "--root", folder / "state")


def _oci_config(image: Json, pod: Json, folder: Path, surroundings: Surroundings) -> Json:
    container: Json = pod["containers"][0]
    security: Json = {**pod["securityContext"], **container["securityContext"]}
    assert security["runAsNonRoot"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    no_rights: dict[str, list[str]] = {
        kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
    }
    return {
        "ociVersion": "1.0.2",
        "hostname": _HOSTNAME,
        "process": {
            "user": {"uid": security["runAsUser"], "gid": security["runAsGroup"]},
            "args": container.get("command") or image["Cmd"],
            "cwd": image.get("WorkingDir") or "/",
            "env": [
                f"{name}={value}"
                for name, value in _environment(image, container, surroundings).items()
            ],
            "capabilities": no_rights,
            "noNewPrivileges": not security["allowPrivilegeEscalation"],
        },
        "root": {"path": "rootfs", "readonly": security["readOnlyRootFilesystem"]},
        "mounts": [*_own_mounts(folder), *_pod_mounts(pod, container, folder, surroundings)],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "resources": _limits(container),
            "seccomp": _system_calls(),
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
        },
    }


def _environment(image: Json, container: Json, surroundings: Surroundings) -> dict[str, str]:
    """The image's, the pod's over it, with $(NAME) as a kubelet puts it in."""
    found = dict(cast(str, each).split("=", 1) for each in image.get("Env") or ())
    for each in container.get("env") or ():
        name: str = each["name"]
        if name in surroundings.variables:
            found[name] = surroundings.variables[name]
        else:
            found[name] = re.sub(r"\$\((\w+)\)", lambda named: found[named[1]], each["value"])
    return found | dict(surroundings.variables)


def _own_mounts(folder: Path) -> list[Json]:
    """What every container has."""
    quiet = ["nosuid", "noexec", "nodev"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*quiet, "ro"]},
        {
            "destination": "/etc/hosts",
            "type": "bind",
            "source": str(folder / "hosts"),
            "options": ["bind", "ro"],
        },
    ]


def _pod_mounts(pod: Json, container: Json, folder: Path, surroundings: Surroundings) -> list[Json]:
    volumes: dict[str, Json] = {each["name"]: each for each in pod.get("volumes") or ()}
    found: list[Json] = []
    for mount in container.get("volumeMounts") or ():
        name: str = mount["name"]
        source = volumes[name].get("emptyDir")
        if source is not None and source.get("medium") == "Memory":
            options = ["nosuid", "nodev", "mode=1777", f"size={_bytes(source['sizeLimit'])}"]
            what: Json = {"type": "tmpfs", "source": "tmpfs", "options": options}
        else:
            mode = "ro" if mount.get("readOnly") else "rw"
            place = surroundings.folders.get(name) or _empty_folder(folder / "volumes" / name)
            what = {"type": "bind", "source": str(place), "options": ["rbind", mode]}
        found.append({"destination": mount["mountPath"], **what})
    # The order of a pod's mounts says nothing.
    return sorted(found, key=lambda mount: mount["destination"])


def _empty_folder(folder: Path) -> Path:
    """As a kubelet makes it: for everybody."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return folder


def _limits(container: Json) -> Json:
    limits: Json = container["resources"].get("limits") or {}
    return {"memory": {"limit": _bytes(limits["memory"])}} if "memory" in limits else {}


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _MEMORY_UNITS[quantity[-2:]]


def _system_calls() -> Json:
    """The usual filter, for a container without capabilities."""
    profile: Json = json.loads(SYSTEM_CALLS.read_text())
    rules: list[Any] = profile["syscalls"]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [_ARCHITECTURES[platform.machine()]],
        "syscalls": [
            {name: rule[name] for name in ("names", "action", "args", "errnoRet") if rule.get(name)}
            for rule in rules
            if not rule["includes"].get("caps")
            and machine in rule["includes"].get("arches", [machine])
        ],
    }
