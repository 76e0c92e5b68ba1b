"""Renders the chart `duplex` for every set of values under tests/unit/charts/values, with Helm.

python -m scripts.render_charts          writes tests/unit/charts/golden/*.yaml where they differ
python -m scripts.render_charts --check  exits 1 and names what differs

Helm is $DUPLEX_HELM, else the one on PATH, else the one that the cluster recipe built.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from duplex_api.constants import API_VERSION, POOL_KIND, SESSION_KIND
from scripts.cluster import binaries_folder

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "duplex"
VALUES = ROOT / "tests" / "unit" / "charts" / "values"
GOLDEN = ROOT / "tests" / "unit" / "charts" / "golden"
RELEASE, NAMESPACE = "talk", "duplex-system"
FILES = ("dashboard.json", "conversation.py")
"""Files that go into ConfigMaps as they are; a golden manifest names them instead."""

_PASSWORD = re.compile(r"\b[A-Za-z0-9]{40}\b")


class HelmMissingError(Exception):
    """No Helm on this machine."""


def helm() -> str:
    """Path of the binary. Raises HelmMissingError."""
    built = binaries_folder() / "helm"
    for found in (os.environ.get("DUPLEX_HELM"), shutil.which("helm"), built):
        if found and Path(found).is_file():
            return str(found)
    raise HelmMissingError("no helm: set DUPLEX_HELM, or make cluster-up, which builds one")


def objects(values: Path, *extra: str) -> list[dict[str, Any]]:
    """Every object of a release with these values, hooks included, as Helm would send it.

    Raises subprocess.CalledProcessError (its stderr says why) when the chart refuses the values."""
    command = [helm(), "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    command += ["--values", str(values), *extra]
    for kind in (SESSION_KIND, POOL_KIND):
        command += ["--api-versions", f"{API_VERSION}/{kind}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def stable(found: list[dict[str, Any]]) -> str:
    """The objects as text, the same at each rendering: sorted, without the password, and with a
    file's name in place of its text."""
    for each in found:
        if each["kind"] == "Secret":
            each["stringData"] = {
                key: _PASSWORD.sub("PASSWORD", text) for key, text in each["stringData"].items()
            }
        if each["kind"] == "ConfigMap":
            each["data"] = {key: _named(text) for key, text in each["data"].items()}
    ordered = sorted(
        found,
        key=lambda each: (
            each["kind"],
            each["metadata"].get("namespace", ""),
            each["metadata"]["name"],
        ),
    )
    return yaml.safe_dump_all(ordered, sort_keys=True, width=100)


def _named(text: str) -> str:
    for name in FILES:
        if text == (CHART / "files" / name).read_text(encoding="utf-8"):
            return f"<files/{name}>"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the golden manifests, or check them.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on differences")
    check_only: bool = parser.parse_args().check
    differing = False
    for values in sorted(VALUES.glob("*.yaml")):
        golden = GOLDEN / values.name
        text = stable(objects(values))
        if not golden.is_file() or golden.read_text(encoding="utf-8") != text:
            differing = True
            print(f"{'differs' if check_only else 'written'}: {golden.relative_to(ROOT)}")
            if not check_only:
                golden.write_text(text, encoding="utf-8")
    return 1 if differing and check_only else 0


if __name__ == "__main__":
    sys.exit(main())
