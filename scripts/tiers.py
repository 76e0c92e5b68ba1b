"""A pytest plugin: every test belongs to exactly one tier, the one of its folder.

Loaded by `run_tests.py` and by `check.py`. A test without its marker would silently run nowhere.
"""

import os
from collections.abc import Set
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIER_OF_FOLDER = {
    "unit": "unit",
    "integration": "integration",
    "clients": "client",
    "faults": "fault",
    "cluster": "cluster",
    "bench": "bench",
    "gpu": "gpu",
    "soak": "soak",
}
PROFILE_VARIABLE = "DUPLEX_TEST_PROFILE"
LONG_PROFILE = "long"

# How long cases take to make and to run says something of the machine alone.
_PATIENT: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("default", **_PATIENT)
settings.register_profile(LONG_PROFILE, max_examples=2_000, **_PATIENT)
settings.load_profile(os.environ.get(PROFILE_VARIABLE, "default"))


LONG_MARKER = "long"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{LONG_MARKER}: left out of `make test`; see make test-long"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wrong: dict[str, None] = {}  # a set that keeps the order
    for item in items:
        path = item.path.relative_to(config.rootpath)
        complaint = wrong_tier(path, {marker.name for marker in item.iter_markers()})
        if complaint is not None:
            wrong[f"{path}: {complaint}"] = None
    if wrong:
        raise pytest.UsageError("\n".join(wrong))


def wrong_tier(path: PurePath, markers: Set[str]) -> str | None:
    """What is wrong with a test that carries `markers`; `path` is its file, from the root."""
    parts = path.parts
    wanted = TIER_OF_FOLDER.get(parts[1]) if parts[0] == "tests" and len(parts) > 2 else None
    if wanted is None:
        return f"tests live in tests/{{{','.join(TIER_OF_FOLDER)}}}/"
    carried = sorted(markers & set(TIER_OF_FOLDER.values()))
    if carried == [wanted]:
        return None
    return f"needs the marker {wanted}, carries {', '.join(carried) or 'none'}"
