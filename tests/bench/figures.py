"""What a run found: figures with the issue's targets beside them, and the table that shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table


class Broken(Exception):
    """A measure that could not be taken: the run says nothing about the product's speed."""


class Verdict(StrEnum):
    OK = "ok"
    MISS = "MISS"
    NO_DATA = "no data"
    """A figure with a target for which the run gave no sample: the run is broken."""
    REPORTED = "-"


@dataclass(frozen=True)
class Figure:
    """value None: the run gave no sample. at_most: the target in `unit`, None for a figure that is
    only reported."""

    name: str
    value: float | None
    unit: str
    at_most: float | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.at_most is None:
            return Verdict.REPORTED
        if self.value is None:
            return Verdict.NO_DATA
        return Verdict.OK if self.value <= self.at_most else Verdict.MISS


def as_json(figure: Figure) -> dict[str, object]:
    value = None if figure.value is None else round(figure.value, 4)
    return {
        "name": figure.name,
        "value": value,
        "unit": figure.unit,
        "at_most": figure.at_most,
        "verdict": figure.verdict,
        "note": figure.note,
    }


def print_table(console: Console, figures: Sequence[Figure]) -> None:
    table = Table("figure", box=None, pad_edge=False)
    for heading in ("value", "target"):
        table.add_column(heading, justify="right")
    for heading in ("unit", "", "note"):
        table.add_column(heading)
    styles = {Verdict.MISS: "bold yellow", Verdict.NO_DATA: "bold red", Verdict.OK: "green"}
    for figure in figures:
        table.add_row(
            figure.name,
            short(figure.value),
            "" if figure.at_most is None else f"<= {short(figure.at_most)}",
            figure.unit,
            figure.verdict,
            figure.note,
            style=styles.get(figure.verdict),
        )
    console.print(table)


def short(value: float | None) -> str:
    """Three digits, or a dash for no sample."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def exit_status(figures: Sequence[Figure], broken: Sequence[str], strict: bool) -> int:
    """0: measured. 1: a target was missed and `strict` asks for it. 2: the run is broken."""
    verdicts = {figure.verdict for figure in figures}
    if broken or not figures or Verdict.NO_DATA in verdicts:
        return 2
    return 1 if strict and Verdict.MISS in verdicts else 0
