"""Everything that can be judged without running the product. All checks run, even after a failure.

python -m scripts.check            every check
python -m scripts.check NAME...    only these
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PRODUCT = ("crds", "operator", "sidecar")
PYTHON_CODE = (*PRODUCT, "scripts", "tests")


@dataclass(frozen=True, slots=True)
class Check:
    """A command that exits 0 if all is well; what it prints is shown if it does not."""

    name: str
    command: tuple[str | Path, ...]


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"scripts.{name}", *arguments)


CHECKS = (
    Check("format", (BIN / "ruff", "format", "--check", *PYTHON_CODE)),
    Check("lint", (BIN / "ruff", "check", *PYTHON_CODE)),
    Check("text", module("check_text")),
    Check("generated", module("generate_crds", "--check")),
    Check("lock", ("scripts/uv", "lock", "--check")),
    Check(
        "imports",
        (BIN / "lint-imports", "--no-logo", "--cache-dir", ".cache/import-linter", ".importlinter"),
    ),
    Check("dead-code", module("check_dead_code")),
    Check(
        "markers",
        (
            *(sys.executable, "-m", "pytest", "-p", "scripts.tiers"),
            *("--collect-only", "-qqq", "-p", "no:cacheprovider", "tests"),
        ),
    ),
    Check("types", (BIN / "basedpyright", *PRODUCT, "scripts")),
)


def run(check: Check) -> bool:
    print(f"{check.name:10} ", end="", flush=True)
    started = time.monotonic()
    done = subprocess.run(check.command, cwd=ROOT, capture_output=True, text=True, check=False)
    good = done.returncode == 0
    print(f"{'ok' if good else 'FAILED':7} {time.monotonic() - started:6.1f} s", flush=True)
    if not good:
        print((done.stdout + done.stderr).strip(), flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the code without running it.")
    parser.add_argument("names", nargs="*", help=", ".join(check.name for check in CHECKS))
    names: list[str] = parser.parse_args().names
    unknown = set(names) - {check.name for check in CHECKS}
    if unknown:
        parser.error(f"unknown check {min(unknown)!r}")
    chosen = [check for check in CHECKS if not names or check.name in names]
    failed = [check.name for check in chosen if not run(check)]
    summary = f"{len(chosen) - len(failed)} checks passed, {len(failed)} failed"
    print(f"{summary}: {', '.join(failed)}" if failed else summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
