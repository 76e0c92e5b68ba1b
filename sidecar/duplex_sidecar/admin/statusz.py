"""The page that a person opens first: is it ready, which stages, which sessions. No content."""

from collections.abc import Sequence
from html import escape
from typing import Any

_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}"
    ".bad{color:#b00020;font-weight:600}.good{color:#2e7d32;font-weight:600}"
)

_NESTED = ("lastRebuild", "audio")
"""Of a session's view: no single values."""


def status_page(status: dict[str, Any]) -> str:
    """HTML of `app.sidecar_status`."""
    problem = status["problem"]
    verdict = (
        '<span class="good">ready</span>'
        if problem is None
        else f'<span class="bad">{escape(str(problem))}</span>'
    )
    facts = [
        ("replica", status["replica"]),
        ("model", status["model"]),
        ("checkpoint", status["checkpoint"]),
        ("up", f"{status['uptime_s']} s"),
        ("free slots", status["free_slots"]),
        ("units in real time", f"{status['near_real_time_ratio']:.1%}"),
    ]
    stages = [
        (report.stage, report.state, report.generation, f"{report.elapsed_s:.0f} s", report.reason)
        for report in status["stages"]
    ]
    names = [name for name in next(iter(status["sessions"]), ()) if name not in _NESTED]
    sessions = [tuple(view[name] for name in names) for view in status["sessions"]]
    return (
        f"<!doctype html><meta charset=utf-8><title>duplex {escape(status['replica'])}</title>"
        f"<style>{_STYLE}</style><h1>duplex sidecar: {verdict}</h1>"
        + _table((), facts)
        + "<h2>Stages</h2>"
        + _table(("stage", "state", "generation", "reached after", "reason"), stages)
        + "<h2>Sessions</h2>"
        + (_table(names, sessions) if sessions else "<p>none</p>")
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape('' if cell is None else str(cell))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{cells}</tr>' if cells else ''}{body}</table>"
