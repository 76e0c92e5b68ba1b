"""Prompts as parts: order, names of media, lengths."""

import pytest

from duplex_api.window import WindowMode
from duplex_sidecar.window.parts import (
    BlockKind,
    HistoryUnit,
    LayoutIds,
    MediaKind,
    MediaLengths,
    MediaPart,
    PromptContext,
    TextPart,
    UnitInput,
    parts_length,
)
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.render import (
    RenderError,
    RenderErrorCode,
    append_parts,
    history_parts,
    layout_ids,
    prompt_parts,
    render_append,
    render_prompt,
)
from duplex_sidecar.window.restate import restate
from duplex_sidecar.window.state import (
    Directive,
    PlanLimits,
    Rebuild,
    WindowAppend,
    WindowLayout,
    WindowState,
)

pytestmark = pytest.mark.unit

IDS = LayoutIds(
    unit=1,
    unit_end=2,
    audio_slot=11,
    reference_slot=1,
    image_slot=0,
    image=12,
    image_end=13,
    slice=14,
    slice_end=15,
)
LENGTHS = MediaLengths(audio_chunk=10, image_block=64)
CONTEXT = PromptContext((16, 90), 4, (19, 17), (70, 71))
PLAIN_UNIT = HistoryUnit(UnitInput(1, 1, ()), (40, 41), 8)
PENDING = UnitInput(2, 1, ())


def test_an_append_begins_with_the_closure_of_the_one_before() -> None:
    assert render_append(PENDING, PLAIN_UNIT, IDS, LENGTHS, 13) == (
        TextPart((8, 2, 1)),
        MediaPart(MediaKind.AUDIO, 2, 0, 10),
    )


def test_frames_come_before_the_audio_and_chunks_are_closed_inside() -> None:
    unit = UnitInput(5, 2, (BlockKind.SOURCE, BlockKind.SLICE))
    assert append_parts(unit, None, IDS, LENGTHS) == (
        TextPart((1, 12)),
        MediaPart(MediaKind.VISION, 5, 0, 64),
        TextPart((13, 14)),
        MediaPart(MediaKind.VISION, 5, 1, 64),
        TextPart((15,)),
        MediaPart(MediaKind.AUDIO, 5, 0, 10),
        TextPart((2, 1)),
        MediaPart(MediaKind.AUDIO, 5, 1, 10),
    )


def test_a_whole_prompt_has_previous_between_prefix_and_suffix() -> None:
    parts = render_prompt(CONTEXT, (50,), (PLAIN_UNIT,), PENDING, IDS, LENGTHS, 11 + 15 + 11)
    assert parts[:4] == (
        TextPart((16, 90)),
        MediaPart(MediaKind.REFERENCE, 0, 0, 4),
        TextPart((70, 71, 50, 19, 17, 1)),
        MediaPart(MediaKind.AUDIO, 1, 0, 10),
    )
    assert parts[4:] == (TextPart((40, 41, 8, 2, 1)), MediaPart(MediaKind.AUDIO, 2, 0, 10))


def test_without_previous_there_is_no_marker() -> None:
    parts = prompt_parts(CONTEXT, (), (), PENDING, IDS, LENGTHS)
    assert layout_ids(parts, IDS)[:5] == [[16, 1], [90, 1], [1, 4], [19, 1], [17, 1]]


def test_a_stream_opened_ahead_is_extended_to_the_same_prompt() -> None:
    ahead = history_parts(CONTEXT, (50,), (PLAIN_UNIT,), IDS, LENGTHS)
    rest = append_parts(PENDING, None, IDS, LENGTHS)
    whole = prompt_parts(CONTEXT, (50,), (PLAIN_UNIT,), PENDING, IDS, LENGTHS)
    assert layout_ids((*ahead, *rest), IDS) == layout_ids(whole, IDS)


def test_another_length_than_planned_is_refused() -> None:
    unfinished = HistoryUnit(UnitInput(1, 1, ()), (), None)
    with pytest.raises(RenderError, match="12 positions where 13") as caught:
        render_append(PENDING, unfinished, IDS, LENGTHS, 13)
    assert caught.value.code is RenderErrorCode.LENGTH_MISMATCH
    with pytest.raises(RenderError) as caught:
        render_prompt(CONTEXT, (), (unfinished,), PENDING, IDS, LENGTHS, 32)
    assert caught.value.code is RenderErrorCode.LENGTH_MISMATCH


def test_frames_without_image_tokens_are_refused() -> None:
    bare = LayoutIds(1, 2, 11, 1, None, None, None, None, None)
    with pytest.raises(RenderError) as caught:
        append_parts(UnitInput(2, 1, (BlockKind.SOURCE,)), None, bare, LENGTHS)
    assert caught.value.code is RenderErrorCode.NO_IMAGE_TOKENS


def test_the_append_1_11_2_1_11_is_one_history_unit() -> None:
    """Two chunks of a small model: [1, 11, 2, 1, 11] is replaced by a prompt of length 2."""
    lengths = MediaLengths(audio_chunk=1, image_block=64)
    unit = UnitInput(1, 2, ())
    first = append_parts(unit, None, IDS, lengths)
    assert layout_ids(first, IDS) == [[1, 1], [11, 1], [2, 1], [1, 1], [11, 1]]
    layout = WindowLayout(0, 0, 0, 0, frozenset())
    policy = WindowPolicy(WindowMode.BASIC, 9, 1, 5, 5)
    append = WindowAppend(2, 4, (40,))
    decision, _ = plan(
        WindowState(5, None, (), 0, ()), append, policy, layout, PlanLimits(None), Directive()
    )
    assert isinstance(decision, Rebuild)
    assert (decision.drop_units, decision.dropped_tokens) == (1, 8)
    empty = PromptContext((), 0, (), ())
    parts = render_prompt(
        empty, (), (), UnitInput(2, 1, ()), IDS, lengths, decision.replacement_tokens
    )
    assert parts_length(parts) == 2


def test_a_truncated_unit_counts_as_it_is_rendered() -> None:
    layout = WindowLayout(8, 6, 2, 2, frozenset({8}))
    policy = WindowPolicy(WindowMode.CONTEXT, 8000, 6000, 500, 24)
    state = WindowState(8, None, (), 0, ())
    heard = HistoryUnit(UnitInput(1, 1, ()), (40,), 8)
    after = restate(state, policy, layout, (heard,), PENDING, IDS, LENGTHS)
    assert after.units[0].tokens == 14
    assert after.units[0].spoken_ids == (40,)
    assert after.open_start == 8 + 14
    assert after.prompt_tokens == 8 + 14 + 11
    off = WindowPolicy(WindowMode.OFF, 8000, 6000, 500, 24)
    assert restate(state, off, layout, (heard,), PENDING, IDS, LENGTHS) == WindowState(
        8 + 14 + 11, None, (), 0, ()
    )
