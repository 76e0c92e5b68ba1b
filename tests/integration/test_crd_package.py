"""The contract as others meet it: what it loads, its generated files, the verbs of the Makefile."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FOREIGN = ("yaml", "torch", "vllm", "redis", "msgspec", "numpy", "kopf", "kube_custom_resource")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180
    )


def test_the_contract_loads_pydantic_and_nothing_else() -> None:
    code = (
        "import sys, duplex_api.crd, duplex_api.pool, duplex_api.resolve, duplex_api.session;"
        f"print(sorted(set({FOREIGN!r}) & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", code).stdout == "[]\n"


def test_the_generated_files_are_in_sync() -> None:
    done = run(sys.executable, "-m", "scripts.generate_crds", "--check")
    assert (done.returncode, done.stdout) == (0, "")


def test_help_names_every_verb() -> None:
    done = run("make", "help")
    for verb in ("demo", "test", "check", "bench", "cluster-up", "demo-cluster", "generate"):
        assert f"make {verb} " in done.stdout
