"""Which code a result is of."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def revision() -> str:
    """Commit of the checkout, with `+` when files differ from it. BENCH_REVISION says it where a
    copy of the files runs without git; `unknown` without either."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCH_REVISION", "unknown")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()
