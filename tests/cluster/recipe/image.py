"""Container images without a registry. An image travels as a tar, as `docker save` writes it.

image.py base TAR [--name NAME] [--include PACKAGE,PACKAGE]
    a Debian root with Python, made by mmdebstrap
image.py pack NAME SOURCE TAR [--entrypoint PATH]
    SOURCE: a root folder, the tar archive of one, or one static binary
image.py build NAME CONTEXT [TAR] --base TAR [--base-name NAME] [--file FILE] [--store FOLDER]
    [--build-arg NAME=VALUE]...
    a Dockerfile, by buildah; it gets the base's name as the build argument BASE. Without TAR it
    stays in the store alone
image.py load BIN STATE TAR...
    into every node of a running cluster; its pods need imagePullPolicy IfNotPresent or Never
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

EPOCH = "1970-01-01T00:00:00Z"
DEBIAN_RELEASE = "bookworm"
BASE_NAME = "python:3.11-slim"
BASE_PACKAGES = "python3,python3-pip,python-is-python3,ca-certificates"
PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
LOAD_ATTEMPTS = 20
"""containerd may still be starting."""


def pack(name: str, source: Path, out: Path, entrypoint: str | None = None) -> None:
    """One layer and a config around it. Equal input gives an equal image."""
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as folder:
        layer = Path(folder) / "layer.tar"
        write_layer(source, layer)
        with layer.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        run: dict[str, object] = {"Env": [f"PATH={PROGRAM_PATH}"]}
        run |= {"Entrypoint": [entrypoint]} if entrypoint else {"Cmd": ["/bin/sh"]}
        config = {
            "architecture": "amd64",
            "os": "linux",
            "created": EPOCH,
            "config": run,
            # buildah wants one entry a layer.
            "history": [{"created": EPOCH, "created_by": "image.py pack"}],
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        config_bytes = json.dumps(config).encode()
        config_name = hashlib.sha256(config_bytes).hexdigest() + ".json"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}.tar"]}]
        with tarfile.open(out, "w") as archive:
            add_bytes(archive, config_name, config_bytes)
            add_bytes(archive, "manifest.json", json.dumps(manifest).encode())
            archive.add(layer, f"{digest}.tar")


def write_layer(source: Path, layer: Path) -> None:
    if source.is_dir():
        flags = ("--numeric-owner", "--one-file-system")
        subprocess.run(("tar", "-C", source, *flags, "-cf", layer, "."), check=True)
    elif tarfile.is_tarfile(source):
        if source.stat().st_dev == layer.parent.stat().st_dev:
            os.link(source, layer)
        else:
            shutil.copy(source, layer)
    else:
        with tarfile.open(layer, "w") as archive:
            archive.add(source, source.name, filter=owned_by_root)


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    return entry.replace(uid=0, gid=0, mode=0o755, deep=False)


def add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def base(out: Path, name: str, packages: str) -> None:
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as folder:
        root = Path(folder) / "root.tar"
        command = (
            *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}"),
            # Every user may pass through root's home: a mounted interpreter may lie below it.
            '--customize-hook=chroot "$1" sh -c "chmod 755 ~root"',
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/locale/*",
            *(DEBIAN_RELEASE, str(root)),
        )
        subprocess.run(command, check=True)
        pack(name, root, out)


def build(
    name: str,
    context: Path,
    out: Path | None,
    base_tar: Path,
    base_name: str,
    file: Path,
    store: Path,
    arguments: list[str],
) -> None:
    # Copies of a layer while it is committed; a build that is killed leaves them.
    temporary = store / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # In a mount namespace of its own: buildah leaves its storage mounted.
    places = ("--root", store / "root", "--runroot", store / "run", "--storage-driver", "overlay")
    buildah = ("unshare", "--mount", "buildah", *places)
    subprocess.run((*buildah, "pull", "--quiet", f"docker-archive:{base_tar}"), check=True)
    # RUN steps trust what the machine trusts; the bundle is not committed.
    trust = ("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro") if CERTIFICATES.exists() else ()
    command = (
        *(*buildah, "bud", "--isolation", "chroot", "--network", "host", "--pull-never"),
        # A step that fails would leave its container, with all that it had written.
        *("--layers", "--force-rm", "--build-arg", f"BASE={base_name}", *trust),
        *(part for argument in arguments for part in ("--build-arg", argument)),
        *("-t", name, "-f", file, context),
    )
    subprocess.run(command, check=True, env={**os.environ, "TMPDIR": str(temporary)})
    if out is None:
        return
    out.unlink(missing_ok=True)
    target = f"docker-archive:{out}:{name}"
    push = ("push", "--quiet", "--disable-compression", name, target)
    subprocess.run((*buildah, *push), check=True)


def load(binaries: Path, state: Path, archives: list[Path]) -> None:
    for holder in sorted((state / "pids").glob("node*-ns")):
        entered = ("nsenter", "-t", holder.read_text().strip(), "-m", "-n", "-p", "--")
        ctr = (binaries.absolute() / "ctr", "-n", "k8s.io", "images", "import")
        for archive in archives:
            load_one((*entered, *ctr, archive.absolute()), holder.name.removesuffix("-ns"))


def load_one(command: tuple[str | Path, ...], node: str) -> None:
    complaint = ""
    for _ in range(LOAD_ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        complaint = done.stderr.strip()
        if "connect" not in complaint:
            break
        time.sleep(0.3)
    sys.exit(f"image load: {node}: {complaint}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("base")
    verb.add_argument("tar", type=Path)
    verb.add_argument("--name", default=BASE_NAME)
    verb.add_argument("--include", default=BASE_PACKAGES)
    verb = verbs.add_parser("pack")
    verb.add_argument("name")
    verb.add_argument("source", type=Path)
    verb.add_argument("tar", type=Path)
    verb.add_argument("--entrypoint")
    verb = verbs.add_parser("build")
    verb.add_argument("name")
    verb.add_argument("context", type=Path)
    verb.add_argument("tar", type=Path, nargs="?")
    verb.add_argument("--base", type=Path, required=True)
    verb.add_argument("--base-name", default=BASE_NAME)
    verb.add_argument("--file", type=Path)
    verb.add_argument("--store", type=Path)
    verb.add_argument("--build-arg", action="append", default=[])
    verb = verbs.add_parser("load")
    verb.add_argument("binaries", type=Path)
    verb.add_argument("state", type=Path)
    verb.add_argument("tar", type=Path, nargs="+")
    given = parser.parse_args()
    if given.verb == "base":
        base(given.tar, given.name, given.include)
    elif given.verb == "pack":
        pack(given.name, given.source, given.tar, given.entrypoint)
    elif given.verb == "build":
        file = given.file or given.context / "Dockerfile"
        if not (given.tar or given.store):
            parser.error("build wants TAR or --store")
        store = (given.store or given.tar.with_suffix(".store")).absolute()
        tars = (given.tar and given.tar.absolute(), given.base.absolute())
        build(given.name, given.context, *tars, given.base_name, file, store, given.build_arg)
    else:
        load(given.binaries, given.state, given.tar)


if __name__ == "__main__":
    main()
