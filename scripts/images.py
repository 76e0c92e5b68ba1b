"""The product's images from their Dockerfiles, without Docker and without a registry.

python -m scripts.images build [control] [sidecar-cpu] [sidecar-cuda]   default: the first two
python -m scripts.images save sidecar-cpu TAR    as `docker save` writes it; `docker load` takes it
python -m scripts.images remove                  everything that was built here

By buildah, on a Debian root with Python that mmdebstrap makes. Needs root and, on Debian 12 or
later, nothing that it does not install itself. They lie in a store in the cache, not in Docker's.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.cluster import (
    RECIPE,
    ROOT,
    ClusterError,
    alone,
    cache_folder,
    install_packages,
    run_telling,
    say,
)

DEFAULT = ("control", "sidecar-cpu")
LEAST_FREE_GB = {"control": 2, "sidecar-cpu": 22, "sidecar-cuda": 28}
"""A step of a build is on the disk several times before it is done."""

_RECIPE = RECIPE / "image.py"


@dataclass(frozen=True, slots=True)
class Image:
    """One of the product's. arguments: of the build, NAME=VALUE each."""

    tag: str
    dockerfile: str
    arguments: tuple[str, ...] = ()


def images() -> dict[str, Image]:
    """By the names that this program takes. Tags as in the charts and examples."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version: str = project["project"]["version"]
    sidecars = {
        f"sidecar-{engine}": Image(
            f"duplex-sidecar:{version}-{engine}", "sidecar.Dockerfile", (f"ENGINE={engine}",)
        )
        for engine in ("cpu", "cuda")
    }
    return {"control": Image(f"duplex-control:{version}", "control.Dockerfile"), **sidecars}


def store_folder() -> Path:
    """Of what is built here: images and the layers that a next build takes again."""
    return cache_folder() / "images" / "product"


def why_not(name: str) -> str | None:
    """Why it cannot be built here; None if it can."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "needs Linux and root"
    wanted_gb = LEAST_FREE_GB[name]
    free_gb = shutil.disk_usage(_existing(store_folder())).free / 1e9
    if free_gb < wanted_gb and not _is_there(images()[name].tag):
        return f"needs {wanted_gb} GB of room in {cache_folder()} while it is built"
    return None


def build(names: Sequence[str]) -> None:
    """Each into the store; what has not changed is not made again. Raises ClusterError."""
    known = images()
    reasons = [f"{name} {reason}" for name in names if (reason := why_not(name))]
    if reasons:
        raise ClusterError("; ".join(reasons))
    with alone("product-images"):
        install_packages()
        base = _base()
        for name in names:
            image, began = known[name], time.monotonic()
            more = [part for each in image.arguments for part in ("--build-arg", each)]
            run_telling(
                (
                    *(sys.executable, _RECIPE, "build", image.tag, ROOT, "--base", base),
                    *("--file", ROOT / "docker" / image.dockerfile, "--store", store_folder()),
                    *more,
                ),
                f"building {image.tag}",
            )
            say(f"{image.tag}: {size(image.tag)}, {time.monotonic() - began:.0f} s")


def save(name: str, archive: Path) -> None:
    """Raises ClusterError."""
    tag = images()[name].tag
    target = f"docker-archive:{archive.absolute()}:{tag}"
    run_telling((*buildah(), "push", "--quiet", tag, target), f"writing {archive}")


def remove() -> None:
    """All that was built here. What is not there any more is made anew by the next build."""
    with alone("product-images"):
        shutil.rmtree(store_folder(), ignore_errors=True)


def buildah() -> tuple[str | Path, ...]:
    """The beginning of a command on the store. Mounts of its own: buildah leaves some behind."""
    store = store_folder()
    places = ("--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay")
    return ("unshare", "--mount", "buildah", *places)


def size(tag: str) -> str:
    """Of all its layers, unpacked, as buildah says it."""
    [image] = json.loads(_output("images", "--json", tag))
    return image["size"]


def _base() -> Path:
    """The Debian root, made once. Nothing is in it that the Dockerfiles' own base has not."""
    archive = store_folder() / "base.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = archive.with_suffix(".new")
        run_telling(
            (sys.executable, _RECIPE, "base", unfinished), "making a Debian root", quiet=True
        )
        unfinished.rename(archive)
    return archive


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _is_there(tag: str) -> bool:
    """Perhaps of an older state: what is left to build then is small, unless packages changed."""
    if shutil.which("buildah") is None:
        return False
    done = subprocess.run((*buildah(), "inspect", tag), capture_output=True, check=False)
    return done.returncode == 0


def _output(*arguments: str) -> str:
    done = subprocess.run((*buildah(), *arguments), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"buildah {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="The product's images, by buildah.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("build")
    verb.add_argument("names", nargs="*", metavar="NAME", help=", ".join(images()))
    verb = verbs.add_parser("save")
    verb.add_argument("name", choices=images())
    verb.add_argument("tar", type=Path)
    verbs.add_parser("remove")
    given = parser.parse_args()
    try:
        if given.verb == "build":
            names: list[str] = given.names or list(DEFAULT)
            unknown = [name for name in names if name not in images()]
            if unknown:
                parser.error(f"unknown image {unknown[0]!r}; there are {', '.join(images())}")
            build(names)
        elif given.verb == "save":
            save(given.name, given.tar)
        else:
            remove()
    except ClusterError as error:
        print(f"images {given.verb}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
