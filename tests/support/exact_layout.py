"""What stands in the Thinker's context, written from the contract (sections A and B) alone.

The other half of the proofs of exactness: it imports nothing of the product, so that planner,
renderer and session can be measured against it. A position is a token id, or the bytes of one row
that the encoder made.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

Position = int | bytes

TILE_PIXELS = 448 * 448


@dataclass(frozen=True)
class Script:
    """Ids of a checkpoint, and the session context as ids. reference: the voice's positions."""

    named: Mapping[str, int]
    special_ids: Collection[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    marker: tuple[int, ...]
    reference: tuple[Position, ...] = ()


def script_of(
    named: Mapping[str, int],
    special_ids: Collection[int],
    encode: Callable[[str], Sequence[int]],
    instructions: str | None = None,
    reference: tuple[Position, ...] = (),
    user_text: str | None = None,
) -> Script:
    """The context, with the rows of a reference voice and with seeded text if there are any."""
    begin, end = ("\n<|audio_start|>", "<|audio_end|>") if reference else ("", "")
    words = instructions or "Streaming Omni Conversation."
    seeded = ""
    if user_text:
        seeded = f"\n<|im_start|>user\n{user_text}<|im_end|>\n<|im_start|>assistant\n"
    return Script(
        named=named,
        special_ids=special_ids,
        prefix=tuple(encode(f"<|im_start|>system\n{words}{begin}")),
        suffix=tuple(encode(f"{end}<|im_end|>{seeded}")),
        marker=tuple(encode("\n\nprevious: ")),
        reference=reference,
    )


@dataclass(frozen=True)
class Window:
    """`mode`: off, basic or context."""

    mode: str
    basic_high: int
    basic_low: int
    context_previous_max: int
    context_max_units: int


@dataclass(frozen=True)
class Answer:
    """What the Thinker said to one append: everything but the last token has its place in the
    context already. terminator: None when the unit ended without one."""

    ids: tuple[int, ...]
    terminator: int | None


@dataclass(frozen=True)
class Placed:
    """The whole context when the unit is decided. extends: the one before is its beginning."""

    context: tuple[Position, ...]
    extends: bool
    dropped: int


def image_kinds(sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Image blocks of an append's frames, in order. Of two frames the first is cut when it is
    larger than a tile."""
    kinds: list[str] = []
    for number, (width, height) in enumerate(sizes):
        kinds.append("image")
        if len(sizes) == 2 and number == 0 and width * height > TILE_PIXELS:
            kinds += ["slice", "slice"]
    return kinds


def unit_input(
    script: Script,
    kinds: Sequence[str],
    images: Sequence[Sequence[Position]],
    chunks: Sequence[Sequence[Position]],
) -> tuple[Position, ...]:
    """What one append puts in: `<unit>`, its frames, its audio; `</unit>` between two chunks."""
    assert len(kinds) == len(images), "as many image blocks as the frames ask for"
    placed: list[Position] = [script.named["<unit>"]]
    for kind, rows in zip(kinds, images, strict=True):
        placed += [script.named[f"<{kind}>"], *rows, script.named[f"</{kind}>"]]
    for number, rows in enumerate(chunks):
        if number:
            placed += [script.named["</unit>"], script.named["<unit>"]]
        placed += rows
    return tuple(placed)


@dataclass
class _Unit:
    number: int
    input: tuple[Position, ...]
    answer: Answer

    def whole(self, unit_end: int) -> list[Position]:
        last = [] if self.answer.terminator is None else [self.answer.terminator]
        return [*self.input, *self.answer.ids, *last, unit_end]


def left_of(script: Script, said: Sequence[int], kept: int | None) -> Answer:
    """What of an answer is left when so many of its ids were heard (None: all): one of which
    nothing was heard listened, one that was heard in part is closed."""
    content = tuple(said[:-1])
    if kept is None or kept >= len(content):
        return Answer(content, said[-1])
    if kept == 0:
        return Answer((), script.named["<|listen|>"])
    return Answer(content[:kept], script.named["<|chunk_eos|>"])


class Conversation:
    """One session's context, append after append."""

    def __init__(self, script: Script, window: Window) -> None:
        self._script = script
        self._window = window
        self._units: list[_Unit] = []
        self._previous: list[int] = []
        self._open: tuple[Position, ...] | None = None
        self._appended = 0
        self._taken_back = False

    def take_back(self, answers: Mapping[int, Answer]) -> None:
        """These units said no more than that; those that are closed and still in the window."""
        for unit in self._units:
            unit.answer = answers.get(unit.number, unit.answer)
        self._taken_back = True

    def append(self, pending: tuple[Position, ...], before: Answer | None) -> Placed:
        """`before`: the answer to the append before this one; None for the first."""
        if before is not None:
            assert self._open is not None
            self._units.append(_Unit(self._appended, self._open, before))
        self._open = pending
        self._appended += 1
        dropped = self._slide(pending) if before is not None else 0
        extends = before is not None and not dropped and not self._taken_back
        self._taken_back = False
        return Placed(self._context(pending), extends, dropped)

    def _slide(self, pending: tuple[Position, ...]) -> int:
        before = len(self._units)
        if self._window.mode == "context":
            while len(self._units) > self._window.context_max_units:
                said = self._units.pop(0).answer.ids
                self._previous += [id_ for id_ in said if id_ not in self._script.special_ids]
            self._previous = self._previous[-self._window.context_previous_max :]
        elif self._window.mode == "basic":
            length = len(self._context(pending))
            if length > self._window.basic_high:
                while self._units and length > self._window.basic_low:
                    length -= len(self._units.pop(0).whole(0))
        return before - len(self._units)

    def _context(self, pending: tuple[Position, ...]) -> tuple[Position, ...]:
        script = self._script
        placed: list[Position] = [*script.prefix, *script.reference]
        if self._previous:
            placed += [*script.marker, *self._previous]
        placed += script.suffix
        for unit in self._units:
            placed += unit.whole(script.named["</unit>"])
        return (*placed, *pending)
