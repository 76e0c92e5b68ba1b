"""What slid out of a session's window, measured from the prompts that its Thinker was fed.

Nothing here plans or renders. A unit that stands in one prompt and not in the next has been
dropped; what stands between prefix and suffix is the previous text. A prompt that was fed whole is
cut at the opening tokens of its units, of which each has as many as when it was an append.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from duplex_sidecar.contract.recorder_session import Item, TapedSession, UnitFed, tokens_in
from duplex_sidecar.contract.recorder_tape import Opening, RowsOf
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

UNIT_SAMPLES = 16_000
CLOSURE_TOKENS = 2


class NotExpressible(Exception):
    """The recorded schema has no words for this session; the text says why."""


@dataclass(frozen=True)
class Window:
    """What a unit's prompt shows. previous: text of replies that left the window. units: the closed
    units in it, oldest first. pending: the append itself."""

    previous: tuple[int, ...]
    units: tuple[tuple[Item, ...], ...]
    pending: tuple[Item, ...]


@dataclass(frozen=True)
class Step:
    """A unit with its window. closed: the unit before, with its answer and what closes it. dropped:
    units that left. slides: the window holds less, or other text, than before. changed: whether a
    unit that stayed holds something else than when it was fed; the recorded schemas do not tell one
    row from another. update_tokens: positions that the append takes, the closure of the unit before
    included."""

    unit: UnitFed
    window: Window
    closed: tuple[Item, ...]
    dropped: tuple[tuple[Item, ...], ...]
    slides: bool
    changed: bool

    @property
    def update_tokens(self) -> int:
        if self.unit.whole is None:
            return tokens_in(self.unit.appended)
        return CLOSURE_TOKENS + tokens_in(self.window.pending)


def steps_of(session: TapedSession, vocabulary: Vocabulary) -> list[Step]:
    """Every unit with its window."""
    reader = _WindowReader(session, vocabulary)
    return [reader.step(unit) for unit in session.units]


class _WindowReader:
    """Follows one session's window from prompt to prompt."""

    def __init__(self, session: TapedSession, vocabulary: Vocabulary) -> None:
        self._session = session
        self._unit, self._unit_end = vocabulary.unit, vocabulary.unit_end
        self._before: UnitFed | None = None
        self._window = Window((), (), ())

    def step(self, unit: UnitFed) -> Step:
        """The next unit."""
        before = self._window
        known = before.units
        closed: tuple[Item, ...] = ()
        if self._before is not None:
            # Every token of an answer is in the stream but the last, which closes the unit.
            closed = (*before.pending, *self._before.answer.emitted_ids, self._unit_end)
            known = (*known, closed)
        if unit.whole is None:
            begin = _index_of(unit.appended, self._unit)
            closing = unit.appended[:begin]
            content = () if self._before is None else self._before.answer.emitted_ids[:-1]
            closed = (*before.pending, *content, *closing)
            window = Window(before.previous, (*before.units, closed), unit.appended[begin:])
        else:
            window = self._cut(unit, unit.whole, known)
        dropped = known[: max(0, len(known) - len(window.units))]
        self._before, self._window = unit, window
        slides = bool(dropped) or window.previous != before.previous
        stayed = known[len(known) - len(window.units) :]
        changed = unit.whole is not None and stayed != window.units
        return Step(unit, window, closed, dropped, slides, changed)

    def _cut(
        self, unit: UnitFed, whole: Sequence[Item], known: Sequence[tuple[Item, ...]]
    ) -> Window:
        """A whole prompt, cut from its end: the append, then the newest known units."""
        _, previous, rest = split_context(whole, self._session.opening)
        starts = [index for index, item in enumerate(rest) if item == self._unit]
        left = len(starts) - min(len(starts), self._chunks(unit.seq))
        begin = starts[left] if left < len(starts) else len(rest)
        edges = [begin]
        for one in reversed(known):
            openings = max(1, sum(item == self._unit for item in one))
            if openings > left:
                break
            left -= openings
            edges.insert(0, starts[left])
        if left:
            # Openings that belong to no known unit are shown with the oldest one.
            edges[0] = starts[0]
        units = tuple(tuple(rest[a:b]) for a, b in pairwise(edges))
        return Window(previous, units, tuple(rest[begin:]))

    def _chunks(self, seq: int) -> int:
        """Chunks of an append, as the encoder got them."""
        heard = self._session.heard.get(seq)
        return 1 if heard is None else max(1, heard.samples // UNIT_SAMPLES)


def split_context(
    whole: Sequence[Item], opening: Opening
) -> tuple[list[Item], tuple[int, ...], list[Item]]:
    """A whole prompt's context, the previous text in it, and what comes behind the context."""
    prefix, suffix = list(opening.prefix_ids), list(opening.suffix_ids)
    begin = len(prefix) if list(whole[: len(prefix)]) == prefix else 0
    end = index_of_run(whole, suffix, begin)
    if end is None:
        return [], (), list(whole)
    marker = list(opening.marker_ids)
    text = list(whole[begin:end])
    if opening.reference_positions and text and isinstance(text[0], RowsOf):
        del text[0]
    if marker and text[: len(marker)] == marker:
        text = text[len(marker) :]
    behind = end + len(suffix)
    previous = tuple(item for item in text if isinstance(item, int))
    return list(whole[:behind]), previous, list(whole[behind:])


def changed_prompts(session: TapedSession, vocabulary: Vocabulary) -> list[str]:
    """Prompts with other rows or units than there were: what the recorded schemas cannot show."""
    found: list[str] = []
    for step in steps_of(session, vocabulary):
        seq = step.unit.seq
        heard = session.heard.get(seq)
        rows = tuple(item for item in step.window.pending if isinstance(item, RowsOf))
        if heard is not None and rows != heard.rows:
            found.append(f"unit {seq}: its rows are not those that the encoder gave")
        if step.changed:
            found.append(f"unit {seq}: an earlier unit in its prompt is not what it was")
    return found


def _index_of(items: Sequence[Item], wanted: int) -> int:
    return next((index for index, item in enumerate(items) if item == wanted), len(items))


def index_of_run(items: Sequence[Item], run: Sequence[int], start: int = 0) -> int | None:
    """Where `run` stands in items, from `start` on."""
    for index in range(start, len(items) - len(run) + 1):
        if list(items[index : index + len(run)]) == list(run):
            return index
    return None


def require_plain_window(opening: Opening) -> None:
    """Raises NotExpressible for options that the recorded schema does not know."""
    window = opening.window
    if window.hysteresis_units != 1 or window.boundary != "unit":
        raise NotExpressible("hysteresisUnits and boundary are not part of the recorded schema")


def planner_session(session: TapedSession, vocabulary: Vocabulary) -> dict[str, Any]:
    """One line of `planner_sessions`. Raises NotExpressible."""
    opening, window = session.opening, session.opening.window
    require_plain_window(opening)
    prefix_tokens = len(opening.prefix_ids) + opening.reference_positions
    steps = steps_of(session, vocabulary)
    pairs = list(pairwise(steps))
    return {
        "id": opening.session,
        "policy": {
            "mode": window.mode,
            "basic_high": window.basic_high,
            "basic_low": window.basic_low,
            "context_previous_max": window.context_previous_max,
            "context_max_units": window.context_max_units,
            "max_model_len": opening.max_model_tokens,
            "sampled_tokens_per_step": 1,
        },
        "layout": {
            "prefix_tokens": prefix_tokens,
            "suffix_ids_len": len(opening.suffix_ids),
            "marker_ids": list(opening.marker_ids),
            "special_ids": sorted(vocabulary.special_ids),
            "context_reserve": prefix_tokens + len(opening.suffix_ids),
        },
        "opening_prompt_len": steps[0].unit.prompt_tokens,
        "appends": [_append(before, step) for before, step in pairs],
        "expected": [_expected(step, off=window.mode == "off") for _, step in pairs],
    }


def _append(before: Step, step: Step) -> dict[str, Any]:
    answer = before.unit.answer.emitted_ids
    return {
        "seq": step.unit.seq,
        "num_prompt_before": before.unit.prompt_tokens,
        "generated_ids": list(answer[:-1]),
        "terminator": answer[-1],
        "update_len": step.update_tokens,
        "final": False,
    }


def _expected(step: Step, *, off: bool) -> dict[str, Any]:
    length, slides = step.unit.prompt_tokens, step.slides
    expected: dict[str, Any] = {
        "action": "rebuild" if slides else "extend",
        "drop_units": len(step.dropped),
        "dropped_tokens": sum(map(tokens_in, step.dropped)),
        "previous_ids": list(step.window.previous) if slides else None,
        "replacement_len": length if slides else None,
        "open_start_after": None if off else length - tokens_in(step.window.pending),
        "retained_unit_lens": [] if off else [tokens_in(unit) for unit in step.window.units],
        "prompt_len_after": length,
    }
    if step.unit.whole is not None and not slides:
        expected["note"] = "the stream was gone: its prompt was fed whole"
    return expected
