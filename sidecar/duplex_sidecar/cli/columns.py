"""Columns on standard output of which nothing is cut off, however narrow the terminal is."""

from collections.abc import Sequence

from rich.console import Console


def print_columns(
    console: Console,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str | None] | None = None,
) -> None:
    """Each column is as wide as its widest cell. A line that is longer than the terminal goes on
    in the next one, as commands in it are to be copied; in a pipe it is one line. styles: of the
    rows."""
    widths = [max(len(row[place]) for row in (names, *rows)) for place in range(len(names))]
    for row, style in zip((names, *rows), ("bold", *(styles or [None] * len(rows))), strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = "  ".join(cells).rstrip()
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
