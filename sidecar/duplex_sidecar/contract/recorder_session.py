"""One session as its tapes have it: for each unit the feed that counted, measured, not planned.

A unit may have been fed several times (a lost stream, another replica); its last answer is the one
that the session went on with. A prompt that was fed whole is cut into context and units by their
opening tokens, of which each unit has as many as it had when it was first fed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from duplex_sidecar.contract.recorder_tape import (
    Cut,
    EncoderFed,
    Entry,
    Opening,
    RowsOf,
    TalkerFed,
    TapeError,
    ThinkerAnswered,
    ThinkerFed,
    ThinkerPart,
    WaveFed,
    parts_tokens,
)
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

Item = int | RowsOf
"""What stands in a prompt: an id, or rows in one piece."""


def items_of(parts: Iterable[ThinkerPart]) -> Iterator[Item]:
    for part in parts:
        if isinstance(part, RowsOf):
            yield part
        else:
            yield from part


def tokens_in(items: Iterable[Item]) -> int:
    return sum(item.rows if isinstance(item, RowsOf) else 1 for item in items)


@dataclass(frozen=True)
class UnitFed:
    """A unit at the Thinker. appended: items of the feed that was answered. whole: all items of its
    stream before the answer, None where the stream of the unit before went on. prompt_tokens: their
    length in any case. lost: the stream of the unit before was gone, so that it could not go on."""

    seq: int
    appended: tuple[Item, ...]
    whole: tuple[Item, ...] | None
    prompt_tokens: int
    answer: ThinkerAnswered
    lost: bool


@dataclass(frozen=True)
class TalkerUnit:
    """A unit at the Talker. lost: as in UnitFed."""

    fed: TalkerFed
    codes: tuple[int, ...]
    lost: bool


@dataclass(frozen=True)
class TapedSession:
    """opening: of the first owner. units: from unit 1 on without a gap. heard: encoder feeds by
    unit. spoken: Talker feeds by unit. waves: all chunks in order, None where the vocoder's process
    or the owner changed. cut: why the record ends before the session does."""

    opening: Opening
    units: tuple[UnitFed, ...]
    heard: dict[int, EncoderFed]
    spoken: dict[int, TalkerUnit]
    waves: tuple[WaveFed | None, ...]
    cut: str | None


@dataclass
class _Streams:
    """Streams of one engine as they were fed: which items each holds."""

    items: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    tokens: dict[str, int] = field(default_factory=dict[str, int])

    def take(self, fed: ThinkerFed) -> None:
        if fed.opens:
            self.items[fed.stream], self.tokens[fed.stream] = [], 0
        if fed.stream not in self.items or self.tokens[fed.stream] != fed.position:
            raise TapeError(f"unit {fed.unit}: the stream does not hold {fed.position} positions")
        self.items[fed.stream] += items_of(fed.parts)
        self.tokens[fed.stream] += parts_tokens(fed.parts)

    def keep_only(self, stream: str) -> None:
        """The others are closed, or hold nothing of an append yet to come."""
        for name in [name for name in self.items if name != stream]:
            del self.items[name], self.tokens[name]


def taped_session(tapes: Sequence[Sequence[Entry]], vocabulary: Vocabulary) -> TapedSession:
    """The session of these tapes, which are of one session, in the order of their fences.

    Raises TapeError when the tapes contradict themselves.
    """
    reader = _Reader(vocabulary)
    for tape in tapes:
        reader.read(tape)
    return reader.session()


class _Reader:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._opening: Opening | None = None
        self._streams = _Streams()
        self._units: dict[int, UnitFed] = {}
        self._stream_of: dict[int, str] = {}
        self._heard: dict[int, EncoderFed] = {}
        self._spoken: dict[int, TalkerUnit] = {}
        self._talker_stream: str | None = None
        self._waves: list[WaveFed | None] = []
        self._gone: set[str] = set()
        self._generation: dict[type[Entry], int] = {}
        self._cut: str | None = None

    def read(self, tape: Sequence[Entry]) -> None:
        for entry in tape:
            match entry:
                case Opening():
                    self._open(entry)
                case Cut():
                    self._cut = f"the tape was cut at {entry.at_bytes} bytes"
                case EncoderFed():
                    if entry.fault is None and not entry.discard:
                        self._heard[entry.unit] = entry
                case ThinkerFed():
                    self._think(entry)
                case TalkerFed():
                    self._talk(entry)
                case WaveFed():
                    if self._is_new_process(entry, entry.generation) and self._waves:
                        self._waves.append(None)
                    self._waves.append(entry)

    def session(self) -> TapedSession:
        if self._opening is None:
            raise TapeError("no tape")
        units: list[UnitFed] = []
        while (unit := self._units.get(len(units) + 1)) is not None:
            units.append(unit)
        cut = self._cut
        if cut is None and len(units) < max(self._units, default=1):
            cut = f"no answer to unit {len(units) + 1} is on its tapes"
        return TapedSession(
            self._opening, tuple(units), self._heard, self._spoken, tuple(self._waves), cut
        )

    def _open(self, opening: Opening) -> None:
        if self._opening is None:
            self._opening = opening
            return
        # Another owner: nothing of the one before can be fed any more.
        self._gone |= set(self._streams.items)
        if self._talker_stream is not None:
            self._gone.add(self._talker_stream)
        if self._waves:
            self._waves.append(None)

    def _is_new_process(self, entry: Entry, generation: int) -> bool:
        before = self._generation.get(type(entry))
        self._generation[type(entry)] = generation
        return before is not None and before != generation

    def _think(self, fed: ThinkerFed) -> None:
        if self._is_new_process(fed, fed.generation):
            self._gone |= set(self._streams.items)
        if fed.answer is None:
            # After a failure nobody knows what the stream holds, so nobody feeds it again.
            self._gone.add(fed.stream)
            return
        self._streams.take(fed)
        items = self._streams.items[fed.stream]
        if not self._holds_an_append(fed):
            return
        before = self._stream_of.get(fed.unit - 1)
        goes_on = before == fed.stream and not fed.opens
        self._units[fed.unit] = UnitFed(
            seq=fed.unit,
            appended=tuple(items_of(fed.parts)),
            whole=None if goes_on else tuple(items),
            prompt_tokens=self._streams.tokens[fed.stream],
            answer=fed.answer,
            lost=before is not None and before in self._gone,
        )
        self._stream_of[fed.unit] = fed.stream
        self._streams.keep_only(fed.stream)
        # All of an answer is in the stream but its last token.
        items += fed.answer.emitted_ids[:-1]
        self._streams.tokens[fed.stream] += len(fed.answer.emitted_ids) - 1

    def _holds_an_append(self, fed: ThinkerFed) -> bool:
        """A feed of closed units alone makes a stream before its append is there; nobody reads
        its answer."""
        last = fed.parts[-1]
        return isinstance(last, RowsOf) or last[-1] != self._vocabulary.unit_end

    def _talk(self, fed: TalkerFed) -> None:
        if self._is_new_process(fed, fed.generation) and self._talker_stream is not None:
            self._gone.add(self._talker_stream)
        if fed.codes is None:
            self._gone.add(fed.stream)
            return
        lost = self._talker_stream is not None and self._talker_stream in self._gone
        self._talker_stream = fed.stream
        self._spoken[fed.unit] = TalkerUnit(fed, fed.codes, lost)
