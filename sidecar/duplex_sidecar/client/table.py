"""The live table of a conversation: one line a unit, and the lines between them that explain it."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

VISIBLE_UNITS = 16
_COLUMNS = (
    ("unit", "right"),
    ("model", "left"),
    ("tokens", "right"),
    ("window", "right"),
    ("rebuild", "left"),
    ("ms", "right"),
    ("head", "right"),
    ("epoch/seq", "right"),
    ("audio out", "right"),
    ("wall ms", "right"),
)


def unit_cells(unit: dict[str, Any]) -> tuple[str, ...]:
    """Cells of one `duplex.unit` event."""
    rebuild_ms = unit["rebuild_ms"]
    stage2 = unit["stage2_sequence"]
    return (
        str(unit["unit"]),
        unit["decision"],
        str(unit["tokens"]),
        str(unit["window_tokens"]),
        unit["rebuild_cause"] or "",
        "" if rebuild_ms is None else f"{rebuild_ms:.0f}",
        str(unit["head"]),
        "" if stage2 is None else f"{unit['epoch']}/{stage2}",
        f"{unit['audio_samples'] / 24_000:.2f} s" if unit["audio_samples"] else "",
        f"{unit['wall_ms']:.0f}",
    )


class LiveTable:
    """Redraws in a terminal; prints each line once where there is none (a pipe, CI)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[tuple[str, ...] | str] = []
        self._status = ""
        self._live = (
            Live(console=console, refresh_per_second=8, transient=False)
            if console.is_terminal
            else None
        )
        self._header_printed = False

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            self._live.stop()

    def unit(self, unit: dict[str, Any]) -> None:
        self._add(unit_cells(unit))

    def note(self, text: str) -> None:
        """A line between units: the kill, a resume, an error."""
        self._add(text)

    def status(self, text: str) -> None:
        """The line below the table: what is going on now."""
        self._status = text
        if self._live is not None:
            self._live.update(self._picture())

    def _add(self, row: tuple[str, ...] | str) -> None:
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._picture())
            return
        if not self._header_printed:
            header = "  ".join(f"{name:>9}" for name, _ in _COLUMNS)
            self._console.print(header, highlight=False, soft_wrap=True)
            self._header_printed = True
        line = row if isinstance(row, str) else "  ".join(f"{cell:>9}" for cell in row)
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for name, justify in _COLUMNS:
            table.add_column(name, justify="right" if justify == "right" else "left")
        notes: list[RenderableType] = []
        for row in self._rows[-VISIBLE_UNITS:]:
            if isinstance(row, str):
                table.add_row("", Text(row, style="bold yellow"))
            else:
                style = "green" if row[1] == "speak" else "dim"
                table.add_row(*(Text(cell, style=style) for cell in row))
        notes.append(Text(self._status, style="cyan"))
        return Group(table, *notes)
