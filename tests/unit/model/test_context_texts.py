"""The session context and the ids of the layout."""

import pytest

from duplex_sidecar.contract.window_cases import TOY_CONTROL_IDS, toy_encode
from duplex_sidecar.model.minicpmo45.context import build_context, layout_ids_of
from duplex_sidecar.model.minicpmo45.vocabulary import REQUIRED_TOKENS, ControlToken

pytestmark = pytest.mark.unit


def test_plain_context() -> None:
    context = build_context(None, None, None, toy_encode, {1, 2})
    assert context.prefix_text == "<|im_start|>system\nStreaming Omni Conversation."
    assert context.suffix_text == "<|im_end|>"
    assert context.window.context_tokens == len(context.prompt.prefix_ids) + 1
    assert context.window.marker_tokens == len("\n\nprevious: ")
    assert not context.opens_response


def test_reference_voice_counts_whole_positions() -> None:
    context = build_context("x", 16_000 + 1_599, "hi", toy_encode, frozenset())
    assert context.prompt.reference_positions == 10
    assert context.prefix_text.endswith("x\n<|audio_start|>")
    assert context.suffix_text == (
        "<|audio_end|><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert context.window.prefix_tokens == len(context.prompt.prefix_ids) + 10
    assert context.opens_response


def test_layout_ids_fall_back_as_the_model_does() -> None:
    ids = layout_ids_of(TOY_CONTROL_IDS, 0)
    assert (ids.audio_slot, ids.image_slot, ids.reference_slot) == (11, 0, 1)
    bare = layout_ids_of({token: TOY_CONTROL_IDS[token] for token in REQUIRED_TOKENS}, None)
    assert (bare.audio_slot, bare.image_slot, bare.image) == (2, None, None)
    no_unknown = layout_ids_of(TOY_CONTROL_IDS, None)
    assert no_unknown.image_slot == TOY_CONTROL_IDS[ControlToken.IMAGE]
