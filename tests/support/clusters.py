"""The cluster of nodes that tests run on: the recipe's own, or the one of KUBECONFIG.

On its own cluster there is more: images from this machine, its folders, and its loopback ports.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.kube import Json, Kube, until

from scripts import cluster

BASE_IMAGE = "python:3.11-slim"
"""What a cluster elsewhere pulls; on the own cluster a Debian root with the same name."""
BASE_PACKAGES = (
    *("python3", "python3-pip", "python-is-python3", "ca-certificates"),
    *("libnuma1", "libgomp1", "libstdc++6"),
)
"""The last three: what torch and the engine link to."""
GATE = "10.80.0.1"
"""The control plane's address, as pods see it."""
USER_ID = 65532
"""The one of a pool's pods."""
NAMESPACE_LABEL = "duplex.dev/test-namespace"
TIMEOUT_S = 150.0
"""For a pod that starts at once where nobody else wants the machine."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """Parts of a pod: what it mounts."""

    volumes: tuple[Json, ...] = ()
    mounts: tuple[Json, ...] = ()

    def __add__(self, other: "Mounts") -> "Mounts":
        return Mounts((*self.volumes, *other.volumes), (*self.mounts, *other.mounts))


def scratch(path: str, size: str = "64Mi", *, memory: bool = False) -> Mounts:
    """An empty folder of the pod's own, writable."""
    name = path.strip("/").replace("/", "-").lower()
    folder = {"sizeLimit": size, **({"medium": "Memory"} if memory else {})}
    return Mounts(({"name": name, "emptyDir": folder},), ({"name": name, "mountPath": path},))


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of one container that Pod Security `restricted` lets in."""

    name: str
    command: tuple[str, ...]
    mounts: Mounts = Mounts()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    container: Json = field(default_factory=dict[str, object])
    """More of the container: ports, probes, resources."""
    spec: Json = field(default_factory=dict[str, object])
    """More of the pod."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    image: str = BASE_IMAGE

    def manifest(self) -> Json:
        pod_security = {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container_security = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        container = {
            "name": "main",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": list(self.command),
            "env": [{"name": name, "value": value} for name, value in self.environment.items()],
            "volumeMounts": list(self.mounts.mounts),
            "securityContext": container_security,
            **self.container,
        }
        spec = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": pod_security,
            "containers": [container],
            "volumes": list(self.mounts.volumes),
            **self.spec,
        }
        metadata = {"name": self.name, "labels": dict(self.labels)}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class Cluster(Kube):
    """A cluster with nodes."""

    @contextmanager
    def namespace(self, prefix: str = "test", enforce: str = "restricted") -> Generator[str]:
        """At the end its pods are gone, so that the next test has their memory."""
        with super().namespace(prefix, enforce) as name:
            yield name
            arguments = (
                "delete",
                "pods",
                "--all",
                "--grace-period=1",
                f"--timeout={TIMEOUT_S:.0f}s",
            )
            self.kubectl(*arguments, namespace=name, timeout_s=TIMEOUT_S + 10)

    def await_ready(self, pod: str, namespace: str, timeout_s: float = TIMEOUT_S) -> None:
        """Raises AssertionError, with what it printed, when it ends instead."""

        def settled() -> Json | None:
            status: Json = self.get("pod", pod, namespace)["status"]
            conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
            over = status.get("phase") in ("Succeeded", "Failed")
            return status if over or conditions.get("Ready") == "True" else None

        status = until(settled, f"the readiness of pod {pod}", timeout_s, poll_s=1.0)
        assert status["phase"] == "Running", self.logs(pod, namespace)

    def run(self, pod: Pod, namespace: str, timeout_s: float = TIMEOUT_S) -> str:
        """Run a pod to its end. Returns what it printed. Raises AssertionError if it failed."""
        self.create(pod.manifest(), namespace)

        def ended() -> str:
            phase: str = self.get("pod", pod.name, namespace)["status"].get("phase", "")
            return phase if phase in ("Succeeded", "Failed") else ""

        phase = until(ended, f"the end of pod {pod.name}", timeout_s)
        printed = self.logs(pod.name, namespace)
        assert phase == "Succeeded", printed
        return printed


class OwnCluster(Cluster):
    """The recipe's."""

    def __init__(self) -> None:
        binaries = cluster.binaries_folder()
        programs = (binaries / "kubectl", binaries / "helm")
        super().__init__(cluster.own_kubeconfig(), *programs, cluster.state_folder() / "caches")

    # --- images ---

    def load_base_image(self) -> str:
        """Make the base once, kept in the cache; into each node once. Returns its name."""
        archive = base_archive()
        with cluster.alone("images"):
            if not archive.exists():
                archive.parent.mkdir(parents=True, exist_ok=True)
                unfinished = archive.with_suffix(".new")
                include = f"--include={','.join(BASE_PACKAGES)}"
                _image("base", unfinished, "--name", BASE_IMAGE, include)
                unfinished.rename(archive)
            self.load_image(archive)
        return BASE_IMAGE

    def build_image(
        self, name: str, dockerfile: Path, context: Path, arguments: Sequence[str] = ()
    ) -> None:
        """A Dockerfile with `ARG BASE`, `FROM ${BASE}` on the base image; into each node.

        arguments: further build arguments, NAME=VALUE each.
        """
        self.load_base_image()
        base = base_archive()
        archive = images_folder() / f"{name.replace('/', '_').replace(':', '_')}.tar"
        store = images_folder() / "store"
        based = ("--base", base, "--file", dockerfile, "--store", store)
        more = [part for argument in arguments for part in ("--build-arg", argument)]
        with cluster.alone("images"):
            _image("build", name, context, archive, *based, *more)
            self.load_image(archive)

    def load_image(self, archive: Path) -> None:
        """Into each node, unless the very same image is there."""
        loaded = cluster.state_folder() / "images" / content_name(archive)
        if not loaded.exists():
            _image("load", cluster.binaries_folder(), cluster.state_folder(), archive)
            loaded.parent.mkdir(exist_ok=True)
            loaded.touch()

    # --- what a node consists of ---

    def kill_kubelet(self, node: str) -> tuple[str, ...]:
        """At once. Its containers go on. Returns the command that `start_kubelet` wants."""
        pid = (cluster.state_folder() / "pids" / f"{node}-kubelet").read_text().strip()
        command = Path("/proc", pid, "cmdline").read_bytes().decode().rstrip("\0").split("\0")
        os.kill(int(pid), signal.SIGKILL)
        return tuple(command)

    def start_kubelet(self, node: str, command: Sequence[str]) -> None:
        """As the recipe does."""
        script = f'. {cluster.RECIPE}/lib.sh; spawn {node}-ns {node}-kubelet "$@"'
        given = {"state": str(cluster.state_folder()), "bin": str(cluster.binaries_folder())}
        subprocess.run(
            ("bash", "-euc", script, "bash", *command), env={**os.environ, **given}, check=True
        )

    def kill_processes(self, pod_uid: str) -> None:
        """All of a pod's, in every container, as a node's end would. Needs no kubelet."""
        mark = f"pod{pod_uid}"
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "cgroup").read_text():
                    os.kill(int(folder.name), signal.SIGKILL)

    # --- what pods see of this machine ---

    @contextmanager
    def namespace(self, prefix: str = "test", enforce: str = "restricted") -> Generator[str]:
        """Its persistent volumes go with it."""
        with super().namespace(prefix, enforce) as name:
            try:
                yield name
            finally:
                selector = f"--selector={NAMESPACE_LABEL}={name}"
                self.kubectl("delete", "persistentvolumes", selector, "--wait=false")

    def share(self, namespace: str, folders: Mapping[str, Path], *, at: str = "") -> Mounts:
        """Folders of this machine, read-only in pods, through claims.

        folders: by the claim's name. at: where they are mounted; default: at the same paths.
        A pod under `restricted` may use no hostPath, but a claim, whatever the volume behind it is.
        """
        documents: list[Json] = []
        for name, folder in folders.items():
            documents += _volume_and_claim(namespace, name, folder)
        self.apply(documents)
        for name in folders:
            self.wait(f"pvc/{name}", "jsonpath={.status.phase}=Bound", namespace)
        return Mounts(
            tuple(
                {"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}}
                for name in folders
            ),
            tuple(
                {"name": name, "mountPath": at or str(folder), "readOnly": True}
                for name, folder in folders.items()
            ),
        )

    def provide(self, namespace: str, folders: Mapping[str, Path]) -> None:
        """A volume for each claim of that name that somebody is going to make, as a storage class
        would: empty, and writable by the group that a pod names in `fsGroup`.

        folders: of this machine, by the claim's name.
        """
        for folder in folders.values():
            os.chown(folder, 0, USER_ID)
            folder.chmod(0o2775)
        self.apply([_provided_volume(namespace, name, folder) for name, folder in folders.items()])

    @contextmanager
    def forward(self, port: int, folder: Path) -> Generator[str]:
        """Carry 127.0.0.1:port of this machine into the cluster. Yields the address for pods.

        folder: for one small file. The carrier ends with this context.
        """
        port_file = folder / f"forward-{port}"
        init = (cluster.state_folder() / "pids" / "init").read_text().strip()
        command = (
            *("setpriv", "--pdeathsig", "KILL", "nsenter", "-t", init, "-n", sys.executable),
            *(cluster.RECIPE / "forward.py", f"{GATE}:0", str(os.getpid())),
            *(f"127.0.0.1:{port}", port_file),
        )
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            try:
                until(port_file.exists, f"the forward of port {port}", poll_s=0.02)
                yield f"{GATE}:{port_file.read_text()}"
            finally:
                process.kill()
        port_file.unlink()


def images_folder() -> Path:
    return cluster.cache_folder() / "images"


def base_archive() -> Path:
    """Named after what is in it."""
    key = hashlib.sha256(" ".join(BASE_PACKAGES).encode()).hexdigest()[:12]
    return images_folder() / f"base-{key}.tar"


def content_name(archive: Path) -> str:
    """Equal for equal names and layers, whenever they were written."""
    with tarfile.open(archive) as opened:
        manifest = opened.extractfile("manifest.json")
        assert manifest is not None
        return hashlib.sha256(manifest.read()).hexdigest()


def python_folders() -> dict[str, Path]:
    """The checkout with its virtual environment, and the interpreter that this came from."""
    interpreter = Path(sys.executable).resolve().parent.parent
    return {"checkout": cluster.ROOT, "interpreter": interpreter}


@contextmanager
def running_cluster() -> Generator[Cluster]:
    """One that was up before the tests stays up; else the last that uses it ends it.

    Raises ClusterError.
    """
    foreign = cluster.foreign_kubeconfig()
    if foreign is not None:
        yield Cluster(foreign, _program("kubectl"), _program("helm"))
        return
    cluster.cache_folder().mkdir(parents=True, exist_ok=True)
    started_by_tests = cluster.state_folder() / "started-by-tests"
    with (cluster.cache_folder() / ".users.lock").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        if not cluster.is_up():
            cluster.up()
            started_by_tests.touch()
        try:
            own = OwnCluster()
            own.load_base_image()
            yield own
        finally:
            if started_by_tests.exists() and _is_last(users.fileno()):
                cluster.down()


def _is_last(users: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _program(name: str) -> Path:
    built = cluster.binaries_folder() / name
    found = shutil.which(name)
    if not found and not built.exists():
        raise cluster.ClusterError(f"{name} is needed, on PATH or by `make cluster-up`")
    return Path(found or built)


def _image(*arguments: str | Path) -> None:
    command = (sys.executable, cluster.RECIPE / "image.py", *arguments)
    cluster.run_telling(command, f"image {arguments[0]}", quiet=True)


def _provided_volume(namespace: str, claim: str, folder: Path) -> Json:
    """For one claim, of whatever size and mode."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}", "labels": {NAMESPACE_LABEL: namespace}},
        "spec": {
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "storageClassName": "",
            "capacity": {"storage": "100Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder), "type": "Directory"},
            "claimRef": {"namespace": namespace, "name": claim},
        },
    }


def _volume_and_claim(namespace: str, name: str, folder: Path) -> tuple[Json, Json]:
    volume_name = f"{namespace}-{name}"
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(folder), "type": "Directory"},
        "claimRef": {"namespace": namespace, "name": name},
    }
    claim = {
        **common,
        "resources": {"requests": {"storage": "1Gi"}},
        "volumeName": volume_name,
    }
    labels = {NAMESPACE_LABEL: namespace}
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume_name, "labels": labels},
            "spec": volume,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": claim,
        },
    )
