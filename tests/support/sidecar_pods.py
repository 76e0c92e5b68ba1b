"""Real sidecars in pods, from this machine's virtual environment instead of an image of 6 GB.

The image is the base and two small programs, `duplex` and `python`, that run what is in the
checkout. A pool's pod starts from it as from the real one; the rest is mounted (`mount_program`).
"""

import tempfile
from enum import StrEnum
from pathlib import Path

from support.clusters import Mounts, OwnCluster, Pod, python_folders, scratch
from support.kube import Json

from duplex_sidecar.checkpoint.tiny import make_tiny
from duplex_sidecar.cli.places import default_cache_dir, default_checkpoint
from scripts.cluster import ROOT


class Stages(StrEnum):
    """Of a sidecar in a pod."""

    REAL = "real"
    FAKE = "fake"
    """Processes of `tests/fakes`, behind a sidecar that is otherwise the real one."""


IMAGES = {
    Stages.REAL: "duplex.test/sidecar:1",
    Stages.FAKE: "duplex.test/sidecar-fake-stages:1",
}
CHECKPOINT_CLAIM = "checkpoint"
CACHE_PATH = "/var/cache/duplex"
INSPECTED_PATH = "/inspected"
"""What vLLM found out about our classes on this machine: without it a start takes 20 s more."""
PORT = 8765
READY_TIMEOUT_S = 400.0
RESOURCES: Json = {
    "requests": {"cpu": "500m", "memory": "3Gi"},
    "limits": {"memory": "5Gi"},
}
FAKE_RESOURCES: Json = {
    "requests": {"cpu": "100m", "memory": "512Mi"},
    "limits": {"memory": "1536Mi"},
}
"""With fake stages."""

_PYTHON = ROOT / ".venv" / "bin" / "python"
_DOCKERFILE = f"""\
ARG BASE
FROM ${{BASE}}
COPY inspected {INSPECTED_PATH}
COPY duplex python /usr/local/bin/
ENV HOME=/tmp DUPLEX_CACHE_DIR={CACHE_PATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
"""
_DUPLEX = {
    Stages.REAL: f"""\
mkdir -p {CACHE_PATH}/vllm
cp -r {INSPECTED_PATH} {CACHE_PATH}/vllm/modelinfos
exec {_PYTHON} -m duplex_sidecar.cli.main "$@"
""",
    Stages.FAKE: f'exec {_PYTHON} {ROOT}/tests/fakes/fake_sidecar.py "$@"\n',
}


def load_sidecar_image(cluster: OwnCluster, stages: Stages = Stages.REAL) -> str:
    """Build it and load it into each node. Returns its name."""
    programs = {"python": f'exec {_PYTHON} "$@"\n', "duplex": _DUPLEX[stages]}
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        copy_inspected(context / "inspected")
        for name, body in programs.items():
            (context / name).write_text(f"#!/bin/sh\n{body}")
            (context / name).chmod(0o755)
        (context / "Dockerfile").write_text(_DOCKERFILE)
        cluster.build_image(IMAGES[stages], context / "Dockerfile", context)
    return IMAGES[stages]


def copy_inspected(target: Path) -> None:
    """Readable by every user, unlike where vLLM keeps it."""
    target.mkdir()
    for file in (default_cache_dir() / "vllm" / "modelinfos").glob("duplex_sidecar-*.json"):
        (target / file.name).write_bytes(file.read_bytes())


def share_program(cluster: OwnCluster, namespace: str) -> Mounts:
    """What any of the programs needs, at the same paths as on this machine."""
    return cluster.share(namespace, python_folders())


def share_checkpoint(cluster: OwnCluster, namespace: str, claim: str = CHECKPOINT_CLAIM) -> None:
    """The tiny checkpoint under that claim's name; made if it is not there yet."""
    make_tiny(default_checkpoint(), cache_dir=default_cache_dir())
    cluster.share(namespace, {claim: default_checkpoint()})


def mount_program(template: Json, mounts: Mounts) -> None:
    """Into a DuplexPool's spec.template. mounts: of `share_program`, in the pool's namespace."""
    spec = template["spec"]
    spec["volumes"] = [*spec.get("volumes", ()), *mounts.volumes]
    (sidecar,) = (each for each in spec["containers"] if each["name"] == "duplex-sidecar")
    sidecar["volumeMounts"] = [*sidecar.get("volumeMounts", ()), *mounts.mounts]


def sidecar_pod(cluster: OwnCluster, namespace: str, name: str, redis_url: str) -> Pod:
    """A pod as a pool makes it, without the admin API's TLS. Shares what it needs first."""
    load_sidecar_image(cluster)
    share_checkpoint(cluster, namespace)
    mounts = share_program(cluster, namespace)
    mounts += cluster.share(namespace, {CHECKPOINT_CLAIM: default_checkpoint()}, at="/checkpoint")
    mounts += scratch("/run/duplex", "1Gi", memory=True) + scratch("/dev/shm", memory=True)
    mounts += scratch(CACHE_PATH, "1Gi") + scratch("/tmp", "1Gi")
    return Pod(
        name,
        ("duplex", "serve", "--from-environment"),
        mounts,
        image=IMAGES[Stages.REAL],
        environment={
            "DUPLEX_CHECKPOINT": "/checkpoint",
            "DUPLEX_REDIS_URL": redis_url,
            "DUPLEX_RUNTIME_DIR": "/run/duplex",
            "DUPLEX_CACHE_DIR": CACHE_PATH,
            "DUPLEX_HOST": "0.0.0.0",
            "DUPLEX_PORT": str(PORT),
            "DUPLEX_SLOTS": "1",
            "DUPLEX_MAX_MODEL_TOKENS": "2048",
        },
        container={
            "name": "duplex-sidecar",
            "ports": [{"name": "realtime", "containerPort": PORT}],
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 1},
            "livenessProbe": {"httpGet": {"path": "/livez", "port": PORT}, "failureThreshold": 6},
            "resources": RESOURCES,
        },
    )
