"""Collects a unit's step records out of the ring, in the stage process."""

from collections.abc import Sequence
from typing import NamedTuple

from duplex_sidecar.engine_plugin.ring import RecordFlag, RingReader, StepRecord


class UnitSteps(NamedTuple):
    """sampled_ids and rows of a whole unit; rows[k] belongs to the unit's token k, so there is one
    less than tokens. decision_row: of the prompt's last position, empty unless it was published."""

    sampled_ids: tuple[int, ...]
    rows: tuple[bytes, ...]
    decision_row: bytes


class RowsLostError(Exception):
    """Steps of this unit are missing or do not fit its answer."""


class UnitFaultError(Exception):
    """The unit was poisoned in the engine core; the text is the reason."""


class Handoff:
    """Keeps the records of the units that somebody waits for, by absolute index; the last record
    of an index counts, since a chunked prefill or a preemption offers an index again and only the
    last one is of the whole prompt."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._expected: dict[tuple[int, int], dict[int, StepRecord]] = {}

    @property
    def lapped_records(self) -> int:
        """Records lost because nobody read in time; their units fail alone."""
        return self._ring.lapped_records

    def expect(self, stream: int, unit: int) -> None:
        """Keep the records of this unit from now on."""
        self._expected[stream, unit] = {}

    def forget(self, stream: int, unit: int) -> None:
        self._expected.pop((stream, unit), None)

    def _drain(self) -> None:
        for record in self._ring.drain():
            steps = self._expected.get((record.stream, record.unit))
            if steps is not None:
                steps[record.position] = record

    def check_fault(self, stream: int, unit: int) -> None:
        """Raises UnitFaultError when the unit was poisoned."""
        self._drain()
        for record in self._expected[stream, unit].values():
            if record.flags & RecordFlag.FAULT:
                raise UnitFaultError(record.payload.decode("utf-8", errors="replace"))

    def steps(
        self, stream: int, unit: int, first: int, emitted_ids: Sequence[int], row_bytes: int
    ) -> UnitSteps:
        """Steps of a unit whose answer has arrived; `first` is the absolute index of its first
        token. Raises UnitFaultError and RowsLostError."""
        self.check_fault(stream, unit)
        kept = self._expected[stream, unit]
        indices = range(first, first + len(emitted_ids))
        missing = [index for index in indices if index not in kept]
        if missing:
            raise RowsLostError(f"no step of index {missing[0]} ({len(missing)} missing)")
        records = [kept[index] for index in indices]
        for record, emitted in zip(records, emitted_ids, strict=True):
            # Identity is by index; the ids only cross-check that nobody miscounted.
            if record.emitted_id != emitted:
                raise RowsLostError(f"step {record.position} emitted another id than the engine")
        rows = tuple(record.payload for record in records[1:])
        if any(len(row) != row_bytes for row in rows):
            raise RowsLostError("a hidden row has a wrong size")
        sampled_ids = tuple(record.sampled_id for record in records)
        return UnitSteps(sampled_ids, rows, records[0].payload)
