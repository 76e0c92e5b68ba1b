"""Where proxies put what they saw, on one clock."""

import time
from collections.abc import Callable
from pathlib import Path

from duplex_sidecar.history.observations import (
    SCHEMA,
    Happening,
    Observation,
    Run,
    encode_lines,
)


class Observer:
    """One history. All observers of a run share it, and its clock."""

    def __init__(
        self, name: str, *, lease_ms: int = 0, margin_ms: int = 0, special_ids: frozenset[int]
    ) -> None:
        run = Run(
            schema=SCHEMA,
            name=name,
            lease_ms=lease_ms,
            margin_ms=margin_ms,
            special_ids=tuple(sorted(special_ids)),
        )
        self.observations: list[Observation] = [run]
        self.clock_ns: Callable[[], int] = time.monotonic_ns

    def note(self, observation: Observation) -> None:
        self.observations.append(observation)

    def happened(self, what: str, whom: str = "") -> None:
        self.note(Happening(self.clock_ns(), what, whom))

    def write(self, path: Path) -> Path:
        path.write_bytes(b"".join(encode_lines(self.observations)))
        return path
