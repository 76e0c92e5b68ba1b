"""Rows of the units that a prompt may still need, and their stored form.

In the modes `basic` and `context` a session keeps the rows of its retained units at hand, since a
slide renders them again; what left the window is let go with the unit that dropped it. In mode
`off` only the unit under way is kept: a rebuild there reads the ledger.
"""

from collections.abc import Iterable, Sequence

import msgspec

from duplex_sidecar.stages.envelope import EncoderRows, Ids, Rows, Tensor, ThinkerPart
from duplex_sidecar.window.parts import (
    BlockKind,
    HistoryUnit,
    MediaKind,
    MediaPart,
    PromptPart,
    TextPart,
    UnitInput,
)


class StoredRows(msgspec.Struct, frozen=True):
    """Rows of one unit as the ledger keeps them (its `rows` blob is this struct's msgpack).

    audio: one [10, hidden] tensor per chunk. vision: one [64, hidden] tensor per image block.
    """

    blocks: tuple[BlockKind, ...]
    audio: tuple[Tensor, ...]
    vision: tuple[Tensor, ...]


encode_rows = msgspec.msgpack.Encoder().encode
decode_rows = msgspec.msgpack.Decoder(StoredRows).decode
decode_reference = msgspec.msgpack.Decoder(Tensor).decode
"""The opening's blob with the rows of the reference voice (`encode_rows` makes it)."""


class RowsMissing(LookupError):
    """A prompt asks for rows that are not at hand: a fault of the session's own bookkeeping."""


class RowsMismatch(ValueError):
    """The encoder gave other rows than the append reserved positions for."""


def split_chunks(rows: EncoderRows, chunks: int, blocks: tuple[BlockKind, ...]) -> StoredRows:
    """The encoder's rows cut into chunks. Raises RowsMismatch."""
    count, hidden = rows.audio.shape
    if chunks < 1 or count % chunks or len(rows.vision) != len(blocks):
        raise RowsMismatch(
            f"the encoder gave {count} audio rows and {len(rows.vision)} image blocks"
            f" for {chunks} chunks and {len(blocks)} blocks"
        )
    per_chunk = count // chunks
    step = len(rows.audio.data) // chunks
    audio = tuple(
        Tensor(
            rows.audio.element_type,
            (per_chunk, hidden),
            rows.audio.data[chunk * step : (chunk + 1) * step],
        )
        for chunk in range(chunks)
    )
    return StoredRows(blocks, audio, rows.vision)


class RetainedUnits:
    """History and rows of the units that the window still holds, oldest first."""

    def __init__(self, reference: Tensor | None = None) -> None:
        """reference: rows of the reference voice, which stand in every whole prompt."""
        self.reference = reference
        self._history: dict[int, HistoryUnit] = {}
        self._rows: dict[int, StoredRows] = {}

    def put_rows(self, seq: int, rows: StoredRows) -> None:
        """Rows of the unit under way."""
        self._rows[seq] = rows

    def complete(self, unit: HistoryUnit) -> None:
        """The unit is committed: from now on it can be rendered."""
        self._history[unit.input.seq] = unit

    def holds(self, seqs: Iterable[int]) -> bool:
        """Whether all of these units can be rendered from here."""
        return all(seq in self._history and seq in self._rows for seq in seqs)

    def rows_of(self, seq: int) -> StoredRows:
        """Raises RowsMissing."""
        try:
            return self._rows[seq]
        except KeyError:
            raise RowsMissing(f"no rows of unit {seq}") from None

    def keep_only(self, seqs: Iterable[int]) -> None:
        """Let go of every unit not named."""
        kept = set(seqs)
        for seq in [seq for seq in self._rows if seq not in kept]:
            del self._rows[seq]
        for seq in [seq for seq in self._history if seq not in kept]:
            del self._history[seq]

    def history(self, seqs: Iterable[int]) -> list[HistoryUnit]:
        """The units to render. Raises RowsMissing."""
        try:
            return [self._history[seq] for seq in seqs]
        except KeyError as error:
            raise RowsMissing(f"unit {error} is not at hand") from None

    def resolve(self, parts: Sequence[PromptPart]) -> tuple[ThinkerPart, ...]:
        """Named media become rows. Raises RowsMissing."""
        return tuple(
            Ids(part.ids) if isinstance(part, TextPart) else Rows(self._look_up(part))
            for part in parts
        )

    def _look_up(self, part: MediaPart) -> Tensor:
        if part.kind is MediaKind.REFERENCE:
            if self.reference is None or self.reference.shape[0] != part.length:
                raise RowsMissing("no rows of the reference voice")
            return self.reference
        rows = self._rows.get(part.unit)
        if rows is None:
            raise RowsMissing(f"no rows of unit {part.unit}")
        chosen = rows.audio if part.kind is MediaKind.AUDIO else rows.vision
        if part.index >= len(chosen) or chosen[part.index].shape[0] != part.length:
            raise RowsMissing(f"unit {part.unit} has no {part.kind} rows {part.index}")
        return chosen[part.index]

    @property
    def held_bytes(self) -> int:
        """Memory of the rows."""
        return sum(
            len(tensor.data)
            for rows in self._rows.values()
            for tensor in (*rows.audio, *rows.vision)
        )

    def __len__(self) -> int:
        return len(self._history)


def history_of(
    seq: int, rows: StoredRows, ids: tuple[int, ...], terminator: int | None
) -> HistoryUnit:
    """A committed unit in the form that is rendered."""
    return HistoryUnit(
        input=UnitInput(seq=seq, chunks=len(rows.audio), blocks=rows.blocks),
        ids=ids,
        terminator=terminator,
    )
