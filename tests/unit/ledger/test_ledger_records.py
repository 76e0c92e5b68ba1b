"""The chain finds every change, and says where."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.errors import LedgerCorrupt, SchemaTooNew
from duplex_sidecar.ledger.export import verify_lines
from duplex_sidecar.ledger.records import (
    GENESIS_HASH,
    Accepted,
    Committed,
    Entry,
    MediaRefs,
    Opening,
    PlanAction,
    PlanFacts,
    PromptIds,
    Record,
    Redo,
    Truncated,
    UnitInput,
)

pytestmark = pytest.mark.unit

COMMON = {"schema": 1, "replica": "a", "at_ms": 5}
PLAN = PlanFacts(PlanAction.REBUILD, "context", "slide", 1, 20, 9, 300)


def opening() -> Opening:
    raw = msgspec.Raw(b'{"mode":"off"}')
    return Opening(
        session="s",
        checkpoint="c",
        parts=(PromptIds((1,)),),
        voice="v",
        window=raw,
        sampling=raw,
        output=raw,
        limits=raw,
        seed=2**63,
        traceparent="",
        rows=(),
        state_sha256=records.sha256(b""),
        prev_hash=GENESIS_HASH,
        **COMMON,
    )


def accepted(seq: int, prev_hash: str) -> Accepted:
    return Accepted(
        seq=seq,
        epoch=0,
        turn=1,
        input=UnitInput(16_000, 1, 0, 16_000, True, False, False),
        plan=PLAN,
        directive="",
        strategy="reprefill",
        seed=1,
        traceparent="",
        media=MediaRefs(None, None, ()),
        state_sha256=None,
        attempts=1,
        prev_hash=prev_hash,
        **COMMON,
    )


def committed(seq: int, prev_hash: str, tokens: tuple[int, ...] = (3, 4)) -> Committed:
    return Committed(
        seq=seq,
        epoch=0,
        turn=1,
        token_ids=tokens,
        sampled_ids=tokens,
        terminator="listen",
        decision="listen",
        turn_end=False,
        plan=PLAN,
        state_sha256=records.sha256(b""),
        prev_hash=prev_hash,
        **COMMON,
    )


def note(kind: type[Redo] | type[Truncated], seq: int, prev_hash: str) -> Record:
    if kind is Redo:
        draft = records.RedoDraft(seq=seq, attempt=2, cause="engine_restart")
        return records.note(draft, state_sha256=None, replica="a", at_ms=5, prev_hash=prev_hash)
    cut = records.TruncatedDraft(
        seq=seq, turn=1, unit=seq, token_index=1, through=seq, played_ms=10, ends_turn=False
    )
    return records.note(cut, state_sha256="", replica="a", at_ms=5, prev_hash=prev_hash)


@st.composite
def chains(draw: st.DrawFn) -> list[bytes]:
    """A well-formed ledger: units with redos inside and truncations between."""
    stored = [records.encode(opening())]

    def add(record: Record) -> None:
        stored.append(records.encode(record))

    def head() -> str:
        return records.sha256(stored[-1])

    units = draw(st.integers(0, 6))
    for seq in range(1, units + 1):
        add(accepted(seq, head()))
        if draw(st.booleans()):
            add(note(Redo, seq, head()))
        if seq == units and draw(st.booleans()):
            break
        tokens = draw(st.lists(st.integers(0, 2**20), max_size=5))
        add(committed(seq, head(), tuple(tokens)))
        if draw(st.booleans()):
            add(note(Truncated, seq, head()))
    return stored


@given(chains())
def test_a_chain_reads_back_as_written(stored: list[bytes]) -> None:
    entries = records.link("s", 0, GENESIS_HASH, stored)
    records.check_order("s", entries[1:])
    assert [records.encode(entry.record) for entry in entries] == stored
    assert [entry.index for entry in entries] == list(range(len(stored)))


@given(chains(), st.data())
def test_any_changed_byte_is_found_there_or_right_after(
    stored: list[bytes], data: st.DataObject
) -> None:
    """The change is in entry k: entry k is unreadable or linked wrongly, or entry k + 1 does not
    follow, or (k is the last one) the head's hash differs."""
    head = records.sha256(stored[-1])
    place = data.draw(st.integers(0, len(stored) - 1))
    offset = data.draw(st.integers(0, len(stored[place]) - 1))
    changed = bytearray(stored[place])
    changed[offset] ^= data.draw(st.integers(1, 255))
    mutated = [*stored[:place], bytes(changed), *stored[place + 1 :]]
    named = None
    try:
        found = records.link("s", 0, GENESIS_HASH, mutated)[-1].hash
    except (LedgerCorrupt, SchemaTooNew) as error:
        named = int(error.record.split()[1])
        found = ""
    assert found != head
    assert named in (place, place + 1) or (named is None and place == len(stored) - 1)


@given(chains(), st.data())
def test_a_missing_entry_is_found(stored: list[bytes], data: st.DataObject) -> None:
    if len(stored) < 3:
        return
    place = data.draw(st.integers(0, len(stored) - 2))
    with pytest.raises(LedgerCorrupt):
        records.link("s", 0, GENESIS_HASH, [*stored[:place], *stored[place + 1 :]])


@given(chains(), st.data())
def test_a_suffix_links_to_the_kept_floor_hash(stored: list[bytes], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(stored)))
    floor_hash = records.sha256(stored[first - 1])
    entries = records.link("s", first, floor_hash, stored[first:])
    assert len(entries) == len(stored) - first


def linked(*kinds: tuple[str, int]) -> tuple[Entry, ...]:
    stored: list[bytes] = []
    previous = GENESIS_HASH
    makers = {
        "accepted": accepted,
        "committed": committed,
        "redo": lambda seq, prev: note(Redo, seq, prev),
        "truncated": lambda seq, prev: note(Truncated, seq, prev),
    }
    for kind, seq in kinds:
        stored.append(records.encode(makers[kind](seq, previous)))
        previous = records.sha256(stored[-1])
    return records.link("s", 1, GENESIS_HASH, stored)


@pytest.mark.parametrize(
    ("kinds", "place"),
    [
        ((("committed", 1),), 1),
        ((("accepted", 1), ("accepted", 2)), 2),
        ((("accepted", 1), ("committed", 1), ("accepted", 3)), 3),
        ((("accepted", 1), ("committed", 2)), 2),
        ((("accepted", 1), ("truncated", 0)), 2),
        ((("redo", 1),), 1),
        ((("accepted", 4), ("committed", 4), ("redo", 4)), 3),
    ],
)
def test_units_out_of_order_are_named(kinds: tuple[tuple[str, int], ...], place: int) -> None:
    with pytest.raises(LedgerCorrupt, match=f"entry {place} "):
        records.check_order("s", linked(*kinds))


def test_a_trimmed_chain_may_start_at_any_unit() -> None:
    records.check_order("s", linked(("accepted", 9), ("committed", 9), ("truncated", 9)))


def test_a_newer_schema_is_refused_by_name_even_if_its_shape_is_unknown() -> None:
    with pytest.raises(SchemaTooNew) as caught:
        records.decode("s", 4, b'{"schema":2,"kind":"something new","x":1}')
    assert (caught.value.record, caught.value.schema) == ("entry 4", 2)


def test_unknown_fields_of_the_same_schema_are_ignored() -> None:
    text = records.encode(committed(1, GENESIS_HASH))[:-1] + b',"later":1}'
    assert records.decode("s", 2, text) == committed(1, GENESIS_HASH)


def test_a_record_that_is_nested_without_end_is_corrupt() -> None:
    with pytest.raises(LedgerCorrupt, match="entry 7"):
        records.decode("s", 7, b'{"schema":1,"x":' + b"[" * 100_000)
    with pytest.raises(LedgerCorrupt, match="line 1"):
        verify_lines([b'{"x":' + b"[" * 100_000])
