"""Hand-off of steps out of the engine core: one writer, one reader, a file on a tmpfs.

A record is one step of one unit: what was sampled, what was emitted, and the hidden row that the
step's logits came from. The writer never waits. A record is committed before its token leaves the
engine core through a socket, so whoever has seen a unit's last token finds all its records here.

A plain mmap: `multiprocessing.shared_memory` before Python 3.13 lets any process that attached
remove the segment when it exits.
"""

import mmap
import os
import struct
from enum import IntFlag
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<QII")  # records committed so far, slots, payload bytes
_HEAD_SPACE = 64
_COMMIT = struct.Struct("<Q")  # 1-based number of the record, 0 while it is being written
# stream, unit, position, sampled, emitted, flags, payload bytes
_FIELDS = struct.Struct("<QqIiiII")
_PAYLOAD_OFFSET = _COMMIT.size + _FIELDS.size
_ALIGNMENT = 64

MIN_PAYLOAD_BYTES = 256
"""Room for the reason of a fault where there are no rows."""


class RecordFlag(IntFlag):
    NONE = 0
    FAULT = 1
    """The unit is poisoned; the payload is the reason, UTF-8."""


class StepRecord(NamedTuple):
    """One step. position: absolute index in the stream of the token that the step emitted, so the
    payload (the hidden row, empty at a unit's first step) belongs to the token at position - 1."""

    stream: int
    unit: int
    position: int
    sampled_id: int
    emitted_id: int
    flags: RecordFlag
    payload: bytes


class _Layout:
    def __init__(self, slots: int, payload_bytes: int) -> None:
        self.slots = slots
        self.payload_bytes = payload_bytes
        whole = _PAYLOAD_OFFSET + payload_bytes
        self.stride = (whole + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        self.size_bytes = _HEAD_SPACE + slots * self.stride

    def offset(self, number: int) -> int:
        """Of the record with this 0-based number."""
        return _HEAD_SPACE + number % self.slots * self.stride


class RingWriter:
    """The engine core's end. Opens a ring that the reader has created."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._count, slots, payload_bytes = _HEAD.unpack_from(self._map, 0)
        self._layout = _Layout(slots, payload_bytes)

    @property
    def payload_bytes(self) -> int:
        """Largest payload that a record takes."""
        return self._layout.payload_bytes

    def put(
        self,
        stream: int,
        unit: int,
        position: int,
        sampled_id: int,
        emitted_id: int,
        payload: bytes | memoryview,
        flags: RecordFlag = RecordFlag.NONE,
    ) -> None:
        """Publish one record. Raises ValueError when the payload is too long."""
        data = memoryview(payload).cast("B")
        if len(data) > self._layout.payload_bytes:
            raise ValueError(f"payload of {len(data)} bytes, slots have {self.payload_bytes}")
        offset = self._layout.offset(self._count)
        # Taken out of circulation first: a reader that is a lap behind must not take half of the
        # new record for the old one.
        _COMMIT.pack_into(self._map, offset, 0)
        start = offset + _PAYLOAD_OFFSET
        self._map[start : start + len(data)] = data
        _FIELDS.pack_into(
            self._map,
            offset + _COMMIT.size,
            stream,
            unit,
            position,
            sampled_id,
            emitted_id,
            flags,
            len(data),
        )
        self._count += 1
        _COMMIT.pack_into(self._map, offset, self._count)
        _COMMIT.pack_into(self._map, 0, self._count)

    def close(self) -> None:
        self._map.close()


class RingReader:
    """The front end's end. Creates the ring; `unlink` removes its name once the writer has it."""

    def __init__(self, path: Path, slots: int, payload_bytes: int) -> None:
        """Raises OSError (ENOSPC included: the room is reserved, since a tmpfs that is full when a
        page is first touched kills the writer)."""
        self._path = path
        self._layout = _Layout(slots, max(MIN_PAYLOAD_BYTES, payload_bytes))
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._layout.size_bytes)
            self._map = mmap.mmap(descriptor, self._layout.size_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        _HEAD.pack_into(self._map, 0, 0, slots, self._layout.payload_bytes)
        self._next = 0
        self.lapped_records = 0
        """Records that were overwritten before they were read. Their units miss an index."""

    def drain(self) -> list[StepRecord]:
        """All records committed since the last call, oldest first. Records that the writer has
        overwritten meanwhile are skipped and counted."""
        (head,) = _COMMIT.unpack_from(self._map, 0)
        oldest = head - self._layout.slots
        if self._next < oldest:
            self.lapped_records += oldest - self._next
            self._next = oldest
        records: list[StepRecord] = []
        while self._next < head:
            record = self._read(self._next)
            self._next += 1
            if record is None:
                self.lapped_records += 1
            else:
                records.append(record)
        return records

    def _read(self, number: int) -> StepRecord | None:
        offset = self._layout.offset(number)
        (before,) = _COMMIT.unpack_from(self._map, offset)
        stream, unit, position, sampled, emitted, flags, length = _FIELDS.unpack_from(
            self._map, offset + _COMMIT.size
        )
        start = offset + _PAYLOAD_OFFSET
        payload = self._map[start : start + min(length, self._layout.payload_bytes)]
        (after,) = _COMMIT.unpack_from(self._map, offset)
        if before != number + 1 or after != before:
            return None
        return StepRecord(stream, unit, position, sampled, emitted, RecordFlag(flags), payload)

    def unlink(self) -> None:
        """Remove the name; both ends keep the memory. A killed process then leaves nothing."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._map.close()
        self.unlink()
