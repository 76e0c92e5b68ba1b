"""The ledger as a file: one line of JSON per unit (and per opening, cut, closing).

Every line has the same keys. `prev_hash` of a line is `hash` of the line before: a line covers the
entries from a unit's accept to its commit, and `records` holds their stored text, so that the file
can be verified without a server.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.records import (
    GENESIS_HASH,
    Accepted,
    Committed,
    Entry,
    Opening,
    PlanFacts,
    Redo,
    UnitInput,
    check_order,
    link,
)
from duplex_sidecar.ledger.session_view import LoadedSession


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `ledger.jsonl`.

    kind: opening, unit, truncated, cancelled or closed; a unit that is accepted only is `unit` with
    committed false. replica: who committed it (or accepted it, if nobody has). attempts:
    submissions.
    """

    kind: str
    session: str
    seq: int
    epoch: int
    turn: int
    committed: bool
    token_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    terminator: str | None
    decision: str | None
    turn_end: bool
    plan: PlanFacts | None
    input: UnitInput | None
    attempts: int
    accepted_by: str | None
    replica: str
    at_ms: int
    index: int
    prev_hash: str
    hash: str
    records: tuple[str, ...]


def export_lines(loaded: LoadedSession) -> Iterator[bytes]:
    """JSON lines with their newline, opening first. Token ids are content: whoever exports decides
    where they go."""
    epoch, turn = 0, 0
    for group in _groups((loaded.opening_entry, *loaded.entries)):
        line = _line(loaded.session, group, epoch, turn)
        epoch, turn = line.epoch, line.turn
        yield msgspec.json.encode(line) + b"\n"


def verify_lines(lines: Iterable[bytes]) -> int:
    """Check an exported file by its stored records alone; returns the number of units committed.

    Raises `LedgerCorrupt` naming the entry (or line) that does not fit.
    """
    session, stored, first_index, floor_hash, last_hash = "", list[bytes](), 1, "", ""
    for number, text in enumerate(lines, start=1):
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise LedgerCorrupt(session, f"line {number}", str(error)) from error
        data = [record.encode() for record in line.records]
        session, last_hash = line.session, line.hash
        if number == 1:
            floor_hash = link(session, 0, GENESIS_HASH, data)[0].hash
        elif number == 2 and line.index - len(data) >= 1:
            # Older entries were trimmed before the export: the chain starts at this line's floor.
            first_index, floor_hash = line.index - len(data) + 1, line.prev_hash
        stored.extend(data if number > 1 else ())
    entries = link(session, first_index, floor_hash, stored)
    check_order(session, entries)
    if (entries[-1].hash if entries else floor_hash) != last_hash:
        raise LedgerCorrupt(session, "last line", "its hash is not that of its records")
    return sum(isinstance(entry.record, Committed) for entry in entries)


def _groups(entries: Sequence[Entry]) -> Iterator[tuple[Entry, ...]]:
    """Entries that make one line: a unit from its accept to its commit, anything else alone."""
    unit: list[Entry] = []
    for entry in entries:
        if not isinstance(entry.record, Accepted | Redo | Committed):
            if unit:
                yield tuple(unit)
                unit = []
            yield (entry,)
            continue
        unit.append(entry)
        if isinstance(entry.record, Committed):
            yield tuple(unit)
            unit = []
    if unit:
        yield tuple(unit)


def _line(session: str, group: Sequence[Entry], epoch: int, turn: int) -> Line:
    """epoch, turn: of the line before, for records that have none."""
    first, last = group[0].record, group[-1].record
    accepted = first if isinstance(first, Accepted) else None
    committed = last if isinstance(last, Committed) else None
    unit = committed or accepted
    redos = [entry.record.attempt for entry in group if isinstance(entry.record, Redo)]
    kind = "unit" if unit is not None else type(last).__name__.lower()
    return Line(
        kind=kind,
        session=session,
        seq=0 if isinstance(last, Opening) else last.seq,
        epoch=unit.epoch if unit else epoch,
        turn=unit.turn if unit else turn,
        committed=committed is not None,
        token_ids=committed.token_ids if committed else (),
        sampled_ids=committed.sampled_ids if committed else (),
        terminator=committed.terminator if committed else None,
        decision=committed.decision if committed else None,
        turn_end=committed.turn_end if committed else False,
        plan=unit.plan if unit else None,
        input=accepted.input if accepted else None,
        attempts=max(redos, default=1) if accepted else 0,
        accepted_by=accepted.replica if accepted else None,
        replica=last.replica,
        at_ms=last.at_ms,
        index=group[-1].index,
        prev_hash=first.prev_hash,
        hash=group[-1].hash,
        records=tuple(entry.stored.decode() for entry in group),
    )
