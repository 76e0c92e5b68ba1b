"""Session context of MiniCPM-o 4.5 (contract section A) and what the window needs of it (B).

The texts are made here once; ids come from the checkpoint's own tokenizer, so that prompt,
reservation, marker and special ids have one source.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final

import msgspec

from duplex_sidecar.model.minicpmo45.constants import (
    AUDIO_POSITIONS_PER_CHUNK,
    DEFAULT_INSTRUCTIONS,
    IMAGE_ROWS,
    PREVIOUS_MARKER,
    SAMPLES_PER_POSITION,
)
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken
from duplex_sidecar.window.parts import LayoutIds, MediaLengths, PromptContext
from duplex_sidecar.window.state import WindowLayout

MEDIA_LENGTHS: Final = MediaLengths(audio_chunk=AUDIO_POSITIONS_PER_CHUNK, image_block=IMAGE_ROWS)

Encode = Callable[[str], Sequence[int]]
"""Text to ids: control tokens in the text become their ids, nothing is added around it."""


class SessionContext(msgspec.Struct, frozen=True):
    """The context of one session, ahead of its first unit.

    prefix_text, suffix_text: what is tokenized; the reference voice's rows stand between the prefix
    text and (marker, previous and) the suffix. opens_response: seeded text opened the assistant's
    block, so the policy starts with its turn open and speech pending.
    """

    prefix_text: str
    suffix_text: str
    prompt: PromptContext
    window: WindowLayout
    opens_response: bool


def build_context(
    instructions: str | None,
    reference_samples: int | None,
    user_text: str | None,
    encode: Encode,
    special_ids: Set[int],
) -> SessionContext:
    """The context for these instructions, this reference voice and this seeded user text.

    reference_samples: length of the reference clip at 16 kHz, None without one; it counts in whole
    positions of 1,600 samples, a rest is cut off. special_ids: control tokens and the tokenizer's
    own specials.
    """
    has_reference = reference_samples is not None
    reference_positions = (reference_samples or 0) // SAMPLES_PER_POSITION
    prefix_text = _prefix_text(instructions, has_reference)
    suffix_text = _suffix_text(user_text, has_reference)
    prompt = PromptContext(
        prefix_ids=tuple(encode(prefix_text)),
        reference_positions=reference_positions,
        suffix_ids=tuple(encode(suffix_text)),
        marker_ids=tuple(encode(PREVIOUS_MARKER)),
    )
    prefix_tokens = len(prompt.prefix_ids) + reference_positions
    return SessionContext(
        prefix_text=prefix_text,
        suffix_text=suffix_text,
        prompt=prompt,
        window=WindowLayout(
            context_tokens=prefix_tokens + len(prompt.suffix_ids),
            prefix_tokens=prefix_tokens,
            suffix_tokens=len(prompt.suffix_ids),
            marker_tokens=len(prompt.marker_ids),
            special_ids=frozenset(special_ids),
        ),
        opens_response=bool(user_text),
    )


def layout_ids_of(control_ids: Mapping[ControlToken, int], unknown_id: int | None) -> LayoutIds:
    """Ids of the layout. `control_ids` has at least the required tokens (`Vocabulary` checks it);
    unknown_id: the tokenizer's unk id, None if it has none."""
    unit_end = control_ids[ControlToken.UNIT_END]
    image = control_ids.get(ControlToken.IMAGE)
    return LayoutIds(
        unit=control_ids[ControlToken.UNIT],
        unit_end=unit_end,
        audio_slot=control_ids.get(ControlToken.AUDIO, unit_end),
        reference_slot=control_ids[ControlToken.UNIT],
        image_slot=image if unknown_id is None else unknown_id,
        image=image,
        image_end=control_ids.get(ControlToken.IMAGE_END),
        slice=control_ids.get(ControlToken.SLICE),
        slice_end=control_ids.get(ControlToken.SLICE_END),
    )


def _prefix_text(instructions: str | None, has_reference: bool) -> str:
    text = f"{ControlToken.IM_START}system\n{instructions or DEFAULT_INSTRUCTIONS}"
    return f"{text}\n{ControlToken.AUDIO_START}" if has_reference else text


def _suffix_text(user_text: str | None, has_reference: bool) -> str:
    start, end = ControlToken.IM_START, ControlToken.IM_END
    text = f"{ControlToken.AUDIO_END if has_reference else ''}{end}"
    if user_text:
        text += f"\n{start}user\n{user_text}{end}\n{start}assistant\n"
    return text
