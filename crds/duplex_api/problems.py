"""One thing that is wrong with what a user said: where, what, and what would be right."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """path: dotted, in wire names ("spec.window.mode"). line: 1-based, where a text was read.

    allowed: what may stand there, in words; empty where nothing may.
    """

    path: str
    message: str
    allowed: str
    line: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        said = ": ".join(part for part in (line, self.path, self.message) if part)
        return said + (f" (allowed: {self.allowed})" if self.allowed else "")
