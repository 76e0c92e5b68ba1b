"""The output journal: every replayable event is in it before its first byte leaves.

One sequence number is one byte string for ever; the journal keeps the last 60 s and 8 MiB. Codes
and their sample range go into the same call as the audio event made of them, so that a recovery
knows exactly what sounded. Pure.
"""

import msgspec

from duplex_sidecar.ledger.errors import LedgerCorrupt

MAX_JOURNAL_BYTES = 8 * 1024 * 1024
MAX_JOURNAL_AGE_MS = 60_000
MAX_EVENTS_PER_CALL = 256
MAX_BATCH_BYTES = 2 * 1024 * 1024


class VoiceMark(msgspec.Struct, frozen=True):
    """One Code2Wav chunk whose audio is in the journal. Chunks that a recovery vocodes again,
    muted, get no mark: the marks of a turn are exactly what sounded, each sample once.

    epoch, sequence: where it was vocoded. codes: the chunk's new codes (no left context).
    code_offset: index of codes[0] among the codes of the turn. from/to_samples: 24 kHz samples
    since the turn's first one.
    """

    epoch: int
    sequence: int
    turn: int
    unit: int
    code_offset: int
    codes: tuple[int, ...]
    from_samples: int
    to_samples: int


class JournalBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one call, numbered first_seq, first_seq + 1, ...

    unit: the unit they come from; refused unless it is committed (0: from no unit).
    voiced_through: set to `unit` when nothing of it is left to journal: a recovery need not run it
    again. A listening unit is voiced with its `listen` event or with no event at all.
    voice_state: opaque bytes of the Talker and epoch state after `unit`, written atomically.
    """

    unit: int
    first_seq: int
    events: tuple[bytes, ...]
    mark: VoiceMark | None = None
    voiced_through: int | None = None
    voice_state: bytes | None = None

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.events) - 1

    def check(self) -> None:
        """Raises ValueError when the batch is over the limits or says nothing."""
        if len(self.events) > MAX_EVENTS_PER_CALL:
            raise ValueError(
                f"{len(self.events)} events in one batch, {MAX_EVENTS_PER_CALL} allowed"
            )
        size = sum(len(event) for event in self.events)
        if size > MAX_BATCH_BYTES:
            raise ValueError(f"{size} bytes in one batch, {MAX_BATCH_BYTES} allowed")
        if self.first_seq < 1 or self.unit < 0:
            raise ValueError("event sequences count from 1, units from 0")
        if self.mark is not None and self.mark.unit != self.unit:
            raise ValueError("a voice mark belongs to the unit of its batch")
        if self.voiced_through is not None and self.voiced_through != self.unit:
            raise ValueError("only the unit of the batch can become voiced by it")
        if self.mark is not None and not self.events:
            raise ValueError("a voice mark without the event that carries its audio")
        if not self.events and self.voiced_through is None and self.voice_state is None:
            raise ValueError("an empty batch")


class JournaledEvent(msgspec.Struct, frozen=True):
    seq: int
    event: bytes


class EventsAfter(msgspec.Struct, frozen=True):
    """Events with seq > the one asked for, contiguous. last_seq: the journal's newest (0: none).

    resync_required: the journal no longer (or never) holds what follows the sequence asked for.
    missing_through: one that is missing between its first and its last one, 0 for none; ask again
    from there.
    """

    events: tuple[JournaledEvent, ...]
    last_seq: int
    resync_required: bool
    missing_through: int = 0


_mark_encoder = msgspec.msgpack.Encoder()
_mark_decoder = msgspec.msgpack.Decoder(VoiceMark)


def encode_mark(mark: VoiceMark) -> bytes:
    return _mark_encoder.encode(mark)


def decode_marks(session: str, stored: list[bytes]) -> tuple[VoiceMark, ...]:
    """Marks of one turn, gapless in codes and samples. Raises `LedgerCorrupt` naming the mark."""
    marks: list[VoiceMark] = []
    for number, data in enumerate(stored):
        try:
            mark = _mark_decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise LedgerCorrupt(session, f"voice mark {number}", str(error)) from error
        if marks and not _follows(mark, marks[-1]):
            raise LedgerCorrupt(session, f"voice mark {number}", "not contiguous")
        marks.append(mark)
    return tuple(marks)


def _follows(mark: VoiceMark, before: VoiceMark) -> bool:
    return (
        mark.turn == before.turn
        and mark.from_samples == before.to_samples
        and mark.code_offset == before.code_offset + len(before.codes)
    )
