"""`tests/faults/last_run.json`: what the proofs of the last run came to, for people and CI. Written
anew by each run of the tests that prove; git does not keep it."""

import json
import os
import time
from pathlib import Path
from typing import Any

from duplex_sidecar.history.verdict import Counts, Report
from scripts.tiers import LONG_PROFILE, PROFILE_VARIABLE

FILE = Path(__file__).resolve().parents[1] / "faults" / "last_run.json"
_TOTALS = ("refused_zombie_writes", "redos", "resends", "takeovers", "acknowledged_units", "events")
_sections: dict[str, dict[str, Any]] = {}


def is_long() -> bool:
    """Whether this is `make test-long`."""
    return os.environ.get(PROFILE_VARIABLE) == LONG_PROFILE


def add(section: str, reports: list[Report], **entries: Any) -> None:
    """Add judged histories to a section of this run. entries: numbers are added up, dictionaries
    merged the same way, everything else replaced."""
    known = _sections.setdefault(section, {"histories": 0, "lost": 0, "duplicated": 0})
    counts = Counts()
    for report in reports:
        counts = counts.plus(report.counts)
    sums: dict[str, Any] = {name: getattr(counts, name) for name in _TOTALS}
    sums |= {
        "histories": len(reports),
        "lost": sum(report.lost for report in reports),
        "duplicated": sum(report.duplicated for report in reports),
    }
    _merge(known, sums | entries)
    whole = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "long": is_long(),
        "totals": _overall(),
        **{name: _sections[name] for name in sorted(_sections)},
    }
    FILE.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _overall() -> dict[str, int]:
    """Over all sections. A loss that a durability permits, and the mutants' own, are not among
    them: those were provoked."""
    names = ("crash_points", "histories", "refused_zombie_writes", "lost", "duplicated")
    found = {name: sum(one.get(name, 0) for one in _sections.values()) for name in names}
    mutants = sum(len(one.get("caught", {})) for one in _sections.values())
    return {**found, "mutants_caught": mutants}


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            into[name] = into.get(name, 0) + value
        else:
            into[name] = value
