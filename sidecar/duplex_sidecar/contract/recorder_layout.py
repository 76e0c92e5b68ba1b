"""What entered the Thinker's cache, in the words of `layout_sessions`.

That schema has a toy tokenizer: 19 control tokens, and one id per character. So context and marker
are written letter by letter, an id of a reply as one character of its own, and the watermarks of a
window move with the context's length, by which every position moves.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from duplex_sidecar.contract.recorder_session import Item, TapedSession, tokens_in
from duplex_sidecar.contract.recorder_tape import Opening, RowsOf
from duplex_sidecar.contract.recorder_window import (
    CLOSURE_TOKENS,
    NotExpressible,
    Step,
    index_of_run,
    require_plain_window,
    split_context,
    steps_of,
)
from duplex_sidecar.model.minicpmo45.constants import SAMPLES_PER_POSITION
from duplex_sidecar.model.minicpmo45.framing import FrameSize, block_kinds
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken, Vocabulary
from duplex_sidecar.window.parts import BlockKind

TOY_TEXT = 1000
TOY_IDS = {token: number for number, token in enumerate(ControlToken, start=1)}
TOY_IMAGE_ROW = 0
SYSTEM_TEXT = "<|im_start|>system\n"
REFERENCE_BEGIN = "\n<|audio_start|>"
REFERENCE_END = "<|audio_end|>"
CONTEXT_END = "<|im_end|>"
USER_BEGIN = "<|im_end|>\n<|im_start|>user\n"
USER_END = "<|im_end|>\n<|im_start|>assistant\n"


def layout_session(session: TapedSession, vocabulary: Vocabulary) -> dict[str, Any]:
    """One line of `layout_sessions`. Raises NotExpressible."""
    opening, window = session.opening, session.opening.window
    require_plain_window(opening)
    steps = steps_of(session, vocabulary)
    writer = _ToyWriter(opening, vocabulary)
    first, _, _ = split_context(steps[0].unit.whole or (), opening)
    reference = opening.reference_positions
    longer = len(writer.context) - len(opening.prefix_ids) - reference - len(opening.suffix_ids)
    return {
        "id": opening.session,
        "policy": {
            "mode": window.mode,
            "basic_high": window.basic_high + longer,
            "basic_low": window.basic_low + longer,
            "context_previous_max": window.context_previous_max,
            "context_max_units": window.context_max_units,
            "max_model_len": None,
            "sampled_tokens_per_step": 1,
        },
        "instructions": writer.instructions,
        "ref_samples": SAMPLES_PER_POSITION * reference if reference else None,
        "initial_user_text": writer.user_text,
        "context_layout": runs(writer.whole(first)),
        "appends": list(_appends(session, steps, writer)),
    }


def _appends(
    session: TapedSession, steps: Sequence[Step], writer: "_ToyWriter"
) -> Iterable[dict[str, Any]]:
    before: Step | None = None
    length = 0
    for step in steps:
        unit = step.unit
        heard = session.heard.get(unit.seq)
        if heard is None:
            raise NotExpressible(f"the tapes lack the input of unit {unit.seq}")
        if not heard.high_resolution and _would_be_cut(heard.frames):
            raise NotExpressible("a session without highResolution is not part of the schema")
        answer = () if before is None else before.unit.answer.emitted_ids
        if unit.whole is not None and (step.slides or before is None):
            entered = writer.whole(unit.whole)
            length = len(entered)
        else:
            # A stream that was gone is fed whole; what is new in it is at its end all the same.
            closing = step.closed[-CLOSURE_TOKENS:]
            new = unit.appended if unit.whole is None else (*closing, *step.window.pending)
            entered = writer.inside(new)
            length += len(answer[:-1]) + len(entered)
            if unit.whole is not None:
                length = len(writer.whole(unit.whole))
        opens = before is None
        slots = len(entered) if opens else step.update_tokens
        yield {
            "seq": unit.seq,
            "samples": heard.samples - heard.padding_samples,
            "frames": [list(frame) for frame in heard.frames],
            "final": False,
            "completed_ids": writer.inside(answer[:-1]),
            "completed_terminator": None if opens else writer.inside(answer[-1:])[0],
            "expected": {
                "slots": slots,
                "action": "open" if opens else ("rebuild" if step.slides else "extend"),
                "drop_units": len(step.dropped),
                "prompt_len_after": length,
                "worker_len": len(entered),
                "layout": runs(entered),
                "lengths_agree": True,
            },
        }
        before = step


def _would_be_cut(frames: Sequence[tuple[int, int]]) -> bool:
    """Whether the public rule cuts one of the frames into slices."""
    return BlockKind.SLICE in block_kinds([FrameSize(*frame) for frame in frames])


class _ToyWriter:
    """Writes items with the toy tokenizer's ids. context: the session context, written."""

    def __init__(self, opening: Opening, vocabulary: Vocabulary) -> None:
        self._opening = opening
        self._names = {id_: token for token, id_ in vocabulary.control_ids.items()}
        self._special = vocabulary.special_ids

        def text(ids: Iterable[int]) -> str:
            return b"".join(vocabulary.token_bytes[id_] for id_ in ids).decode(errors="replace")

        prefix, suffix = text(opening.prefix_ids), text(opening.suffix_ids)
        self._prefix, self._suffix = toy_encode(prefix), toy_encode(suffix)
        self._marker = toy_encode(text(opening.marker_ids))
        self._reference = [TOY_IDS[ControlToken.UNIT]] * opening.reference_positions
        self.context = [*self._prefix, *self._reference, *self._suffix]
        if not prefix.startswith(SYSTEM_TEXT):
            raise NotExpressible("its context is not of the recorded form")
        self.instructions = prefix.removeprefix(SYSTEM_TEXT)
        if self._reference:
            self.instructions = self.instructions.removesuffix(REFERENCE_BEGIN)
            suffix = suffix.removeprefix(REFERENCE_END)
        self.user_text: str | None = None
        if suffix.startswith(USER_BEGIN) and suffix.endswith(USER_END):
            self.user_text = suffix.removeprefix(USER_BEGIN).removesuffix(USER_END)
        elif suffix != CONTEXT_END:
            raise NotExpressible("its context is not of the recorded form")

    def whole(self, items: Sequence[Item]) -> list[int]:
        """A whole prompt. What is not where the context has to be is written as it stands."""
        opening = self._opening
        written: list[int] = []
        rest = list(items)
        if rest[: len(opening.prefix_ids)] == list(opening.prefix_ids):
            written += self._prefix
            rest = rest[len(opening.prefix_ids) :]
            if self._reference and rest and isinstance(rest[0], RowsOf):
                written += [TOY_IDS[ControlToken.UNIT]] * rest[0].rows
                del rest[0]
        end = index_of_run(rest, opening.suffix_ids)
        if end is None:
            return [*written, *self.inside(rest)]
        text, marker = rest[:end], list(opening.marker_ids)
        if marker and text[: len(marker)] == marker:
            written += self._marker
            text = text[len(marker) :]
        behind = rest[end + len(opening.suffix_ids) :]
        return [*written, *self.inside(text), *self._suffix, *self.inside(behind)]

    def inside(self, items: Sequence[Item]) -> list[int]:
        """Units, or parts of them."""
        written: list[int] = []
        opened: ControlToken | None = None
        for item in items:
            if isinstance(item, RowsOf):
                image = opened in (ControlToken.IMAGE, ControlToken.SLICE)
                id_ = TOY_IMAGE_ROW if image else TOY_IDS[ControlToken.AUDIO]
                written += [id_] * tokens_in((item,))
                continue
            opened = self._names.get(item)
            if opened is None and item in self._special:
                raise NotExpressible(f"the model said {item}, a special id without a control name")
            written.append(TOY_TEXT + item if opened is None else TOY_IDS[opened])
        return written


def toy_encode(text: str) -> list[int]:
    """Control tokens are 1 to 19 by name, every other character is 1000 and its code point."""
    ids: list[int] = []
    while text:
        token = next((token for token in ControlToken if text.startswith(token.value)), None)
        ids.append(TOY_TEXT + ord(text[0]) if token is None else TOY_IDS[token])
        text = text[1 if token is None else len(token.value) :]
    return ids


def runs(ids: Iterable[int]) -> list[list[int]]:
    """Run-length coded: [[id, count], ...]."""
    coded: list[list[int]] = []
    for id_ in ids:
        if coded and coded[-1][0] == id_:
            coded[-1][1] += 1
        else:
            coded.append([id_, 1])
    return coded
