"""python -m tests.bench.table FILE: a result file as a Markdown table, for docs/benchmarks.md."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.bench.figures import short


def markdown(document: dict[str, Any]) -> str:
    """Conditions in one line, then the figures that have a target, then the others."""
    conditions = document["conditions"]
    machine = conditions["machine"]
    lines = [
        f"{document['date']}, revision `{document['revision']}`, {machine['cpu']}, "
        f"{machine['cores']} cores, load {conditions['load_before'][0]} before and "
        f"{conditions['load_after'][0]} after.",
        "",
        "| figure | value | target | | |",
        "|---|---:|---:|---|---|",
    ]
    figures: list[dict[str, Any]] = document["figures"]
    aimed = [figure for figure in figures if figure["at_most"] is not None]
    others = [figure for figure in figures if figure["at_most"] is None]
    lines += [_row(figure) for figure in (*aimed, *others)]
    return "\n".join(lines) + "\n"


def _row(figure: dict[str, Any]) -> str:
    unit = figure["unit"]
    target = "" if figure["at_most"] is None else f"<= {short(figure['at_most'])} {unit}"
    value = f"{short(figure['value'])} {unit}"
    verdict = "" if figure["verdict"] == "-" else figure["verdict"]
    return f"| {figure['name']} | {value} | {target} | {verdict} | {figure['note']} |"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())), end="")
