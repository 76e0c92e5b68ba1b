"""The hand-off ring and what is made of its records."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.engine_plugin.ring import RecordFlag, RingReader, RingWriter
from duplex_sidecar.stages.engine.handoff import Handoff, RowsLostError, UnitFaultError

pytestmark = pytest.mark.unit

ROW = 512


@pytest.fixture
def ring(tmp_path: Path) -> RingReader:
    return RingReader(tmp_path / "ring", slots=8, payload_bytes=ROW)


@pytest.fixture
def writer(ring: RingReader, tmp_path: Path) -> RingWriter:
    return RingWriter(tmp_path / "ring")


def row(mark: int) -> bytes:
    return bytes([mark % 256]) * ROW


def put(writer: RingWriter, position: int, stream: int = 1, unit: int = 0) -> None:
    payload = b"" if position == 0 else row(position)
    writer.put(stream, unit, position, 100 + position, 200 + position, payload)


def test_records_arrive_in_order_and_once(ring: RingReader, writer: RingWriter) -> None:
    assert ring.drain() == []
    for position in range(5):
        put(writer, position)
    records = ring.drain()
    assert [r.position for r in records] == [0, 1, 2, 3, 4]
    assert records[0].payload == b""
    assert records[3].payload == row(3)
    assert (records[3].sampled_id, records[3].emitted_id) == (103, 203)
    assert ring.drain() == []


def test_a_lapped_reader_skips_what_is_gone_and_counts_it(
    ring: RingReader, writer: RingWriter
) -> None:
    for position in range(20):
        put(writer, position)
    assert [r.position for r in ring.drain()] == list(range(12, 20))
    assert ring.lapped_records == 12


def test_a_record_being_written_is_not_read(ring: RingReader, writer: RingWriter) -> None:
    for position in range(8):
        put(writer, position)
    # The writer is in the middle of the next lap's first slot.
    offset = writer._layout.offset(0)
    writer._map[offset : offset + 8] = bytes(8)
    assert [r.position for r in ring.drain()] == list(range(1, 8))
    assert ring.lapped_records == 1


def test_a_payload_that_is_too_long_is_refused(ring: RingReader, writer: RingWriter) -> None:
    with pytest.raises(ValueError, match="513 bytes"):
        writer.put(1, 0, 0, 0, 0, bytes(513))
    put(writer, 1)
    assert len(ring.drain()) == 1


def test_both_ends_outlive_the_name(ring: RingReader, writer: RingWriter, tmp_path: Path) -> None:
    ring.unlink()
    assert os.listdir(tmp_path) == []
    put(writer, 1)
    assert len(ring.drain()) == 1
    ring.close()


def test_a_ring_of_a_killed_start_is_replaced(ring: RingReader, tmp_path: Path) -> None:
    again = RingReader(tmp_path / "ring", slots=4, payload_bytes=ROW)
    assert RingWriter(tmp_path / "ring")._layout.slots == 4
    assert again.drain() == []


def test_no_room_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        RingReader(tmp_path / "ring", slots=8, payload_bytes=ROW)
    assert os.listdir(tmp_path) == []


@given(st.lists(st.one_of(st.just("drain"), st.integers(1, 12)), max_size=30))
def test_nothing_is_ever_wrong_only_missing(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str | int]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "ring"
    reader = RingReader(path, slots=8, payload_bytes=ROW)
    writer = RingWriter(path)
    written = seen = 0
    for move in [*moves, "drain"]:
        if isinstance(move, str):
            for record in reader.drain():
                assert record.position >= seen
                assert record.payload == row(record.position)
                seen = record.position + 1
            assert seen == written
            continue
        for _ in range(move):
            writer.put(1, 0, written, 0, 0, row(written))
            written += 1
    reader.close()
    writer.close()


def test_a_units_steps_by_absolute_index(ring: RingReader, writer: RingWriter) -> None:
    handoff = Handoff(ring)
    handoff.expect(1, 4)
    # A part of a chunked prefill offers the first step twice; another stream is in between.
    put(writer, 30, unit=4)
    put(writer, 30, stream=2, unit=4)
    for position in (30, 31, 32):
        put(writer, position, unit=4)
    steps = handoff.steps(1, 4, 30, [230, 231, 232], ROW)
    assert steps.sampled_ids == (130, 131, 132)
    assert steps.rows == (row(31), row(32))


def test_records_of_nobody_are_dropped(ring: RingReader, writer: RingWriter) -> None:
    handoff = Handoff(ring)
    handoff.expect(1, 0)
    handoff.forget(1, 0)
    put(writer, 1)
    handoff.expect(2, 0)
    handoff.check_fault(2, 0)
    handoff.expect(1, 0)
    with pytest.raises(RowsLostError, match="2 missing"):
        handoff.steps(1, 0, 1, [201, 202], ROW)


def test_only_the_lapped_unit_fails(ring: RingReader, writer: RingWriter) -> None:
    handoff = Handoff(ring)
    handoff.expect(1, 0)
    handoff.expect(2, 0)
    for position in (1, 2):
        put(writer, position, stream=1)
    for position in range(1, 8):
        put(writer, position, stream=2)
    with pytest.raises(RowsLostError, match="no step of index 1"):
        handoff.steps(1, 0, 1, [201, 202], ROW)
    assert len(handoff.steps(2, 0, 1, list(range(201, 208)), ROW).rows) == 6
    assert handoff.lapped_records == 1


def test_an_answer_that_does_not_fit_its_steps_is_lost(
    ring: RingReader, writer: RingWriter
) -> None:
    handoff = Handoff(ring)
    handoff.expect(1, 0)
    put(writer, 1)
    put(writer, 2)
    with pytest.raises(RowsLostError, match="another id"):
        handoff.steps(1, 0, 1, [201, 999], ROW)
    with pytest.raises(RowsLostError, match="wrong size"):
        handoff.steps(1, 0, 1, [201, 202], ROW + 1)


def test_a_poisoned_unit_says_why(ring: RingReader, writer: RingWriter) -> None:
    handoff = Handoff(ring)
    handoff.expect(1, 0)
    put(writer, 1)
    writer.put(1, 0, 2, 5, 5, b"ValueError: odd", RecordFlag.FAULT)
    with pytest.raises(UnitFaultError, match="ValueError: odd"):
        handoff.steps(1, 0, 1, [201, 5], ROW)
