"""`tests/faults/last_run.json`: what the proofs of the last run came to, for people and CI. Written
anew by each run of the tests that prove; git does not keep it. A run with DUPLEX_KEEP_RUN=NAME also
writes `tests/faults/results/NAME.json`, which is there to be committed: runs that go on side by
side, or one after another, have a name each."""

import json
import os
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from duplex_sidecar.history.verdict import Counts, Report
from scripts.tiers import LONG_PROFILE, PROFILE_VARIABLE
from tests.bench import conditions
from tests.bench.revision import revision

KEEP_VARIABLE = "DUPLEX_KEEP_RUN"
FILE = Path(__file__).resolve().parents[1] / "faults" / "last_run.json"
_TOTALS = ("refused_zombie_writes", "redos", "resends", "takeovers", "acknowledged_units", "events")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_sections: dict[str, dict[str, Any]] = {}
_tests: dict[str, int] = {}


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
    _write()


def crash_points(section: str) -> int:
    """How many this run has reached so far in that section."""
    reached: int = _sections.get(section, {}).get("crash_points", 0)
    return reached


def finish(collected: int, failed: int) -> None:
    """The run is over: so many tests of this folder were chosen, and so many failed."""
    if _sections:
        _tests.update(collected=collected, failed=failed)
        _write()


def kept_as(folder: Path) -> Path | None:
    """Where in `folder` this run is kept, None without DUPLEX_KEEP_RUN. Raises ValueError on a name
    that is none."""
    name = os.environ.get(KEEP_VARIABLE)
    if not name:
        return None
    if not _NAME.fullmatch(name):
        raise ValueError(f"{KEEP_VARIABLE} is a name of the characters a-z 0-9 -")
    return folder / "results" / f"{name}.json"


@cache
def run_conditions() -> dict[str, Any]:
    """When, of what, where. The load is that of the beginning."""
    return {
        "began": conditions.now_utc(),
        "revision": revision(),
        "machine": conditions.machine(),
        "load_before": conditions.load_average(),
        "versions": conditions.versions(),
    }


def write_report(folder: Path, report: Path, document: dict[str, Any]) -> None:
    """As the last run's, and under the name of DUPLEX_KEEP_RUN."""
    text = json.dumps(document, indent=2) + "\n"
    report.write_text(text, encoding="utf-8")
    kept = kept_as(folder)
    if kept is not None:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text, encoding="utf-8")


def _write() -> None:
    whole = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "long": is_long(),
        "conditions": run_conditions(),
        "tests": _tests,
        "totals": _overall(),
        **{name: _sections[name] for name in sorted(_sections)},
    }
    write_report(FILE.parent, FILE, whole)


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
