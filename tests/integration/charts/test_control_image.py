"""Operator and gateway need no more than their image holds: the lock file's group `control`."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
IMPORT_ALL = """
import importlib, json, pkgutil, sys
from importlib.abc import MetaPathFinder

absent = set(json.load(sys.stdin))

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"not in the image: {name}", name=name)

sys.meta_path.insert(0, Absent())
for root in ("duplex_api", "duplex_operator", "duplex_gateway"):
    package = importlib.import_module(root)
    for found in pkgutil.walk_packages(package.__path__, root + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""
"""Imports all of operator and gateway as if the modules named on stdin were not installed."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_by(group: str) -> set[str]:
    """Distributions that `uv sync --only-group` takes from the lock file."""
    with (ROOT / "uv.lock").open("rb") as text:
        packages: dict[str, Any] = {each["name"]: each for each in tomllib.load(text)["package"]}
    found: set[str] = set()
    waiting = list(packages["duplex"]["dev-dependencies"][group])
    while waiting:
        wanted = waiting.pop()
        package = packages[wanted["name"]]
        more = list(package.get("dependencies", ())) if wanted["name"] not in found else []
        for extra in wanted.get("extra", ()):
            more += package.get("optional-dependencies", {}).get(extra, ())
        found.add(wanted["name"])
        waiting += more
    return found


def test_operator_and_gateway_import_with_what_the_image_holds() -> None:
    present = installed_by("control") | {"duplex"}
    owners = importlib.metadata.packages_distributions()
    absent = [name for name, by in owners.items() if not {plain(each) for each in by} & present]
    assert {"torch", "transformers", "vllm", "numpy"} <= set(absent)
    done = subprocess.run(
        (sys.executable, "-c", IMPORT_ALL),
        input=json.dumps(absent),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
